"""What requests may take of the server: memory for bodies, shares of batches, threads for text, and pauses.

A pause of the event loop, such as a full garbage collection, delays every stream.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from tokasaurus.monitoring.cores import available_cores
from tokasaurus.server.errors import TooManyBodies
from tokasaurus.workers import num_replicas

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig


DAY_SECONDS = 86_400

MAX_RUNNING_BATCHES = 64
"""Batches whose lines run together, each with an open file; others wait for their turn, in the order of arrival."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of batches that no flag sets by itself."""

    max_sequences_in_engine: int
    """Sequences of batches that the engine may have; a line more may begin."""
    max_running_batches: int = MAX_RUNNING_BATCHES


def batch_limits(config: ServerConfig) -> BatchLimits:
    """Limits by which more sequences wait than run: the engine always has one to admit."""
    return BatchLimits(max_sequences_in_engine=2 * config.max_seqs_per_forward * num_replicas(config) + 256)


class BodyBytes:
    """Bytes of all bodies that are not parsed yet, up to `max_bytes`. Used by the event loop only."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    @contextmanager
    def of_one_body(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that counts further bytes of a body, until the context ends. It raises TooManyBodies."""
        num_own_bytes = 0

        def add(num_bytes: int) -> None:
            nonlocal num_own_bytes
            if self._num_bytes + num_bytes > self._max_bytes:
                limit = f"{self._max_bytes} bytes"
                raise TooManyBodies(f"the bodies that the server is receiving may have at most {limit} together")
            self._num_bytes += num_bytes
            num_own_bytes += num_bytes

        try:
            yield add
        finally:
            self._num_bytes -= num_own_bytes


Params = ParamSpec("Params")
Result = TypeVar("Result")

NUM_SMALL_THREADS = 4
NUM_THREADS_APART = 2
INLINE_SIZE = 1 << 10
"""Work up to this size, in the units of LARGE_SIZE, takes at most 0.2 ms, as long as the way to a thread and back."""
LARGE_SIZE = 1 << 17
"""Work of this size is large, in bytes of a body, characters of texts, or token ids and logprobs of an answer: tens
of milliseconds."""


class TextThreads:
    """Three pools of threads. The tokenizer releases the GIL, so several threads can use several cores."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(NUM_SMALL_THREADS, thread_name_prefix="text")
        # Few, since most of their time they hold the GIL, which the event loop needs.
        self._large = ThreadPoolExecutor(max(1, available_cores() // 2), thread_name_prefix="large text")
        self._apart = ThreadPoolExecutor(NUM_THREADS_APART, thread_name_prefix="text apart")

    async def run(
        self, size: int, function: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Result:
        """The function's result, from a thread of the pool for work of this size; see LARGE_SIZE."""
        pool = self._large if size >= LARGE_SIZE else self._small
        return await asyncio.get_running_loop().run_in_executor(pool, lambda: function(*args, **kwargs))

    async def run_short(self, size: int, function: Callable[[], Result]) -> Result:
        """The function's result, from `run`; small work, see INLINE_SIZE, is done at once, on the event loop. Not for
        the code of a model's repository, which may loop."""
        return function() if size <= INLINE_SIZE else await self.run(size, function)

    async def run_apart(
        self, _size: int, function: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Result:
        """The function's result, from a pool for work that waits for the program of a client: it delays only other such
        work."""
        return await asyncio.get_running_loop().run_in_executor(self._apart, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Cancels the work that has not begun, and waits for none."""
        for pool in (self._small, self._large, self._apart):
            pool.shutdown(wait=False, cancel_futures=True)


CHECK_INTERVAL_S = 10.0
LONGEST_WAIT_S = 600.0
# Objects made before a collection of the youngest generation, and such collections before one of the middle generation:
# it visits at most 100,000 objects, which takes about 10 ms.
_THRESHOLDS = (10_000, 10)
_NEVER = 1 << 30


def collect_garbage_when_idle(is_idle: Callable[[], bool]) -> None:
    """Makes full collections only while `is_idle`, or at least every LONGEST_WAIT_S, for the rest of the process.

    Python would make one whenever the number of objects has grown by a quarter: with a request of 65,536 sequences it
    takes up to 600 ms, again and again. Nearly all objects are freed without it, and of the cycles, those that live
    shortly by collections of the younger generations. Objects that exist now are never visited again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS, _NEVER)
    threading.Thread(target=_collect, args=(is_idle,), name="garbage", daemon=True).start()


def _collect(is_idle: Callable[[], bool]) -> None:
    waiting = threading.Event()
    waited_s = 0.0
    is_first = True
    while True:
        waiting.wait(CHECK_INTERVAL_S)
        waited_s += CHECK_INTERVAL_S
        if is_idle() or waited_s >= LONGEST_WAIT_S:
            gc.collect()
            waited_s = 0.0
            if is_first and is_idle():  # the libraries that load in the background are there
                gc.freeze()
                is_first = False
