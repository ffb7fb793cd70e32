"""The course of `toka top`: events of the server, keys and signals, one after the other."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeAlias

from tokasaurus.commands.top.config import TopConfig
from tokasaurus.commands.top.history import History
from tokasaurus.commands.top.live_events import CannotWatch, Lost, Received, follow
from tokasaurus.commands.top.player import Player, positions_of
from tokasaurus.commands.top.recording import Recorder, Recording, RecordingError
from tokasaurus.commands.top.samples import Sample
from tokasaurus.commands.top.terminal import Terminal, can_show_a_screen, keys_of
from tokasaurus.commands.top.view import Frame, compact_line, screen_lines
from tokasaurus.library.connection import Server
from tokasaurus.messages.status import UserError

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FIRST_S = 0.5
"""Time for the first answer, before an empty screen is shown."""
_SCRUB_S = {"left": -10.0, "right": 10.0}
_SECONDS_PER_DRAWING = 0.05
"""Least time between two samples of a replay that are drawn."""
_MAX_HELD = 1000
LIVE_KEYS = "q quit   p pause   r next replica   ? help"
_REPLAY_KEYS = "q quit   space pause   left, right 10 s   r next replica   ? help"


@dataclass(frozen=True, slots=True)
class Key:
    name: str


@dataclass(frozen=True, slots=True)
class Redraw:
    """The terminal has another size."""


@dataclass(frozen=True, slots=True)
class Suspend:
    """Ctrl-Z."""


@dataclass(frozen=True, slots=True)
class Stop:
    exit_code: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The server's events have ended with an error."""

    error: Exception


Event: TypeAlias = Received | Lost | Key | Redraw | Suspend | Stop | Failed
Events: TypeAlias = "asyncio.Queue[Event]"


def top(config: TopConfig) -> int:
    """Returns the exit code: 1, with one line on stderr, on failure."""
    if sys.stdout is not None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names that the terminal's encoding lacks
    try:
        if config.replay is not None:
            with Recording(config.replay) as recording:
                return asyncio.run(_replay(config, recording))
        return asyncio.run(_watch(config))
    except (CannotWatch, RecordingError, UserError) as error:
        print(f"toka top: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before there is a handler of the signal
        return 0


async def _watch(config: TopConfig) -> int:
    """Raises CannotWatch, RecordingError and UserError."""
    recorder = None if config.record is None else Recorder(config.record)
    server = Server(config.url, config.api_key, config.unix_socket)
    events: Events = asyncio.Queue()
    follower = asyncio.create_task(_follow(server, config.server_name, events, recorder))
    try:
        with _signals(events):
            if config.json or not can_show_a_screen():
                return await _print_events(config, events)
            return await _show_events(config, events)
    finally:
        follower.cancel()
        with suppress(asyncio.CancelledError):
            await follower
        await server.close()
        if recorder is not None:
            recorder.close()


async def _follow(server: Server, name: str, events: Events, recorder: Recorder | None) -> None:
    """Puts what comes from the server into the queue, and what ends it."""
    try:
        async for event in follow(server, name):
            if recorder is not None and isinstance(event, Received):
                recorder.write(event.line)
            events.put_nowait(event)
    except Exception as error:
        events.put_nowait(Failed(error))


async def _print_events(config: TopConfig, events: Events) -> int:
    history = History()
    is_lost = False
    while True:
        event = await events.get()
        if isinstance(event, Received):
            is_lost = False
            history.add(event.sample)
            _print(event.line if config.json else None, history)
        elif isinstance(event, Lost):
            if not is_lost:
                ended = "" if history.latest is None else history.latest.server.ended
                reason = f"has ended: {ended}" if ended else event.reason
                print(f"toka top: {config.server_name} {reason}; trying again", file=sys.stderr, flush=True)
            is_lost = True
        elif isinstance(event, Failed):
            raise event.error
        elif isinstance(event, Stop):
            return event.exit_code


async def _show_events(config: TopConfig, events: Events) -> int:
    with suppress(asyncio.TimeoutError):
        # An error of the first moment is shown without a screen that comes and goes.
        first = await asyncio.wait_for(events.get(), _FIRST_S)
        if isinstance(first, Failed):
            raise first.error
        if isinstance(first, Stop):
            return first.exit_code
        events.put_nowait(first)
    view = _View(History())
    held: deque[Sample] = deque(maxlen=_MAX_HELD)
    """Samples that have come since the pause began."""
    lost: Lost | None = None
    last_s: float | None = None
    """When the newest sample has come."""
    with _screen(events) as terminal:
        while True:
            for event in await _all(events):
                if isinstance(event, Received):
                    lost, last_s = None, time.time()
                    held.append(event.sample)
                elif isinstance(event, Lost):
                    lost = event
                elif isinstance(event, Key):
                    if view.press(event.name):
                        return 0
                elif isinstance(event, Suspend):
                    terminal.suspend()
                elif isinstance(event, Failed):
                    raise event.error
                elif isinstance(event, Stop):
                    return event.exit_code
            while held and not view.is_paused:
                view.history.add(held.popleft())
            status, style = ("paused", "yellow") if view.is_paused else ("live", "green")
            if lost is not None:
                newest = held[-1] if held else view.history.latest
                status, style = _since(lost, last_s, "" if newest is None else newest.server.ended), "bold red"
            elif config.record is not None:
                status += ", recording"
            view.draw(terminal, Frame(status, style, LIVE_KEYS, is_old=lost is not None))


def _since(lost: Lost, last_s: float | None, ended: str) -> str:
    """last_s: when the newest sample came, in Unix seconds. ended: why the server ended, if it has said so."""
    moment = "" if last_s is None else time.strftime("%H:%M:%S", time.localtime(last_s))
    if ended:
        return f"server ended at {moment}: {ended}; trying again"
    since = f" since {moment}" if moment else ""
    return f"no answer{since}: {lost.why}; trying again"


async def _replay(config: TopConfig, recording: Recording) -> int:
    """Raises RecordingError."""
    events: Events = asyncio.Queue()
    with _signals(events):
        if config.json or not can_show_a_screen():
            return await _print_recording(config, recording, events)
        return await _show_recording(config, recording, events)


async def _print_recording(config: TopConfig, recording: Recording, events: Events) -> int:
    history = History()
    positions = positions_of(recording.times)
    if recording.num_left_out:
        print(f"toka top: {recording.num_left_out} lines are no samples", file=sys.stderr, flush=True)
    for index, position in enumerate(positions):
        wait_s = 0.0 if config.speed is None or not index else (position - positions[index - 1]) / config.speed
        with suppress(asyncio.TimeoutError):
            event = await asyncio.wait_for(events.get(), wait_s)
            assert isinstance(event, Stop), "there is no screen"
            return event.exit_code
        history.add(recording.sample(index))
        _print(recording.line(index) if config.json else None, history)
    return 0


async def _show_recording(config: TopConfig, recording: Recording, events: Events) -> int:
    player = Player(recording, config.speed or 1.0)
    view = _View(player.history)
    with _screen(events) as terminal:
        last_s = time.monotonic()
        while True:
            view.history = player.history
            status = f"replay {_clock(player.position)} of {_clock(player.duration)}"
            status += f", speed {config.speed:g}" if config.speed not in (None, 1) else ""
            if player.is_at_end or view.is_paused:
                status += ", the end" if player.is_at_end else ", paused"
            view.draw(terminal, Frame(status, "yellow", _REPLAY_KEYS))
            wait_s = None if view.is_paused else player.seconds_to_next()
            for event in await _all(events, None if wait_s is None else max(wait_s, _SECONDS_PER_DRAWING)):
                if isinstance(event, Key):
                    if view.press(event.name):
                        return 0
                    if event.name in _SCRUB_S:
                        player.jump(_SCRUB_S[event.name])
                elif isinstance(event, Suspend):
                    terminal.suspend()
                    last_s = time.monotonic()
                elif isinstance(event, Stop):
                    return event.exit_code
            now_s = time.monotonic()
            if not view.is_paused:
                player.pass_time(now_s - last_s)
            last_s = now_s


class _View:
    """What the user has chosen to see."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.is_paused = False
        self._replica = 0
        self._shows_help = False

    def press(self, key: str) -> bool:
        """Whether the key ends the command."""
        if key in ("p", " "):
            self.is_paused = not self.is_paused
        elif key == "?":
            self._shows_help = not self._shows_help
        elif key == "r" and self.history.latest is not None:
            indices = sorted(replica.index for replica in self.history.latest.replicas)
            self._replica = next((index for index in indices if index > self._replica), indices[0] if indices else 0)
        return key in ("q", "Q")

    def draw(self, terminal: Terminal, frame: Frame) -> None:
        frame = dataclasses.replace(frame, replica=self._replica, shows_help=self._shows_help)
        terminal.draw(screen_lines(self.history, frame, *terminal.size(), terminal.look))


async def _all(events: Events, wait_s: float | None = None) -> list[Event]:
    """The events that are there, at least one; none if none comes within wait_s."""
    found: list[Event] = []
    try:
        found.append(await asyncio.wait_for(events.get(), wait_s))
    except asyncio.TimeoutError:
        return found
    while not events.empty():
        found.append(events.get_nowait())
    return found


def _print(line: bytes | None, history: History) -> None:
    """The sample as it came, or in short."""
    print(compact_line(history) if line is None else line.decode(errors="replace"), flush=True)


def _clock(seconds: float) -> str:
    whole = int(seconds)
    hours = f"{whole // 3600}:" if whole >= 3600 else ""
    return f"{hours}{whole // 60 % 60:02}:{whole % 60:02}"


@contextmanager
def _signals(events: Events) -> Iterator[None]:
    """Signals that end programs become events. Ignored signals, as under nohup, stay ignored."""
    loop = asyncio.get_running_loop()
    caught = [number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    for number in caught:
        # Ctrl-C is the usual end of a program that has no other.
        loop.add_signal_handler(number, events.put_nowait, Stop(0 if number == signal.SIGINT else 128 + number))
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)


@contextmanager
def _screen(events: Events) -> Iterator[Terminal]:
    """A terminal whose keys and changes become events."""
    loop = asyncio.get_running_loop()

    def read_keys(descriptor: int) -> None:
        try:
            content = os.read(descriptor, 1024)
        except OSError:
            content = b""
        if not content:  # the terminal is gone
            loop.remove_reader(descriptor)
            events.put_nowait(Stop(128 + signal.SIGHUP))
        for key in keys_of(content):
            events.put_nowait(Key(key))

    with Terminal() as terminal:
        loop.add_signal_handler(signal.SIGWINCH, events.put_nowait, Redraw())
        loop.add_signal_handler(signal.SIGTSTP, events.put_nowait, Suspend())
        if terminal.input is not None:
            loop.add_reader(terminal.input, read_keys, terminal.input)
        try:
            yield terminal
        finally:
            if terminal.input is not None:
                loop.remove_reader(terminal.input)
            for number in (signal.SIGWINCH, signal.SIGTSTP):
                loop.remove_signal_handler(number)
