"""The course of `toka top`: what threads read from the server and the keyboard, and signals, one after the other."""

import io
import os
import re
import signal
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live

from tokasaurus.commands.running_server import NotAnswered, Refused, check_status, events_of, http_client
from tokasaurus.commands.top.config import TopConfig
from tokasaurus.commands.top.history import History
from tokasaurus.commands.top.recording import Player, Recording, positions_of
from tokasaurus.commands.top.samples import NotASample, Sample, read_sample
from tokasaurus.commands.top.view import Frame, Look, compact_line, screen_lines
from tokasaurus.messages.status import UserError

_MAX_SILENCE_S = 15.0
"""Longest time without a byte of a server, which sends a sample once a second."""
_PAUSES_S = (0.5, 1.0, 2.0)
_MAY_PASS = (429, 500, 502, 503, 504)
_FIRST_S = 0.5
"""Time for the first answer, before an empty screen is shown."""
_SCRUB_S = {"left": -10.0, "right": 10.0}
_SECONDS_PER_DRAWING = 0.05
"""Least time between two samples of a replay that are drawn."""
_MAX_HELD = 1000
"""Samples that are kept while the screen is paused."""
_KEY = re.compile(rb"\x1b[\[O](?P<arrow>[CD])|\x1b.?[^@-~]*[@-~]?|(?P<char>.)", re.DOTALL)
"""An arrow, another key's sequence up to its final letter, or a character."""
_ARROWS = {b"C": "right", b"D": "left"}
_BUFFER_BYTES = 1 << 20
"""More than any frame has."""
LIVE_KEYS = "q quit   p pause   r next replica   ? help"
_REPLAY_KEYS = "q quit   space pause   left, right 10 s   r next replica   ? help"


class CannotWatch(UserError):
    """One line says why; trying again would not help."""


@dataclass(frozen=True, slots=True)
class Received:
    sample: Sample
    line: bytes
    """Its JSON, as the server has sent it."""


@dataclass(frozen=True, slots=True)
class Lost:
    """There is no connection; another one will be tried."""

    reason: str
    """What the server did."""
    why: str
    """The same in short, as the reason for having no figures."""


@dataclass(frozen=True, slots=True)
class Key:
    """A character, left or right; empty: the terminal has another size."""

    name: str


@dataclass(frozen=True, slots=True)
class Stop:
    """exit_code: None for Ctrl-Z, after which the command goes on."""

    exit_code: int | None


Events: TypeAlias = "SimpleQueue[Received | Lost | Key | Stop | Exception]"


def top(config: TopConfig, _words: list[str]) -> int:
    """Returns the exit code. Raises CannotWatch, RecordingError and UserError."""
    if sys.stdout is not None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names that the terminal's encoding lacks
    events: Events = SimpleQueue()
    # Whether standard output is a terminal that can place its cursor.
    has_screen = not config.json and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                # Ctrl-C is the usual end of a program that has no other.
                stop = Stop(0 if number == signal.SIGINT else 128 + number)
                signal.signal(number, lambda *_, stop=stop: events.put(stop))
        if config.replay is not None:
            recording = Recording(config.replay)
            if has_screen:
                return _show_recording(config, recording, events)
            return _print_events(config, _recorded(config, recording, events))
        threading.Thread(target=_follow, args=(config, events), daemon=True).start()
        return _show_events(events) if has_screen else _print_events(config, iter(events.get, None))
    except KeyboardInterrupt:  # before there is a handler of the signal
        return 0


def _follow(config: TopConfig, events: Events) -> None:
    """Puts samples into the queue as they come, and what ends them: CannotWatch if the server refuses, is none that has
    samples, or was not there at first."""
    try:
        for event in _events(config):
            events.put(event)
    except Exception as error:
        events.put(error)


def _events(config: TopConfig) -> Iterator[Received | Lost]:
    """Without end. Raises CannotWatch."""
    import httpx

    name, num_failures, was_there = config.server_name, 0, False
    try:
        client = http_client(config.url, config.api_key, config.unix_socket, timeout_s=_MAX_SILENCE_S)
        while True:
            try:
                with client.stream("GET", "live", headers={"accept": "text/event-stream"}) as response:
                    was_there = True
                    check_status(response)
                    kind = response.headers.get("content-type", "").partition(";")[0]
                    if kind != "text/event-stream":
                        raise CannotWatch(f"{name} answered /live with {kind}: it is another server")
                    for data in events_of(response):
                        num_failures = 0
                        yield Received(read_sample(data), data)
                    lost = Lost("has ended the connection", "connection ended")
            except Refused as error:
                if error.status not in _MAY_PASS:
                    raise CannotWatch(_why_refused(error, name)) from None
                lost = Lost(str(error), str(error))
            except httpx.UnsupportedProtocol as error:
                raise CannotWatch(f"base_url={name}: no URL that can be used: {error}") from None
            except httpx.RequestError as error:
                why = _explain(error)
                lost = Lost(f"does not answer: {why}", why)
                if not was_there:
                    raise CannotWatch(f"{name} {lost.reason}; is toka running?") from None
            yield lost
            time.sleep(_PAUSES_S[min(num_failures, len(_PAUSES_S) - 1)])
            num_failures += 1
    except NotASample as error:
        raise CannotWatch(f"{name} has sent something else than a sample: {error}") from None
    except NotAnswered as error:
        raise CannotWatch(f"{name}: {error}") from None
    except (httpx.InvalidURL, ValueError) as error:
        raise CannotWatch(f"base_url={name}: no URL that can be used: {error}") from None


def _why_refused(error: Refused, name: str) -> str:
    if error.status == 404:
        return f"{name} has no /live: it is an older toka, or another server"
    is_key = error.status in (401, 403)
    return f"{name} {error}" + ("; api_key=, or the variable TOKA_API_KEY, gives the key" if is_key else "")


def _explain(error: BaseException) -> str:
    """In the words of the system, if it is the cause."""
    import httpx

    if isinstance(error, httpx.TimeoutException):
        return f"nothing within {_MAX_SILENCE_S:g} s"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


def _print_events(config: TopConfig, events: Iterable[Any]) -> int:
    """Each sample as it came, or in short."""
    history, is_lost = History(), False
    for event in events:
        if isinstance(event, Received):
            is_lost = False
            history.add(event.sample)
            print(event.line.decode(errors="replace") if config.json else compact_line(history), flush=True)
        elif isinstance(event, Lost):
            if not is_lost:
                ended = None if history.latest is None else history.latest["server"]["ended"]
                reason = f"has ended: {ended}" if ended else event.reason
                print(f"toka top: {config.server_name} {reason}; trying again", file=sys.stderr, flush=True)
            is_lost = True
        elif isinstance(event, Exception):
            raise event
        elif isinstance(event, Stop):
            return event.exit_code or 0
    return 0


def _show_events(events: Events) -> int:
    first = _all(events, _FIRST_S)
    for event in first:  # an error of the first moment is shown without a screen that comes and goes
        if isinstance(event, Exception):
            raise event
    view, held, lost, last_s = _View(History()), deque[Sample](maxlen=_MAX_HELD), None, 0.0
    with _screen(events) as terminal:
        while True:
            for event in first or _all(events):
                if isinstance(event, Received):
                    lost, last_s = None, time.time()
                    held.append(event.sample)
                elif isinstance(event, Lost):
                    lost = event
                elif (code := view.handle(event, terminal)) is not None:
                    return code
            first = []
            while held and not view.is_paused:
                view.history.add(held.popleft())
            status, style = ("paused", "yellow") if view.is_paused else ("live", "green")
            if lost is not None:
                newest = held[-1] if held else view.history.latest
                status, style = _since(lost, last_s, newest and newest["server"]["ended"]), "bold red"
            view.draw(terminal, Frame(status, style, LIVE_KEYS, is_old=lost is not None))


def _since(lost: Lost, last_s: float, ended: str | None) -> str:
    """last_s: when the newest sample came, in Unix seconds; 0 if none has. ended: why the server ended, if it has said
    so."""
    moment = time.strftime("%H:%M:%S", time.localtime(last_s)) if last_s else ""
    if ended:
        return f"server ended at {moment}: {ended}; trying again"
    return f"no answer{f' since {moment}' if moment else ''}: {lost.why}; trying again"


def _recorded(config: TopConfig, recording: Recording, events: Events) -> Iterator[Any]:
    """Its samples, and the events meanwhile. Raises RecordingError."""
    positions = positions_of(recording.times)
    if recording.num_left_out:
        print(f"toka top: {recording.num_left_out} lines are no samples", file=sys.stderr, flush=True)
    for index, position in enumerate(positions):
        wait_s = 0.0 if config.speed is None or not index else (position - positions[index - 1]) / config.speed
        yield from _all(events, wait_s)
        yield Received(recording.sample(index), recording.line(index))


def _show_recording(config: TopConfig, recording: Recording, events: Events) -> int:
    """Raises RecordingError."""
    player = Player(recording, config.speed or 1.0)
    view = _View(player.history)
    with _screen(events) as terminal:
        while True:
            view.history = player.history
            status = f"replay {_clock(player.position)} of {_clock(player.duration)}"
            status += f", speed {config.speed:g}" if config.speed not in (None, 1) else ""
            if player.is_at_end or view.is_paused:
                status += ", the end" if player.is_at_end else ", paused"
            view.draw(terminal, Frame(status, "yellow", _REPLAY_KEYS))
            last_s, wait_s = time.monotonic(), None if view.is_paused else player.seconds_to_next()
            found, was_paused = (
                _all(events, None if wait_s is None else max(wait_s, _SECONDS_PER_DRAWING)),
                view.is_paused,
            )
            if not was_paused:
                player.pass_time(time.monotonic() - last_s)
            for event in found:
                if isinstance(event, Key) and event.name in _SCRUB_S:
                    player.jump(_SCRUB_S[event.name])
                elif (code := view.handle(event, terminal)) is not None:
                    return code


class _View:
    """What the user has chosen to see."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.is_paused = False
        self._replica = 0
        self._shows_help = False

    def handle(self, event: object, terminal: "_Terminal") -> int | None:
        """The exit code if the command ends. Raises the error that has ended the server's events."""
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Stop):
            if event.exit_code is None:
                terminal.suspend()
            return event.exit_code
        key = event.name if isinstance(event, Key) else ""
        if key in ("p", " "):
            self.is_paused = not self.is_paused
        elif key == "?":
            self._shows_help = not self._shows_help
        elif key == "r" and self.history.latest is not None:
            indices = sorted(one["index"] for one in self.history.latest["replicas"])
            self._replica = next((index for index in indices if index > self._replica), indices[0] if indices else 0)
        return 0 if key in ("q", "Q") else None

    def draw(self, terminal: "_Terminal", frame: Frame) -> None:
        frame = replace(frame, replica=self._replica, shows_help=self._shows_help)
        terminal.draw(lambda width, height: Group(*screen_lines(self.history, frame, width, height, terminal.look)))


def _all(events: Events, wait_s: float | None = None) -> list[Any]:
    """The events that are there, at least one; none if none comes within wait_s."""
    try:
        found = [events.get(timeout=wait_s)]
    except Empty:
        return []
    while not events.empty():
        found.append(events.get())
    return found


def _clock(seconds: float) -> str:
    hours, minutes = int(seconds) // 3600, int(seconds) // 60 % 60
    return (f"{hours}:" if hours else "") + f"{minutes:02}:{int(seconds) % 60:02}"


class _Terminal:
    """The alternate screen, without a cursor, and single keys; `leave` restores what was before."""

    def __init__(self) -> None:
        # When a signal, such as SIGWINCH, interrupts a write that is larger than a file's buffer, Python
        # loses the rest of it; and the buffer of sys.stdout has 1 KiB on a terminal.
        self._output = sys.stdout.fileno()
        file = open(self._output, "w", _BUFFER_BYTES, sys.stdout.encoding, errors="replace", closefd=False)  # noqa: SIM115
        self._console = Console(file=file, highlight=False, markup=False, emoji=False)
        has_colours = self._console.color_system is not None and not self._console.no_color
        self.look = Look(has_colours, ascii_only=not self._console.encoding.lower().startswith("utf"))
        self._live: Live | None = None
        self.input = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        """None: standard input is no terminal."""
        self._old_modes: list[Any] = []

    def draw(self, lines: Callable[[int, int], Group]) -> None:
        """lines: for (columns, rows), of at most this size."""
        assert self._live is not None, "entered"
        size = os.terminal_size((80, 24))
        with suppress(OSError):
            size = os.get_terminal_size(self._output) if all(os.get_terminal_size(self._output)) else size
        self._console.size = ConsoleDimensions(*size)
        self._live.update(lines(*size), refresh=True)

    def suspend(self) -> None:
        """Stop this process as Ctrl-Z does, with the terminal as it was before; returns when it goes on."""
        self.leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.enter()

    def enter(self) -> None:
        if self.input is not None:
            self._old_modes = termios.tcgetattr(self.input)
            tty.setcbreak(self.input)
        self._live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._live.vertical_overflow = "crop"
        self._live.start()

    def leave(self) -> None:
        live, self._live = self._live, None
        try:
            if live is not None:
                with suppress(OSError):  # the terminal is gone
                    live.stop()
        finally:
            if self.input is not None and self._old_modes:
                with suppress(termios.error):
                    termios.tcsetattr(self.input, termios.TCSADRAIN, self._old_modes)


@contextmanager
def _screen(events: Events) -> Iterator[_Terminal]:
    """A terminal whose keys and changes become events."""

    def read_keys(descriptor: int) -> None:
        content = b"?"
        while content:
            try:
                content = os.read(descriptor, 1024)
            except OSError:
                content = b""
            for key in keys_of(content):
                events.put(Key(key))
        events.put(Stop(128 + signal.SIGHUP))  # the terminal is gone

    terminal = _Terminal()
    try:
        terminal.enter()
        signal.signal(signal.SIGWINCH, lambda *_: events.put(Key("")))
        signal.signal(signal.SIGTSTP, lambda *_: events.put(Stop(None)))
        if terminal.input is not None:
            threading.Thread(target=read_keys, args=(terminal.input,), daemon=True).start()
        yield terminal
    finally:
        terminal.leave()


def keys_of(content: bytes) -> list[str]:
    """Names of the keys that a terminal has sent: single characters, left and right."""
    found = ((match["arrow"], match["char"]) for match in _KEY.finditer(content))
    return [_ARROWS.get(arrow) or char.decode("latin-1") for arrow, char in found if arrow or char]
