"""A real manager process between a fast worker and a requester; measures how long the worker has nothing to do."""

import dataclasses
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.manager.fast_device import COUNTERS, DeviceSpeed, pin, run_fast_worker
from benchmarks.manager.load import MAX_TOKENS_PER_SEQUENCE, PAGE_SIZE, Load
from benchmarks.manager.process import TIMEOUT_S, cpu_seconds, waiting_seconds, write_checkpoint
from tokasaurus.checkpoint import Checkpoint
from tokasaurus.config import ServerConfig
from tokasaurus.manager.loop import run_manager
from tokasaurus.manager.state.engine_state import Tuning
from tokasaurus.messages.channel import Receiver, Sender, make_channel, wait
from tokasaurus.messages.generation import EngineUpdate, GenerateRequest
from tokasaurus.messages.status import EngineLimits, EngineStats, Ready

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


def run_pinned_manager(cores: set[int], niceness: int, *arguments: Any) -> None:
    """Process entry: `run_manager` on some cores."""
    pin(cores, niceness)
    run_manager(*arguments)


class FastWorkerRun:
    """A manager and a fast worker as processes, with this process as the server."""

    def __init__(
        self,
        num_sequences: int,
        speed: DeviceSpeed,
        cores: Cores,
        niceness: int,
        checkpoint: Checkpoint,
        steps_ahead: int | None = None,
        tuning: Tuning = Tuning(),  # noqa: B008  (it is frozen)
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._load = StreamedLoad(STREAMED_SHARE)
        requests_in: Receiver[Any]
        updates_out: Sender[Any]
        self._requests: Sender[Any]
        self._updates: Receiver[EngineUpdate | Ready]
        self._status: Receiver[Any]
        requests_in, self._requests = make_channel()
        self._updates, updates_out = make_channel()
        inputs: tuple[Receiver[Any], Sender[Any]] = make_channel()
        outputs: tuple[Receiver[Any], Sender[Any]] = make_channel()
        status: Sender[Any]
        self._status, status = make_channel()
        self.counters = context.Array("d", len(COUNTERS), lock=False)
        limits = EngineLimits(num_sequences * KV_TOKENS_PER_SEQUENCE // PAGE_SIZE, PAGE_SIZE, MAX_TOKENS_PER_SEQUENCE)
        config = ServerConfig()
        config.max_tokens_per_forward = MAX_TOKENS_PER_FORWARD
        config.max_seqs_per_forward = num_sequences
        if steps_ahead is not None:
            config.scheduling_steps_ahead = steps_ahead
        channels = (0, requests_in, updates_out, [inputs[1]], outputs[0], status, tuning)
        self.manager: BaseProcess = context.Process(
            target=run_pinned_manager, args=(cores.manager, niceness, config, checkpoint, *channels), daemon=True
        )
        self.worker: BaseProcess = context.Process(
            target=run_fast_worker,
            args=(speed, num_sequences, cores.worker, niceness, self.counters, limits, inputs[0], outputs[1]),
            daemon=True,
        )
        self.manager.start()
        self.worker.start()
        for sender in (updates_out, inputs[1], outputs[1], status):
            sender.close()
        assert isinstance(self._receive()[0], Ready)

    def send_requests(self, num: int) -> None:
        for _ in range(num):
            self._requests.send(self._load.next())

    def serve(self) -> EngineStats:
        """Wait for updates and replace each finished request; return the newest statistics."""
        updates: list[EngineUpdate] = self._receive()
        num_ended = sum(delta.finish_reason is not None for update in updates for delta in update.deltas)
        self.send_requests(num_ended)
        return updates[-1].stats

    def kill(self) -> None:
        for process in (self.manager, self.worker):
            process.kill()
            process.join()

    def _receive(self) -> list[Any]:
        while True:
            ready = wait([self._updates, self.manager.sentinel, self.worker.sentinel], TIMEOUT_S)
            if ready != [self._updates]:
                raise RuntimeError("manager or worker died" if ready else f"no update within {TIMEOUT_S:g} s")
            self._status.drain()  # or the manager's signs of life would fill the pipe
            if messages := self._updates.drain():
                return messages


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
        while run.serve().num_running < 0.95 * num_sequences:
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
        tokens = run.serve().total_generation_tokens
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
