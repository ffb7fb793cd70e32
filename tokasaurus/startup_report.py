"""What the user sees of a start: each phase as it ends, then the ready line."""

import sys
import time
from dataclasses import dataclass, field

from tokasaurus.messages.status import BatchTokens, EngineLimits, PhaseDone, Ready


def _start_of_process() -> float:
    """Approximate start of this process by time.perf_counter(), from its CPU time: it has hardly waited so far."""
    return time.perf_counter() - time.process_time()


@dataclass
class StartupReport:
    """Prints each start-up phase as it ends, then the ready line with the phases of all processes.

    The ready line is printed once the server is up and the KV cache size is known, which may happen in either order.
    The phases of one process are sequential; the other processes run in parallel after the launcher's own phases.
    """

    address: str = ""
    model: str = ""
    context_length: int = 0
    """Most tokens of a sequence, by the model and the flag max_num_tokens_per_request."""
    started: float = field(default_factory=_start_of_process)
    num_replicas: int = 1
    limits: EngineLimits | None = None
    is_server_up: bool = False
    is_ready: bool = False

    def __post_init__(self) -> None:
        self._phases: dict[str, list[PhaseDone]] = {}
        self._last_end = self.started

    def show_line(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def show_failure(self, failure: str, was_killed: bool = False) -> None:  # noqa: ARG002  # others tell it
        """Why the launcher ends: the last line. was_killed: a signal has ended one of its processes."""
        self.show_line(f"toka: {failure}")

    def note_tokens(self, message: BatchTokens) -> None:
        """How far the lines of a private server's batch are."""

    def show_progress(self, line: str) -> None:
        self.show_line(f"{'toka':>12}  {line} ...")

    def show_detail(self, name: str, detail: str) -> None:
        """A line like those of phases, about something that takes no time."""
        self.show_line(f"{'toka':>12}  {name:<27} {detail}")

    def end_phase(self, name: str, detail: str = "") -> None:
        """End a phase of the launcher process."""
        began, self._last_end = self._last_end, time.perf_counter()
        self.show_phase("toka", PhaseDone("toka", name, self._last_end - began, detail))

    def show_phase(self, process: str, phase: PhaseDone) -> None:
        self._phases.setdefault(process, []).append(phase)
        kind = process.partition(" (")[0]  # without the rank
        self.show_line(f"{kind:>12}  {phase.phase:<16} {phase.seconds:6.2f} s  {phase.detail}".rstrip())

    def note_ready(self, message: Ready, is_server: bool) -> None:
        self.limits = self.limits if message.limits is None else message.limits
        self.is_server_up = self.is_server_up or is_server
        if self.is_server_up and self.limits is not None and not self.is_ready:
            self.is_ready = True
            self._show_ready(self.limits)

    def _show_ready(self, limits: EngineLimits) -> None:
        num_tokens = limits.num_kv_blocks * limits.page_size
        if limits.limited_by == "kv_cache_num_tokens":
            self.show_detail(
                "context",
                f"prompt and answer together may have {limits.max_tokens_per_sequence:,} tokens, not "
                f"{self.context_length:,}: the size of the KV cache, which kv_cache_num_tokens= sets",
            )
        times = [
            f"{process} {sum(phase.seconds for phase in phases):.1f} s "
            f"({', '.join(f'{phase.phase} {phase.seconds:.1f}' for phase in phases)})"
            for process, phases in self._phases.items()
        ]
        self.show_line(
            f"ready: {f'{self.address} serves ' if self.address else ''}{self.model}; "
            f"KV cache {num_tokens:,} tokens in {limits.num_kv_blocks:,} blocks of {limits.page_size}"
            f"{'' if self.num_replicas == 1 else f' for each of {self.num_replicas} replicas'}; "
            f"{', '.join(times)}; {time.perf_counter() - self.started:.1f} s in all"
        )
