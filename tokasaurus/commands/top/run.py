"""The course of `toka top`: samples from a server or a recording, and keys, become a screen or lines."""

import io
import os
import re
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from queue import Empty, SimpleQueue
from typing import TypeAlias

from rich.console import Console, Group

from tokasaurus.commands.running_server import (
    NotAnswered,
    Refused,
    check_status,
    client_of,
    events_of,
    explained,
    name_of_server,
    url_of_server,
)
from tokasaurus.commands.top.config import TopConfig
from tokasaurus.commands.top.samples import History, Recording, read_sample
from tokasaurus.commands.top.screen import Screen, compact_line
from tokasaurus.server.protocol.live import LiveEvent

_MAX_SILENCE_S = 15.0
"""Longest time without a byte of a server, which sends a sample once a second."""
_PAUSE_S = 1.0
"""Between two attempts to reach the server."""
_MAY_PASS = (429, 500, 502, 503, 504)
_MIN_DRAW_S, _MAX_DRAW_S = 0.05, 0.5
"""Between two drawings."""
LIVE_KEYS = "q quit   p pause   r next replica   ? help"
_REPLAY_KEYS = "q quit   space pause   left, right 10 s   r next replica   ? help"
_KEY = re.compile(rb"\x1b[\[O][CD]|\x1b.?[^@-~]*[@-~]?|.", re.DOTALL)
"""An arrow, another key's sequence up to its final letter, or a character."""
_JUMPS_S = {b"\x1b[C": 10.0, b"\x1bOC": 10.0, b"\x1b[D": -10.0, b"\x1bOD": -10.0}
"""Of the right and the left arrow."""
_CTRL_Z = b"\x1a"

Told: TypeAlias = tuple[LiveEvent, bytes] | str
"""A sample and its JSON, or why there is no connection."""
Event: TypeAlias = Told | bytes | BaseException
"""Or a key, empty if the terminal has another size; or what ends the command."""


def top(config: TopConfig, _words: list[str]) -> int:
    """Returns the exit code. Raises UserError."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names that the terminal's encoding lacks
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            # Ctrl-C is the usual end of a program that has no other.
            signal.signal(number, lambda number, _: sys.exit(0 if number == signal.SIGINT else 128 + number))
    recording = None if config.replay is None else Recording(config.replay)
    # A terminal that can place its cursor.
    if not config.json and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        return _show(config, recording)
    history, was_lost = History(), False
    for told in _follow(config) if recording is None else _played(recording, config.speed):
        if isinstance(told, tuple):
            history.add(told[0])
            print(told[1].decode(errors="replace") if config.json else compact_line(history), flush=True)
        elif not was_lost:
            print(f"toka top: {name_of_server(config)}: {told}; trying again", file=sys.stderr, flush=True)
        was_lost = isinstance(told, str)
    return 0


def _follow(config: TopConfig) -> Iterator[Told]:
    """Without end. Raises NotAnswered if the server refuses, is none that has samples, or was not there at first."""
    import httpx

    url, moment, ended = f"{url_of_server(config).rstrip('/').removesuffix('/v1')}/live", "", None
    with client_of(config) as client, explained(config):
        while True:
            try:
                with client.stream("GET", url, timeout=_MAX_SILENCE_S) as response:
                    check_status(response)
                    kind = response.headers.get("content-type", "").partition(";")[0]
                    if kind != "text/event-stream":
                        raise NotAnswered(f"answered /live with {kind}: it is another server")
                    for data in events_of(response):
                        if data.startswith(b'{"error":'):  # it stops, with requests that have not ended
                            break
                        sample = read_sample(data)
                        moment, ended = time.strftime("%H:%M:%S"), sample["server"]["ended"]
                        yield sample, data
                reason = "connection ended"
            except Refused as error:
                if error.status not in _MAY_PASS:
                    raise
                reason = str(error)
            except httpx.TransportError as error:
                if not moment:
                    raise
                reason = str(error)
            since = f" since {moment}" if moment else ""
            yield f"server ended at {moment}: {ended}" if ended else f"no answer{since}: {reason}"
            time.sleep(_PAUSE_S)


def _played(recording: Recording, speed: float | None) -> Iterator[Told]:
    if recording.num_left_out:
        print(f"toka top: {recording.num_left_out} lines are no samples", file=sys.stderr, flush=True)
    for index, position in enumerate(recording.positions):
        if speed is not None:
            time.sleep((position - recording.positions[max(0, index - 1)]) / speed)
        line = recording.line(index)
        yield read_sample(line), line


def _show(config: TopConfig, recording: Recording | None) -> int:
    """Returns the exit code."""
    events: SimpleQueue[Event] = SimpleQueue()

    def follow(source: Iterator[Told]) -> None:
        try:
            for told in source:
                events.put(told)
        except Exception as error:
            events.put(error)

    def read_keys() -> None:
        with suppress(OSError):
            while content := os.read(0, 1024):
                for key in _KEY.findall(content):
                    events.put(key)
        events.put(SystemExit(128 + signal.SIGHUP))  # the terminal is gone

    if recording is None:
        source = _follow(config)
        events.put(next(source))  # an error is shown without a screen
        threading.Thread(target=follow, args=(source,), daemon=True).start()
    if sys.stdin is not None and sys.stdin.isatty():
        threading.Thread(target=read_keys, daemon=True).start()
    signal.signal(signal.SIGWINCH, lambda *_: events.put(b""))
    signal.signal(signal.SIGTSTP, lambda *_: events.put(_CTRL_Z))
    console, screen = Console(highlight=False), Screen(LIVE_KEYS if recording is None else _REPLAY_KEYS)
    history, lost, is_paused, speed = History(), "", False, config.speed or 1.0
    position, last_s, wait_s = 0.0, time.monotonic(), 0.0
    with ExitStack() as terminal:
        terminal.enter_context(_full_screen(console))
        while True:
            with suppress(Empty):
                while True:
                    event, wait_s = events.get(timeout=wait_s), 0.0
                    if isinstance(event, BaseException):
                        raise event
                    if isinstance(event, tuple):
                        lost = ""
                        history.add(event[0])
                    elif isinstance(event, str):
                        lost = event
                    elif event in (b"q", b"Q"):
                        return 0
                    elif event == _CTRL_Z:
                        terminal.close()
                        os.kill(os.getpid(), signal.SIGSTOP)
                        terminal.enter_context(_full_screen(console))
                        last_s = time.monotonic()
                    elif event in (b"p", b" "):
                        is_paused = not is_paused
                    elif event == b"?":
                        screen.shows_help = not screen.shows_help
                    elif event == b"r":
                        screen.show_next_replica()
                    position += _JUMPS_S.get(event, 0.0) if isinstance(event, bytes) else 0.0
            now_s = time.monotonic()
            position, last_s = position + (0.0 if is_paused else (now_s - last_s) * speed), now_s
            if recording is not None:
                position = min(max(0.0, position), recording.positions[-1])
                screen.history = recording.history_at(position)
                screen.status = f"replay {_clock(position)} of {_clock(recording.positions[-1])}"
                screen.status += f", speed {speed:g}" if speed != 1 else ""
                is_at_end = position == recording.positions[-1]
                screen.status += ", the end" if is_at_end else ", paused" if is_paused else ""
            else:
                screen.history = screen.history if is_paused else copy(history)
                screen.status = f"{lost}; trying again" if lost else "paused" if is_paused else "live"
            screen.is_old = bool(lost)
            console.update_screen(Group(*screen.lines(*console.size)))
            time.sleep(_MIN_DRAW_S)
            wait_s = _MAX_DRAW_S / max(1.0, speed)


def _clock(seconds: float) -> str:
    hours, minutes = int(seconds) // 3600, int(seconds) // 60 % 60
    return (f"{hours}:" if hours else "") + f"{minutes:02}:{int(seconds) % 60:02}"


@contextmanager
def _full_screen(console: Console) -> Iterator[None]:
    """The alternate screen, without a cursor, and single keys; then what was before."""
    modes = termios.tcgetattr(0) if sys.stdin is not None and sys.stdin.isatty() else None
    try:
        if modes is not None:
            tty.setcbreak(0)
        with console.screen():
            yield
    finally:
        if modes is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, modes)
