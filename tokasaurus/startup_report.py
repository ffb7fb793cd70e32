"""What the user sees of a start, a stop, and what was done between them: lines, and how far each process is."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokasaurus.config import ServerConfig
from tokasaurus.messages.status import EngineLimits, PhaseDone, PhaseProgress, Ready, ServerTotals
from tokasaurus.monitoring.log_lines import LogLine, StatusRow
from tokasaurus.monitoring.log_writer import log_writer
from tokasaurus.monitoring.progress import show_time

LAUNCHER = "toka"
"""The launcher in lines about phases."""
COMPILER = "compiler"
PROCESS = "launcher"
"""The launcher in log lines."""

SECONDS_OF_A_LINE = 5.0
"""A phase that has nothing to say gets a line if it takes so long."""
_DETAILS = ("gemm", "memory")
"""Phases whose details are for who tunes a server."""

_UNNAMED = "start"
"""What comes after a process's imports, until it says what that is."""
_DETAIL_COLUMN = 41
"""Where the details of a phase begin."""
_HINT_COLUMN = 7
"""Where what is said about a server that is ready begins."""

_TEXT = '{"input": "Hello"}'
_EXAMPLES = {
    "embed": ("/v1/embeddings", _TEXT),
    "score": ("/v1/rerank", '{"query": "What do whales eat?", "documents": ["Krill", "Berlin"]}'),
    "classify": ("/classify", _TEXT),
    "reward": ("/classify", _TEXT),
}
"""By the flag task: a path, and a body for it."""


def _start_of_process() -> float:
    """Approximate start of this process by time.perf_counter(), from its CPU time: it has hardly waited so far."""
    return time.perf_counter() - time.process_time()


@dataclass(slots=True)
class _Running:
    """A phase that has begun."""

    phase: str
    began: float
    """When the phase began, by time.perf_counter()."""
    num_done: int = 0
    num_total: int = 0
    unit: str = ""


@dataclass
class StartupReport:
    """Shows each start-up phase as it ends, how far the others are, the ready line, and at the end what was done.

    The ready line is shown once the server is up and the KV cache size is known, which may happen in either order.
    The phases of one process are sequential; the other processes run in parallel after the launcher's own phases.
    """

    address: str = ""
    model: str = ""
    context_length: int = 0
    """Most tokens of a sequence, by the model and the flag max_num_tokens_per_request."""
    drain_seconds: int = 0
    shows_details: bool = True
    """Every phase gets a line; otherwise only phases that say what is served, or take long."""
    started: float = field(default_factory=_start_of_process)
    num_replicas: int = 1
    task: str = "generate"
    """As of the flag."""
    limits: EngineLimits | None = None
    is_server_up: bool = False
    is_ready: bool = False
    ready_s: float | None = None
    """When the server became ready, by time.perf_counter(); None before."""
    start_times: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase of an earlier start, and of this one's as they end; by `phase_key`."""
    server_ready_s: float | None = None
    """When the server that runs now became ready, by time.perf_counter(), if it was started again."""
    totals: ServerTotals | None = None
    """What the server that runs now has answered; None until it ends in order."""

    def __post_init__(self) -> None:
        self._running: dict[str, _Running] = {}
        """Running phases by process. The thread that writes the log reads it too."""
        self._last_end = self.started

    def show_line(self, line: str, fields: dict[str, Any] | None = None, indent: int = 0) -> None:
        """fields: what the line says, for programs that read the log. indent: as of LogLine."""
        log_writer().put_line(LogLine(line, process=PROCESS, fields=fields, indent=indent))

    def show_failure(self, failure: str, was_killed: bool = False) -> None:  # noqa: ARG002  # others tell it
        """Why the launcher ends: the last line. was_killed: a signal has ended one of its processes."""
        log_writer().put_line(LogLine(f"toka: {failure}", "error", PROCESS, fields={"event": "failure"}, indent=6))

    def show_progress(self, line: str) -> None:
        """What the launcher does now."""
        self._begin(LAUNCHER, line)
        self.show_beginning(line)

    def show_beginning(self, line: str) -> None:
        self.show_line(f"{LAUNCHER:>12}  {line} ...", {"event": "phase begins", "phase": line}, indent=14)

    def show_kernels(self, num_done: int, num_total: int) -> None:
        """How far the kernels are that a process compiles beside all others."""
        self.note_progress(COMPILER, PhaseProgress(COMPILER, "CPU kernels", num_done, num_total, "files"))
        if num_done == num_total:  # linking is quick
            self.forget_process(COMPILER)

    def show_amount(self, num_done: int, num_total: int, unit: str = "bytes") -> None:
        """How far the launcher is with what it does now."""
        if (running := self._running.get(LAUNCHER)) is not None:
            running.num_done, running.num_total, running.unit = num_done, num_total, unit

    def show_detail(self, name: str, detail: str) -> None:
        """A line in the form of a phase's line, about something that takes no time."""
        fields = {"event": "detail", "name": name, "detail": detail}
        self.show_line(f"{LAUNCHER:>12}  {name:<27} {detail}", fields, _DETAIL_COLUMN)

    def begin_phase(self, name: str) -> None:
        """Begin a phase of the launcher process; the one before ends with `end_phase`."""
        self._begin(LAUNCHER, name)

    def end_phase(self, name: str, detail: str = "") -> None:
        """End a phase of the launcher process."""
        began, self._last_end = self._last_end, time.perf_counter()
        self.show_phase(LAUNCHER, PhaseDone(LAUNCHER, name, self._last_end - began, detail))

    def begin_process(self, process: str) -> None:
        self._begin(process, "imports")

    def forget_process(self, process: str) -> None:
        """It has ended before it was ready."""
        self._running.pop(process, None)

    def note_progress(self, process: str, message: PhaseProgress) -> None:
        running = self._running.get(process)
        if running is None or running.phase != message.phase:
            running = self._begin(process, message.phase)
        running.num_done, running.num_total, running.unit = message.num_done, message.num_total, message.unit

    def show_phase(self, process: str, phase: PhaseDone) -> None:
        self.start_times[phase_key(process, phase.phase)] = round(phase.seconds, 3)
        running = self._running.get(process)
        if running is not None and running.phase == _UNNAMED:
            self.start_times[phase_key(process, _UNNAMED)] = round(time.perf_counter() - running.began, 3)
        if phase.phase == "imports" and process != LAUNCHER:
            self._begin(process, _UNNAMED)
        else:
            self._running.pop(process, None)
        is_short = phase.seconds < SECONDS_OF_A_LINE and (not phase.detail or phase.phase in _DETAILS)
        if is_short and not self.shows_details:
            return
        kind = process.partition(" (")[0]  # without the rank
        text = f"{kind:>12}  {phase.phase:<16} {phase.seconds:6.2f} s  {phase.detail}".rstrip()
        fields: dict[str, Any] = {
            "event": "phase",
            "of": process,
            "phase": phase.phase,
            "seconds": round(phase.seconds, 3),
        }
        self.show_line(text, fields | {"detail": phase.detail}, _DETAIL_COLUMN)

    def _begin(self, process: str, phase: str) -> _Running:
        running = self._running[process] = _Running(phase, time.perf_counter())
        return running

    def rows(self) -> Sequence[StatusRow]:
        """How far each phase is that has not ended; none once the server is ready. Any thread may call it."""
        if self.is_ready:
            return ()
        now = time.perf_counter()
        return [
            _row(process, running, now, self.start_times.get(phase_key(process, running.phase)))
            for process, running in list(self._running.items())
        ]

    def note_ready(self, message: Ready, is_server: bool) -> None:
        self.limits = self.limits if message.limits is None else message.limits
        self.is_server_up = self.is_server_up or is_server
        if self.is_server_up and self.limits is not None and not self.is_ready:
            self.is_ready = True
            self.ready_s = time.perf_counter()
            self._show_ready(self.limits)

    def note_server_restart(self) -> None:
        """The server is ready again: it counts from now on."""
        self.server_ready_s = time.perf_counter()

    def _show_ready(self, limits: EngineLimits) -> None:
        num_tokens = limits.num_kv_tokens
        if limits.limited_by == "kv_cache_num_tokens":
            self.show_detail(
                "context",
                f"prompt and answer together may have {limits.max_tokens_per_sequence:,} tokens, not "
                f"{self.context_length:,}: the size of the KV cache, which kv_cache_num_tokens= sets",
            )
        seconds = time.perf_counter() - self.started
        fields: dict[str, Any] = {
            "event": "ready",
            "address": self.address,
            "model": self.model,
            "seconds": round(seconds, 3),
        }
        fields |= {"kv_cache_num_tokens": num_tokens, "page_size": limits.page_size, "replicas": self.num_replicas}
        self.show_line(
            f"ready: {f'{self.address} serves ' if self.address else ''}{self.model}; KV cache {num_tokens:,} tokens"
            f"{'' if self.num_replicas == 1 else f' for each of {self.num_replicas} replicas'}; {seconds:.1f} s",
            fields,
            _HINT_COLUMN,
        )
        if self.address:
            self.show_hints(self.address)

    def show_hints(self, address: str) -> None:
        """What to do with a server that is ready."""
        if not address.startswith("unix:"):
            self.show_line(f"page:  {address}/", {"event": "page", "page": f"{address}/"})
        command = f"toka ping {_flag_for(address)}prompt='tell me a joke'"
        if (example := _EXAMPLES.get(self.task)) is not None:
            path, body = example
            socket = address.removeprefix("unix:")
            url = address if socket == address else f"--unix-socket {socket} http://localhost"
            command = f"curl {url}{path} -d '{body}'"
        self.show_line(f"try:   {command}", {"event": "try", "command": command}, _HINT_COLUMN)
        stop = f"Ctrl-C, then open requests may take {self.drain_seconds} s; a second one kills"
        self.show_line(f"stop:  {stop}", {"event": "stop", "how": stop}, _HINT_COLUMN)

    def show_stopping(self) -> None:
        """Print what happens now, after the first stop signal."""
        self._running.clear()
        if self.is_ready:
            line = f"stopping: open requests may take {self.drain_seconds} s to finish; Ctrl-C again kills"
        else:
            line = "stopping the start; Ctrl-C again kills"
        self.show_line(line, {"event": "stopping"})

    def show_summary(self) -> None:
        """What the server has done, if it was ready."""
        if self.ready_s is None:
            return
        seconds = time.perf_counter() - self.ready_s
        if self.totals is None:
            self.show_line(f"served for {show_time(seconds)}; the counts are lost, since the server was killed")
            return
        since = ""
        if self.server_ready_s is not None:
            seconds = time.perf_counter() - self.server_ready_s
            since = ", since the server was started again"
        totals = self.totals
        per_s = totals.num_generated_tokens / seconds
        fields: dict[str, Any] = {
            "event": "summary",
            "seconds": round(seconds, 3),
            "tokens_per_second": round(per_s, 3),
        }
        fields |= {"answered": totals.num_answered, "aborted": totals.num_aborted, "failed": totals.num_failed}
        fields |= {"prompt_tokens": totals.num_prompt_tokens, "generated_tokens": totals.num_generated_tokens}
        fields |= {"kept_tokens": totals.num_kept_tokens, "lines_left": totals.num_lines_left}
        self.show_line(
            f"requests: {totals.num_answered:,} answered, {totals.num_aborted:,} aborted, {totals.num_failed:,} failed"
            f"{since}",
            fields,
        )
        self.show_line(
            f"tokens:   {totals.num_prompt_tokens:,} in prompts, {totals.num_generated_tokens:,} generated in "
            f"{show_time(seconds)}, {per_s:,.1f} tokens/s"
        )
        if totals.num_lines_left:
            self.show_line(f"batches:  {totals.what_goes_on()}")


def _flag_for(address: str) -> str:
    """What `toka ping` needs to find the server, with a space behind it."""
    if address.startswith("unix:"):
        return f"unix_socket={shlex.quote(address.removeprefix('unix:'))} "
    host, _, port = address.removeprefix("http://").rpartition(":")
    if host != ServerConfig.host:
        return f"base_url={address}/v1 "
    return "" if port == str(ServerConfig.port) else f"port={port} "


def phase_key(process: str, phase: str) -> str:
    """The same for all ranks."""
    return f"{process.partition(' (')[0]}: {phase}"


def _row(process: str, running: _Running, now: float, expected_s: float | None) -> StatusRow:
    """expected_s: what the phase took before; None if that is not known."""
    seconds = now - running.began
    share = running.num_done / running.num_total if running.num_total else None
    amount = ""
    if running.num_total and running.unit == "bytes":
        amount = f"{running.num_done / 1e6:,.0f} of {running.num_total / 1e6:,.0f} MB"
    elif running.num_total:
        amount = f"{running.num_done:,} of {running.num_total:,} {running.unit}"
    is_expected = share is None and expected_s is not None and expected_s > 0
    if is_expected and expected_s:
        share = min(0.99, seconds / expected_s)
    return StatusRow(process, running.phase, seconds, share, is_expected, amount)
