"""Benchmarks how long a fast worker has nothing to do, with a real manager process and each of its measures off.

`python -m benchmarks.manager.fast_worker`. The worker has no model: its steps take the time of a fast device, on a
clock that spins. This process is the requester.
"""

import argparse
import dataclasses
import gc
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.manager.load import MAX_TOKENS_PER_SEQUENCE, PAGE_SIZE, InstantWorker, Load
from benchmarks.manager.measures import MEASURES
from benchmarks.manager.process import SPAWN, ManagerRun, cpu_seconds, waiting_seconds, write_checkpoint
from benchmarks.results import add_result_arguments, at_most, begin_results, end_results, make_console
from tokasaurus.checkpoint import Checkpoint
from tokasaurus.commands.bench.results import machine_facts, progress_bar
from tokasaurus.config import ServerConfig
from tokasaurus.manager.loop import run_manager
from tokasaurus.messages.channel import Receiver, Sender
from tokasaurus.messages.forward import ForwardInput, ForwardOutput
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.messages.status import EngineLimits, Ready

COUNTERS = ("idle_s", "busy_s", "stalled_s", "num_steps", "num_decode_rows", "num_prefill_tokens", "num_gaps", "queued")
"""What the worker counts in shared memory. idle_s: seconds without a queued or running step after the first step.
stalled_s: seconds in which the spinning process itself did not run. num_gaps: steps that found the device idle.
queued: steps in the queue or running when a step arrived, summed over steps."""

STALL_SECONDS = 0.0005
"""A pass of the spinning loop without a message that takes longer was interrupted by another process."""


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """How long a step takes."""

    step_s: float = 0.002
    """Seconds of every step, whatever its number of decode rows."""
    prefill_token_s: float = 0.060 / 8192
    """Additional seconds for each prompt token."""

    def seconds(self, message: ForwardInput) -> float:
        return self.step_s + self.prefill_token_s * len(message.prompt_ids)


def pin(cores: set[int], niceness: int) -> None:
    """Restrict this process to `cores` and change its niceness, as far as the system permits."""
    with suppress(OSError):
        os.sched_setaffinity(0, cores)
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)


class Device:
    """Computes steps one after the other in the time that `speed` gives. Times are seconds of one clock."""

    def __init__(self, speed: DeviceSpeed, num_slots: int, counters: Any) -> None:
        self._speed = speed
        self._worker = InstantWorker(num_slots, 0.0)
        self._counters = counters
        self._steps: deque[tuple[float, ForwardOutput]] = deque()
        self._free_s = 0.0  # when the newest step ends

    def queue(self, message: ForwardInput, now_s: float) -> None:
        """Begin the step now, or after the steps before it."""
        seconds = self._speed.seconds(message)
        idle_s = now_s - self._free_s if self._free_s else 0.0
        values = (max(0.0, idle_s), seconds, 0.0, 1, message.num_decode, len(message.prompt_ids), idle_s > 0)
        for index, value in enumerate((*values, len(self._steps))):
            self._counters[index] += value
        self._free_s = max(self._free_s, now_s) + seconds
        self._worker.forward_seconds = seconds
        self._steps.append((self._free_s, self._worker.forward(message)))

    def finished(self, now_s: float) -> ForwardOutput | None:
        """The result of the oldest step, if it has ended by now."""
        if self._steps and self._steps[0][0] <= now_s:
            return self._steps.popleft()[1]
        return None


def run_fast_worker(
    speed: DeviceSpeed,
    num_slots: int,
    cores: set[int],
    niceness: int,
    counters: Any,
    limits: EngineLimits,
    inputs: Receiver[ForwardInput],
    outputs: Sender[ForwardOutput | Ready],
) -> None:
    """Process entry: runs steps until `inputs` is closed. The process never sleeps.

    counters: shared array of doubles, one for each of COUNTERS.
    """
    pin(cores, niceness)
    device = Device(speed, num_slots, counters)
    outputs.send(Ready("worker", limits))
    gc.freeze()
    gc.disable()
    last_s = perf_counter()
    while not inputs.is_closed:
        messages = inputs.drain(1)
        now_s = perf_counter()
        # A step that has arrived counts from when it was read, before its result is prepared.
        for message in messages:
            device.queue(message, now_s)
        output = device.finished(now_s)
        if output is not None:
            outputs.send(output)
        if not messages and output is None and now_s - last_s > STALL_SECONDS:
            counters[COUNTERS.index("stalled_s")] += now_s - last_s
        last_s = perf_counter()


MAX_TOKENS_PER_FORWARD = 8192
MAX_NEW_TOKENS = 1024

SHORT_PROMPTS = range(32, 97)
LONG_PROMPTS = range(4096, 7169)
SHORT_PER_LONG = 63
"""One prompt in 64 is long: its prefill step takes 30 to 52 ms more, between decode steps of 2 ms."""

STREAMED_SHARE = 0.25
KV_TOKENS_PER_SEQUENCE = 1200
"""Size of the KV cache for each running sequence: twice what it needs on average, since slots are to be the limit."""


class StreamedLoad(Load):
    """A Load in which a share of the requests is streamed. Every completion ends at eos, at a random length."""

    def __init__(self, streamed_share: float, seed: int = 0) -> None:
        long = np.random.default_rng(seed).choice(LONG_PROMPTS, len(SHORT_PROMPTS))
        lengths = list(SHORT_PROMPTS) * SHORT_PER_LONG + long.tolist()
        super().__init__(lengths, range(1, MAX_NEW_TOKENS + 1), MAX_NEW_TOKENS, seed)
        self._streamed_share = streamed_share
        self._rng = np.random.default_rng(seed)

    def next(self) -> GenerateRequest:
        return dataclasses.replace(super().next(), is_streamed=self._rng.random() < self._streamed_share)


@dataclass(frozen=True, slots=True)
class Cores:
    """The CPU cores of each process."""

    worker: set[int]
    manager: set[int]
    requester: set[int]

    @property
    def are_shared(self) -> bool:
        """Whether manager and requester use the same core."""
        return self.manager == self.requester


def choose_cores() -> Cores:
    """The worker's clock has a core of its own. Manager and requester share one if there are only two."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return Cores(*[set(cores)] * 3)
    return Cores({cores[-1]}, {cores[0]}, {cores[1] if len(cores) > 2 else cores[0]})


@dataclass(frozen=True, slots=True)
class IdleWindow:
    """Figures of one measured window."""

    idle_share: float
    """Share of the wall time in which the worker had no step running or queued."""
    stalled_share: float
    """Share in which the worker's spinning process did not run, because the machine was busy with other processes."""
    manager_waiting_share: float
    """Share in which the manager was ready to run, but another process had its core."""
    manager_cpu_share: float
    steps_per_s: float
    tokens_per_s: float
    """Generated tokens that the manager counts, per second."""
    rows_per_step: float
    mean_step_ms: float
    mean_queued: float
    """Steps that each arriving step found queued or running, on average."""
    wasted_share: float
    """Share of the decode rows that were computed for sequences which had ended already."""


@dataclass(frozen=True, slots=True)
class IdleShare:
    """Medians over the windows of one run."""

    num_sequences: int
    name: str
    """Which measures were off, for people."""
    medians: IdleWindow
    windows: list[IdleWindow]


def run_pinned_manager(cores: set[int], niceness: int, measures_off: Sequence[str], *arguments: Any) -> None:
    """Process entry: `run_manager` on some cores, without some of MEASURES."""
    pin(cores, niceness)
    for name in measures_off:
        MEASURES[name]()
    run_manager(*arguments)


class FastWorkerRun(ManagerRun):
    """With a fast worker, both on cores of their own."""

    def __init__(
        self,
        num_sequences: int,
        speed: DeviceSpeed,
        cores: Cores,
        niceness: int,
        checkpoint: Checkpoint,
        steps_ahead: int | None = None,
        measures_off: Sequence[str] = (),
    ) -> None:
        self.counters = SPAWN.Array("d", len(COUNTERS), lock=False)
        limits = EngineLimits(num_sequences * KV_TOKENS_PER_SEQUENCE // PAGE_SIZE, PAGE_SIZE, MAX_TOKENS_PER_SEQUENCE)
        config = ServerConfig()
        config.max_tokens_per_forward = MAX_TOKENS_PER_FORWARD
        config.max_seqs_per_forward = num_sequences
        if steps_ahead is not None:
            config.scheduling_steps_ahead = steps_ahead
        super().__init__(
            *(StreamedLoad(STREAMED_SHARE), config, checkpoint),
            manager=(run_pinned_manager, (cores.manager, niceness, measures_off)),
            worker=(run_fast_worker, (speed, num_sequences, cores.worker, niceness, self.counters, limits)),
        )


@contextmanager
def fast_worker_run(num_sequences: int, speed: DeviceSpeed, niceness: int, **options: Any) -> Iterator[FastWorkerRun]:
    """Runs in this process's place as the requester, which is pinned meanwhile."""
    cores, own = choose_cores(), os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as directory:
        run = FastWorkerRun(num_sequences, speed, cores, niceness, write_checkpoint(Path(directory)), **options)
        niceness_before = os.getpriority(os.PRIO_PROCESS, 0)
        pin(cores.requester, niceness)
        try:
            yield run
        finally:
            pin(own, niceness_before)
            run.kill()


def measure_idle(
    num_sequences: int,
    name: str,
    speed: DeviceSpeed,
    niceness: int,
    warm_s: float,
    num_windows: int,
    window_s: float,
    advance: Callable[[float], None],
    **options: Any,
) -> IdleShare:
    """Measure windows of `window_s` seconds, `warm_s` seconds after the batch has filled.

    advance: called with the share done, from 0 to 1.
    """
    windows: list[IdleWindow] = []
    with fast_worker_run(num_sequences, speed, niceness, **options) as run:
        run.send_requests(num_sequences + max(32, num_sequences // 16))
        while run.serve()[-1].num_running < 0.95 * num_sequences:
            pass
        start_s = time.monotonic()
        while time.monotonic() < start_s + warm_s:
            run.serve()
        for index in range(num_windows):
            windows.append(_measure_window(run, window_s))
            advance((index + 1) / num_windows)
    medians = {
        field.name: statistics.median(getattr(window, field.name) for window in windows)
        for field in dataclasses.fields(IdleWindow)
    }
    return IdleShare(num_sequences, name, IdleWindow(**medians), windows)


def _measure_window(run: FastWorkerRun, window_s: float) -> IdleWindow:
    pid = run.manager.pid
    assert pid is not None

    def now() -> list[float]:
        tokens = run.serve()[-1].total_generation_tokens
        return [time.perf_counter(), tokens, cpu_seconds(pid), waiting_seconds(pid), *run.counters]

    before = now()
    while time.perf_counter() < before[0] + window_s:
        run.serve()
    wall_s, tokens, cpu_s, waiting_s, *counted = (b - a for a, b in zip(before, now(), strict=True))
    found = dict(zip(COUNTERS, counted, strict=True))
    num_steps = found["num_steps"]
    return IdleWindow(
        idle_share=found["idle_s"] / wall_s,
        stalled_share=found["stalled_s"] / wall_s,
        manager_waiting_share=waiting_s / wall_s,
        manager_cpu_share=cpu_s / wall_s,
        steps_per_s=num_steps / wall_s,
        tokens_per_s=tokens / wall_s,
        rows_per_step=found["num_decode_rows"] / num_steps,
        mean_step_ms=1e3 * found["busy_s"] / num_steps,
        mean_queued=found["queued"] / num_steps,
        wasted_share=max(0.0, 1 - tokens / found["num_decode_rows"]),
    )


MAX_IDLE_SHARE = 0.03
CHECKED_SEQUENCES = 1024


def variants(wanted: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Measures that are off, by name: none, each of `wanted` alone, and all."""
    found: dict[str, tuple[str, ...]] = {"all on": ()}
    found |= {f"{name} off": (name,) for name in wanted}
    return found | ({"all off": tuple(MEASURES)} if wanted else {})


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.manager.fast_worker", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[1024, 4096], metavar="N")
    parser.add_argument(
        "--off", nargs="*", default=list(MEASURES), choices=list(MEASURES), help="measures to turn off (default: each)"
    )
    parser.add_argument("--step-ms", type=float, default=2.0, help="time of a decode step (default: 2)")
    parser.add_argument("--prefill-ms", type=float, default=60.0, help="time of 8,192 prompt tokens (default: 60)")
    parser.add_argument("--steps-ahead", type=int, metavar="N", help="scheduling_steps_ahead (default: the server's)")
    parser.add_argument("--warm-seconds", type=float, default=8.0, help="time after the batch has filled (default: 8)")
    parser.add_argument("--windows", type=int, default=7, metavar="N", help="measured windows (default: 7)")
    parser.add_argument("--window-seconds", type=float, default=2.0, metavar="S", help="length of one (default: 2)")
    parser.add_argument("--niceness", type=int, default=0, help="of all processes; below 0 only as root (default: 0)")
    add_result_arguments(parser)
    return parser.parse_args(argv)


def print_table(found: Sequence[IdleShare], console: Console) -> None:
    table = Table(title="Share of time in which the worker has nothing to do (medians over windows)")
    columns = ("sequences", "measures", "idle", "least", "most", "steps/s", "ms a step", "queued", "manager CPU")
    for column in (*columns, "manager waits", "worker stalled"):
        table.add_column(column, justify="left" if column == "measures" else "right")
    for one in found:
        medians, idle = one.medians, [window.idle_share for window in one.windows]
        table.add_row(
            f"{one.num_sequences:,}",
            one.name,
            *(f"{share:.1%}" for share in (medians.idle_share, min(idle), max(idle))),
            f"{medians.steps_per_s:.0f}",
            f"{medians.mean_step_ms:.1f}",
            f"{medians.mean_queued:.1f}",
            *(f"{share:.0%}" for share in (medians.manager_cpu_share, medians.manager_waiting_share)),
            f"{medians.stalled_share:.1%}",
        )
    console.print(table)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 if --check was given and the limit was missed, otherwise 0."""
    args = parse(argv)
    console = make_console(160)
    results, cores = begin_results(args, machine_facts("numpy"), console), choose_cores()
    console.print(
        f"The worker's clock spins on core {sorted(cores.worker)}; the manager runs on {sorted(cores.manager)}, "
        f"the requester on {sorted(cores.requester)}" + (": they share it." if cores.are_shared else ".")
    )
    console.print("Load averages: " + ", ".join(f"{load:.1f}" for load in os.getloadavg()))
    speed = DeviceSpeed(args.step_ms / 1e3, args.prefill_ms / 8192e3)
    found = []
    for num_sequences in args.sequences:
        for name, measures_off in variants(args.off).items():
            with progress_bar(f"{num_sequences:,} sequences, {name}") as show:
                found.append(
                    measure_idle(
                        *(num_sequences, name, speed, args.niceness),
                        *(args.warm_seconds, args.windows, args.window_seconds, show),
                        steps_ahead=args.steps_ahead,
                        measures_off=measures_off,
                    )
                )
    print_table(found, console)
    checks = [
        at_most(f"share of time idle at {one.num_sequences:,} sequences", one.medians.idle_share, MAX_IDLE_SHARE)
        for one in found
        if one.name == "all on" and one.num_sequences == CHECKED_SEQUENCES
    ]
    return end_results(results | {"runs": found}, checks, args, console)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
