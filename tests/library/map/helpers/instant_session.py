"""A session that answers at once, in place of a server: the answer to the prompt P is `P → length of P`."""

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from tokasaurus.library.bulk import Progress
from tokasaurus.library.requests import Answer, RequestLine

Respond = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]
"""The body of a request → status and body of its answer."""


def completion(body: dict[str, Any], text: str, reason: str = "stop") -> dict[str, Any]:
    """What a server answers; sample 1 of several is `text #1`."""
    texts = [text] if body.get("n", 1) == 1 else [f"{text} #{index}" for index in range(body["n"])]
    if "messages" in body:
        choices = [
            {"index": index, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
            for index, text in enumerate(texts)
        ]
    else:
        choices = [{"index": index, "text": text, "finish_reason": reason} for index, text in enumerate(texts)]
    return {"choices": choices, "usage": {"prompt_tokens": 3, "completion_tokens": 2 * len(texts)}}


def prompt_of(body: dict[str, Any]) -> str:
    """Of a chat: the texts of its messages."""
    if "messages" in body:
        return "|".join(message["content"] for message in body["messages"])
    return str(body["prompt"])


def respond(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    prompt = prompt_of(body)
    if prompt.startswith("too long"):
        return 400, {"error": {"message": f"{prompt!r} is too long", "type": "invalid_request_error", "code": "length"}}
    return 200, completion(body, f"{prompt} → {len(prompt)}")


class InstantSession:
    """Has the methods of a BulkSession. The newest lines are answered first, and the oldest only when they must be."""

    def __init__(self, max_lines: int = 4096, num_kept: int = 0, respond: Respond = respond) -> None:
        """num_kept: lines that are answered only when no others come."""
        self._max_lines = max_lines
        self._num_kept = num_kept
        self._respond = respond
        self._in_flight: list[RequestLine] = []
        self.sent: list[RequestLine] = []
        self.announced: int | None = None
        self.is_closed = False

    def announce(self, num_lines: int | None) -> None:
        self.announced = num_lines

    def room(self) -> int:
        return self._max_lines - len(self._in_flight)

    def exchange(
        self, lines: Sequence[RequestLine], is_last: bool = False, timeout_s: float | None = None
    ) -> list[Answer]:
        assert len(lines) <= self.room()
        del timeout_s
        self.sent += lines
        self._in_flight += lines
        num_kept = 0 if is_last or not self.room() else self._num_kept
        answered = self._in_flight[num_kept:][::-1]
        del self._in_flight[num_kept:]
        return [self.answer(line) for line in answered]

    def progress(self) -> Progress | None:
        return None

    def answer(self, line: RequestLine) -> Answer:
        return Answer(line, *self._respond(orjson.loads(line.body)))

    def close(self) -> None:
        self.is_closed = True
