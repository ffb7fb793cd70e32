"""Threads for work on text and token ids that would block the event loop: small requests never wait for large ones."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from tokasaurus.monitoring.cores import available_cores

Params = ParamSpec("Params")
Result = TypeVar("Result")

NUM_SMALL_THREADS = 4
LARGE_SIZE = 1 << 17
"""Work of this size is large, in bytes of a body, characters of texts, or token ids and logprobs of an answer: tens
of milliseconds."""


class TextThreads:
    """Two pools of threads. The tokenizer releases the GIL, so several threads can use several cores."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(NUM_SMALL_THREADS, thread_name_prefix="text")
        # Few, since most of their time they hold the GIL, which the event loop needs.
        self._large = ThreadPoolExecutor(max(1, available_cores() // 2), thread_name_prefix="large text")

    async def run(
        self, size: int, function: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Result:
        """The function's result, from a thread of the pool for work of this size; see LARGE_SIZE."""
        pool = self._large if size >= LARGE_SIZE else self._small
        return await asyncio.get_running_loop().run_in_executor(pool, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Cancels the work that has not begun, and waits for none."""
        for pool in (self._small, self._large):
            pool.shutdown(wait=False, cancel_futures=True)
