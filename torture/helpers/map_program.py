"""The program that `torture.maps` kills: `python -m torture.helpers.map_program MODEL INPUT OUTPUT LOG`.

It writes to LOG which rows it sends, and which it has stored: "s 17", "d 17", one a line."""

import os
import sys
from collections.abc import Sequence
from typing import Any

import orjson

from tokasaurus import LLM, Sampling
from tokasaurus.library.blocking import BulkSession
from tokasaurus.library.requests import Answer, RequestLine

FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "kv_cache_num_tokens": 65536,
    "max_seqs_per_forward": 256,
    "use_hydragen": False,
}


def log_rows(path: str) -> None:
    """From now on, what every session sends and has given back is logged."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    exchange = BulkSession.exchange
    given: list[str] = []

    def logged(
        self: BulkSession, lines: Sequence[RequestLine], is_last: bool = False, timeout_s: float | None = None
    ) -> list[Answer]:
        # whoever asks for more has stored the answers before
        events = [f"d {row}" for row in given] + [f"s {_row_of(line)}" for line in lines]
        if events:
            os.write(log, ("\n".join(events) + "\n").encode())
        answers = exchange(self, lines, is_last, timeout_s)
        given[:] = [_row_of(answer.line) for answer in answers]
        return answers

    BulkSession.exchange = logged  # type: ignore[method-assign]


def _row_of(line: RequestLine) -> str:
    """The prompt's first word."""
    return str(orjson.loads(line.body)["prompt"]).split()[0]


def main() -> None:
    model, source, output, log = sys.argv[1:]
    log_rows(log)
    with LLM(model, show=False, **FLAGS) as llm:
        print("ready", flush=True)
        sampling = Sampling(max_tokens=2, temperature=0)
        print(llm.map(source, output, prompt="{id} {text}", key="id", sampling=sampling, progress=False), flush=True)


if __name__ == "__main__":
    main()
