"""Constant load of whole requests, streams and large answers, each compared with what it was without deaths."""

import http.client
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from tests.end_to_end.helpers.completions import Streamed, complete, make_body, random_ids, stream

MAX_REPLAYS = 3
"""So often the server runs a request again; after another death its client is told."""
WHOLE_TOKENS = 300
STREAM_TOKENS = 500
LATE_STREAM_TOKENS = 40


@dataclass(frozen=True)
class _Large:
    """A request whose answer has the log-probabilities of a long prompt."""

    prompt_tokens: int
    n: int
    num_top: int


_LARGE = (_Large(4096, 8, 20), _Large(8000, 1, 160))
MAX_TOP = 160
LARGEST_UPDATE_BYTES = 8000 * (4 + 4 + 160 * (4 + 4))
"""Of the second one's arrays, which arrive in one message: logprob and rank of each token, ids and logprobs."""
NUM_NUMBERS = {"whole": 8, "stream": 8, "late stream": 8, "large": len(_LARGE)}
"""Different requests by kind."""
NUM_THREADS = {"whole": 4, "stream": 3, "late stream": 6, "large": 1}
"""Eight sequences of a step are taken by the whole requests alone, so that all others wait for a part of their time."""


class EngineLoad:
    """Clients of a server whose engine dies. `num_deaths` must be raised before each death."""

    def __init__(self, port: int) -> None:
        self.num_deaths = 0
        self.outcomes: Counter[tuple[str, str]] = Counter()
        """Requests by kind and outcome; "whole after a death" means that it came while the request was open."""
        self.faults: list[str] = []
        """What was wrong: a line for each request."""
        self._port = port
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._expected = {
            (kind, number): self._learn(kind, number) for kind, count in NUM_NUMBERS.items() for number in range(count)
        }

    @contextmanager
    def running(self) -> Iterator[None]:
        """At the end, waits for the answers to all open requests."""
        threads = [(kind, index) for kind, count in NUM_THREADS.items() for index in range(count)]
        with ThreadPoolExecutor(len(threads)) as pool:
            clients = [pool.submit(self._run, kind, index) for kind, index in threads]
            try:
                yield
            finally:
                self._is_over.set()
        for client in clients:
            client.result()

    def count(self, outcome: str, kind: str | None = None) -> int:
        return sum(count for (found, name), count in self.outcomes.items() if name == outcome and kind in (None, found))

    def _learn(self, kind: str, number: int) -> list[str]:
        if kind in ("stream", "late stream"):
            streamed = stream(self._port, _body(kind, number))
            assert streamed.is_done, streamed
            return [streamed.text]
        return _whole_texts(self._port, kind, number)

    def _run(self, kind: str, index: int) -> None:
        """One client: asks again and again, each time with another number."""
        number = index
        while not self._is_over.is_set():
            number = (number + 1) % NUM_NUMBERS[kind]
            deaths_before = self.num_deaths
            try:
                outcome = self._ask(kind, number, deaths_before)
            except (OSError, http.client.HTTPException, AssertionError, LookupError) as error:
                outcome = "FAULT"
                with self._lock:
                    num_deaths = self.num_deaths - deaths_before
                    self.faults.append(f"{kind} {number}, {num_deaths} deaths: {type(error).__name__} {error}"[:400])
            with self._lock:
                self.outcomes[kind, outcome] += 1
            if kind == "large":
                self._is_over.wait(1)

    def _ask(self, kind: str, number: int, deaths_before: int) -> str:
        """The outcome. Raises AssertionError if it is a wrong one."""
        expected = self._expected[kind, number]
        if kind in ("whole", "large"):
            try:
                texts = _whole_texts(self._port, kind, number)
            except _Died:
                assert self.num_deaths - deaths_before > MAX_REPLAYS, "engine_died, though the engine died rarely"
                return "died too often"
            assert texts == expected, f"another text: {texts} instead of {expected}"
        else:
            streamed = stream(self._port, _body(kind, number))
            if streamed.error_codes:
                self._check_error(streamed, expected[0], self.num_deaths - deaths_before)
                return "engine_died"
            assert streamed.is_done, f"the stream ended without [DONE]: {streamed}"
            assert streamed.text == expected[0], f"another text: {streamed.text!r} instead of {expected[0]!r}"
        return "right" if self.num_deaths == deaths_before else "right after a death"

    @staticmethod
    def _check_error(streamed: Streamed, expected: str, num_deaths: int) -> None:
        assert streamed.error_codes == ["engine_died"], streamed
        assert streamed.is_error_last, "events follow the error"
        assert num_deaths > 0, "engine_died, though the engine lived"
        assert streamed.num_events > 0 or num_deaths > MAX_REPLAYS, "engine_died, though nothing had been sent"
        text = streamed.text.rstrip("\ufffd")  # the last character may be incomplete
        assert expected.startswith(text), f"another text: {streamed.text!r} instead of {expected!r}"


class _Died(Exception):
    """The answer is engine_died."""


def _body(kind: str, number: int) -> dict[str, object]:
    match kind:
        case "whole":
            return make_body(number, n=2, max_tokens=WHOLE_TOKENS)
        case "stream":
            return make_body(number, max_tokens=STREAM_TOKENS)
        case "late stream":
            return make_body(number, max_tokens=LATE_STREAM_TOKENS)
    large = _LARGE[number]
    prompt = random_ids(number, large.prompt_tokens)
    return make_body(number, prompt=prompt, n=large.n, max_tokens=4, prompt_logprobs=large.num_top)


def _whole_texts(port: int, kind: str, number: int) -> list[str]:
    """Raises _Died, and AssertionError for any other refusal."""
    answer = complete(port, _body(kind, number))
    if answer.error_code == "engine_died" and answer.status == 500:
        raise _Died
    assert answer.status == 200, f"status {answer.status}: {answer.body}"
    if kind == "large":
        sizes = [len(choice["prompt_logprobs"]) for choice in answer.body["choices"]]
        assert sizes == [_LARGE[number].prompt_tokens] * _LARGE[number].n, f"prompt logprobs of {sizes} tokens"
    return answer.texts
