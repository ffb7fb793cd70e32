"""Signals that end a command of the user's, as exceptions."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tokasaurus.processes.group import STOP_NUMBERS


class Stopped(KeyboardInterrupt):
    """A signal asks this process to end."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def signals_raise() -> Iterator[None]:
    """Let such a signal raise Stopped in the main thread within the context, unless the process ignores the signal."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(number)

    old = {
        number: signal.signal(number, stop) for number in STOP_NUMBERS if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
