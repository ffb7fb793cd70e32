"""Signals that ask a run to end are raised as exceptions in it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal asks this process to end."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def signals_raise() -> Iterator[None]:
    """Within the context, such a signal raises Stopped in the main thread, unless the process ignores it."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(number)

    old = {number: signal.signal(number, stop) for number in _NUMBERS if signal.getsignal(number) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
