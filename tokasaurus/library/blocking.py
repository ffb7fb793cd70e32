"""Clients and sessions for threads that run no event loop: one runs in a thread of its own, which makes the calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

from tokasaurus.library.bulk import AsyncBulkSession, ClientClosed, Progress
from tokasaurus.library.connection import ServerError
from tokasaurus.library.requests import Answer, RequestLine

Value = TypeVar("Value")


class LoopThread:
    """Any thread may call any method. In a forked child there is no such thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.RLock()
        self._is_closed = False
        self._last_tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._serve, name="tokasaurus", daemon=True)
        self._thread.start()

    def run(self, call: Coroutine[Any, Any, Value]) -> Value:
        """The call's result; an interrupt cancels it.

        Raises ServerError if the loop is closed, before the call or meanwhile, and RuntimeError in a forked child."""
        try:
            future = self._submit(call)
        except BaseException:
            call.close()
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise ClientClosed() from None
        except BaseException:
            future.cancel()
            raise

    def finish(self, call: Coroutine[Any, Any, None]) -> None:
        """Run a call that ends something; there is nothing to end once the loop is closed, or in a forked child."""
        if self.is_current():  # a garbage collection in it has ended a generator, and waiting would be a deadlock
            task = self._loop.create_task(call)
            self._last_tasks.add(task)
            task.add_done_callback(self._last_tasks.discard)
            return
        try:
            future = self._submit(call)
        except (ServerError, RuntimeError):
            call.close()
            return
        concurrent.futures.wait([future])

    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Cancel all calls, and end the thread. Not for the thread itself."""
        if not self._thread.is_alive():
            return
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _submit(self, call: Coroutine[Any, Any, Value]) -> concurrent.futures.Future[Value]:
        """Raises ServerError and RuntimeError."""
        if self._is_closed:
            raise ClientClosed()
        if not self._thread.is_alive():  # before the lock, which another thread may have held at the fork
            raise RuntimeError("a forked process cannot use the client of its parent: make one in it, or use threads")
        with self._lock:  # a call that came after the loop's last round would never end
            if self._is_closed:
                raise ClientClosed()
            return asyncio.run_coroutine_threadsafe(call, self._loop)

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._cancel_all())
        self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class BulkSession:
    """An AsyncBulkSession for a thread that runs no event loop."""

    def __init__(self, loop: LoopThread, session: AsyncBulkSession) -> None:
        self._loop = loop
        self._session = session

    def __enter__(self) -> BulkSession:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def room(self) -> int:
        """Lines that may be sent now."""
        return self._session.room()

    def exchange(
        self, lines: Sequence[RequestLine], is_last: bool = False, timeout_s: float | None = None
    ) -> list[Answer]:
        """Send lines and wait for answers: `AsyncBulkSession.exchange`. Raises ServerError also if the client is closed
        meanwhile."""
        return self._loop.run(self._session.exchange(lines, is_last, timeout_s))

    def progress(self) -> Progress | None:
        """The newest progress of the lines: `AsyncBulkSession.progress`."""
        return self._session.progress

    def announce(self, num_lines: int | None) -> None:
        """How many lines there will be in all, as far as that is known; call it before the first ones are sent."""
        self._session.num_lines = num_lines

    @property
    def unanswered(self) -> list[RequestLine]:
        """Lines without an answer, once `exchange` has raised ServerError."""
        return self._session.unanswered

    def close(self) -> None:
        """Cancels what is in flight."""
        self._loop.finish(self._session.close())
