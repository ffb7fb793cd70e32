"""Ends Python code that runs too long in a thread: an exception is raised inside it."""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

_CHECKS_PER_LIMIT = 4


class TimeLimitExceeded(BaseException):
    """Raised between two bytecodes of the code that runs too long. No handler for ordinary errors catches it."""


class TimeLimit:
    """A time limit for work in any number of threads. Thread-safe.

    It ends loops and recursion. It cannot end a single long call into C, such as 10**10**10, which also blocks all
    other threads.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """The work is ended after this time, or up to a quarter of it later."""
        # A plain lock, which `with` acquires without running Python code: the exception cannot arrive in between.
        self._lock = threading.Lock()
        self._deadlines: dict[int, float] = {}
        """Deadlines by thread id, by time.monotonic()."""
        self._is_watched = False
        self._begun = threading.Event()
        self._watcher: threading.Thread | None = None

    def run(self, work: Callable[[], Result]) -> Result:
        """The result of `work`. Raises TimeLimitExceeded. Not to be nested in one thread."""
        thread_id = threading.get_ident()
        with self._lock:
            self._deadlines[thread_id] = time.monotonic() + self.seconds
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="time limit", daemon=True)
                self._watcher.start()
            if not self._is_watched:
                self._is_watched = True
                self._begun.set()
        try:
            return work()
        finally:
            with self._lock:
                if self._deadlines.pop(thread_id, None) is None:
                    _raise_in(thread_id, None)  # it may not have arrived yet, and must not arrive later

    def _watch(self) -> None:
        """Sleeps until some work begins, then looks at the deadlines until no work is left."""
        while True:
            self._begun.wait()
            self._begun.clear()
            while self._is_watched:
                time.sleep(self.seconds / _CHECKS_PER_LIMIT)
                with self._lock:
                    now = time.monotonic()
                    for thread_id in [key for key, deadline in self._deadlines.items() if deadline <= now]:
                        del self._deadlines[thread_id]
                        _raise_in(thread_id, TimeLimitExceeded)
                    self._is_watched = bool(self._deadlines)


def _raise_in(thread_id: int, error: type[BaseException] | None) -> None:
    """Let the thread raise `error` before its next bytecode; None takes back an error that it has not raised yet."""
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), raised)
