"""`toka ping`: one request to a running server, printed as the answer arrives, with its timing."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tokasaurus.commands.running_server import AddressConfig, NotAnswered, client_of, explained, stream_of
from tokasaurus.flags import count, flag, given_text

if TYPE_CHECKING:
    import httpx


class PingConfig(AddressConfig):
    """The flags of `toka ping`, checked by `finalize`."""

    prompt: str | None = flag(
        None, "text to send; @FILE sends a file's, - standard input's", none_means="required", heading="request"
    )
    chat: bool = flag(False, "send the prompt as a chat message instead of text to continue")
    max_tokens: int | None = count(None, "maximum tokens per answer", none_means="server default")
    n: int = count(1, "number of answers; several are printed when all are complete")
    temperature: float | None = flag(
        None, "0 picks the most likely token; at 1, small models ramble", minimum=0, none_means="the model's own"
    )
    model: str = flag("default", "model name; default is the served model", variables=("TOKA_SERVED_MODEL_NAME",))

    def further_errors(self) -> Iterator[str]:
        if self.prompt is None:
            yield "prompt is missing: toka ping prompt='tell me a joke'"
        yield from super().further_errors()


def ping(config: PingConfig, _words: list[str]) -> int:
    """Print the answers, then times and token count. Returns the exit code. Raises NotAnswered."""
    prompt = given_text("prompt", config.prompt or "")
    started = 0.0
    first_s: float | None = None
    answers = [""] * config.n
    num_tokens = 0
    is_begun = False
    try:
        with client_of(config) as client:
            started = time.perf_counter()
            for index, text, num_so_far in _answer(client, config, prompt):
                num_tokens = max(num_tokens, num_so_far)
                if text and first_s is None:
                    first_s = time.perf_counter() - started
                answers[index] += text
                if config.n == 1:
                    is_begun = is_begun or text != ""
                    print(text, end="", flush=True)
    except (NotAnswered, KeyboardInterrupt) as error:
        if is_begun:  # a part of the answer is in an unfinished line
            print(flush=True)
        raise NotAnswered(str(error) or "stopped") from None
    seconds = time.perf_counter() - started
    if config.n > 1:
        print("\n".join(f"[{number}] {answer}" for number, answer in enumerate(answers, start=1)), end="")
    rate = f", {num_tokens / seconds:.1f} tokens/s" if num_tokens else ""
    first = "" if first_s is None else f", first after {first_s:.2f} s"
    print(f"\n\n{seconds:.2f} s, {num_tokens} tokens{rate}{first}")
    return 0


def _answer(client: "httpx.Client", config: PingConfig, prompt: str) -> Iterator[tuple[int, str, int]]:
    """Index of an answer, its next text, and the tokens of all answers, which is 0 until the server tells. Raises
    NotAnswered."""
    options: dict[str, Any] = {"model": config.model, "n": config.n}
    if config.temperature is not None:
        options["temperature"] = config.temperature
    if config.max_tokens is not None:
        options["max_tokens"] = config.max_tokens
    options |= {"stream": True, "stream_options": {"include_usage": True}}
    path, asked = "completions", dict[str, Any](prompt=prompt)
    if config.chat:
        path, asked = "chat/completions", {"messages": [{"role": "user", "content": prompt}]}
    with explained(config):
        for chunk in stream_of(client, path, asked | options):
            num_tokens = (chunk.get("usage") or {}).get("completion_tokens") or 0
            for choice in chunk["choices"]:
                text = choice["delta"].get("content") if config.chat else choice["text"]
                yield choice["index"], text or "", num_tokens
            if not chunk["choices"]:
                yield 0, "", num_tokens
