"""CPU time of a real manager process, with an InstantWorker, and a server that replaces each finished request."""

import math
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from benchmarks.manager.load import (
    EOS_ID,
    MAX_SEQS_PER_FORWARD,
    MAX_TOKENS_PER_FORWARD,
    VOCAB_SIZE,
    InstantWorker,
    Load,
    engine_options,
)
from benchmarks.manager.parts import FORWARD_SECONDS, make_load, num_outstanding, num_pool_tokens
from tests.helpers.plain_info import plain_info
from tokasaurus.checkpoint import Checkpoint, RopeInfo
from tokasaurus.config import ServerConfig
from tokasaurus.manager.loop import run_manager
from tokasaurus.messages.channel import (
    ChannelClosed,
    Receiver,
    Sender,
    make_channel,
    make_connection,
    send_connection,
    wait,
)
from tokasaurus.messages.forward import ForwardInput, ForwardOutput
from tokasaurus.messages.generation import EngineUpdate
from tokasaurus.messages.live import TakeSample
from tokasaurus.messages.status import EngineLimits, EngineStats, Ready

TIMEOUT_S = 60.0
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Window:
    """Figures of one measured window of a run."""

    manager_us_per_token: float
    """CPU microseconds of all threads of the manager process, per generated token."""
    worker_us_per_token: float
    """The same for the worker process."""
    tokens_per_s: float
    """Generated tokens per second of wall time."""
    mean_running: float
    """Running sequences, mean over the manager's updates."""
    mean_waiting: float
    """Waiting sequences, mean over the manager's updates."""
    bytes_per_row: float
    """Bytes of pickled messages to the worker per decode row."""
    preemptions: int


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """Medians over the windows of one run; fields with the names of Window have its meanings."""

    num_sequences: int
    """Running sequences, as asked for."""
    is_known: bool
    """Whether max_tokens of each request is its length; otherwise eos ends it at random."""
    manager_us_per_token: float
    min_us_per_token: float
    """Minimum of `manager_us_per_token` over the windows."""
    max_us_per_token: float
    """Maximum of `manager_us_per_token` over the windows."""
    worker_us_per_token: float
    tokens_per_s: float
    mean_running: float
    mean_waiting: float
    bytes_per_row: float
    preemptions: int
    """Sum over the windows."""
    torch_imported: bool
    """Whether the manager or the worker process imported torch."""
    windows: list[Window]


def cpu_seconds(pid: int) -> float:
    """CPU seconds of all current threads of the process. Linux only."""
    return _schedstat_seconds(pid, 0)


def waiting_seconds(pid: int) -> float:
    """Seconds that the threads of the process were ready to run but had no core. Linux only."""
    return _schedstat_seconds(pid, 1)


def _schedstat_seconds(pid: int, column: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[column]) for task in tasks) / 1e9


def write_checkpoint(directory: Path) -> Checkpoint:
    """A checkpoint without weights. Two tokens have text, which suffices because no request has stop strings."""
    tokenizer = Tokenizer(models.WordLevel({"<eos>": EOS_ID, "a": 1}, unk_token="a"))
    tokenizer.save(str(directory / "tokenizer.json"))
    info = plain_info("llama", 1, 8, 1, 1, 8, 8, VOCAB_SIZE, 8192, 1e-5, RopeInfo(1e4), True, (EOS_ID,), "float32")
    return Checkpoint("benchmark", directory, directory, info)


def run_watched_manager(facts: Sender[bool], *arguments: Any) -> None:
    """Process entry: runs `run_manager`, then sends whether torch was imported."""
    run_manager(*arguments)
    facts.send("torch" in sys.modules)


def run_instant_worker(
    facts: Sender[bool],
    counts: Any,
    limits: EngineLimits,
    inputs: Receiver[ForwardInput],
    outputs: Sender[ForwardOutput | Ready],
) -> None:
    """Process entry of the InstantWorker. counts: shared array of bytes received as pickles, and decode rows."""
    worker = InstantWorker(MAX_SEQS_PER_FORWARD, FORWARD_SECONDS)
    outputs.send(Ready("worker", limits))
    with suppress(ChannelClosed):
        while True:
            message = inputs.receive()
            outputs.send(worker.forward(message))
            counts[0] += len(ForkingPickler.dumps(message))
            counts[1] += message.num_decode
    facts.send("torch" in sys.modules)


class ManagerRun:
    """A manager process and a worker process, with this process as the server.

    manager: a process entry, and its arguments before those of `run_manager`, which it calls. worker: a process entry,
    and its arguments before the channels of inputs and outputs. senders: channels that only these processes send to."""

    def __init__(
        self,
        load: Load,
        config: ServerConfig,
        checkpoint: Checkpoint,
        manager: tuple[Callable[..., None], Sequence[Any]],
        worker: tuple[Callable[..., None], Sequence[Any]],
        senders: Sequence[Sender[Any]] = (),
    ) -> None:
        self._load = load
        self.num_samples = 0
        """Samples that were received."""
        self.launcher, manager_end = socket.socketpair()
        """Its end ends the manager."""
        self._server, of_manager = make_connection()
        send_connection(self.launcher, 0, of_manager)
        inputs: tuple[Receiver[ForwardInput], Sender[ForwardInput]] = make_channel()
        outputs: tuple[Receiver[ForwardOutput | Ready], Sender[ForwardOutput | Ready]] = make_channel()
        status: tuple[Receiver[Any], Sender[Any]] = make_channel()
        self._status = status[0]
        channels = (0, manager_end, [inputs[1]], outputs[0], None, status[1])
        entry, arguments = manager
        self.manager: BaseProcess = SPAWN.Process(
            target=entry, args=(*arguments, config, checkpoint, *channels), daemon=True
        )
        entry, arguments = worker
        self.worker: BaseProcess = SPAWN.Process(target=entry, args=(*arguments, inputs[0], outputs[1]), daemon=True)
        self.manager.start()
        self.worker.start()
        own_ends: Sequence[socket.socket | Sender[Any]] = (manager_end, inputs[1], outputs[1], status[1], *senders)
        for end in own_ends:
            end.close()
        assert isinstance(self._receive()[0], Ready)

    def send_requests(self, num: int) -> None:
        for _ in range(num):
            self._server.requests.send(self._load.next())

    def serve(self) -> list[EngineStats]:
        """Wait for updates and send a new request for each finished one -> the statistics of the updates."""
        messages = self._receive()
        updates = [message for message in messages if isinstance(message, EngineUpdate)]
        self.num_samples += len(messages) - len(updates)
        self.send_requests(sum(delta.finish_reason is not None for update in updates for delta in update.deltas))
        return [update.stats for update in updates]

    def ask_for_sample(self) -> None:
        """As the server does once a second while somebody watches. The answer counts in `num_samples`."""
        self._server.requests.send(TakeSample(begins=False))

    def kill(self) -> None:
        for process in (self.manager, self.worker):
            process.kill()
            process.join()

    def _receive(self) -> list[Any]:
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            sentinels = [self.manager.sentinel, self.worker.sentinel]
            ready = wait([self._server.updates, *sentinels], deadline_s - time.monotonic())
            if not ready or any(sentinel in ready for sentinel in sentinels):
                raise RuntimeError(
                    "manager or worker died" if ready else f"no update from the manager within {TIMEOUT_S:g} s"
                )
            self._status.drain()  # or the manager's signs of life would fill the pipe
            if messages := self._server.updates.drain():
                return messages


class ManagerUnderLoad(ManagerRun):
    """With an InstantWorker."""

    def __init__(self, load: Load, limits: EngineLimits, checkpoint: Checkpoint) -> None:
        facts: list[tuple[Receiver[bool], Sender[bool]]] = [make_channel(), make_channel()]
        self._facts = [receiver for receiver, _ in facts]
        (_, of_manager), (_, of_worker) = facts
        self.counts = SPAWN.Array("q", 2, lock=False)
        config = ServerConfig()
        config.max_tokens_per_forward = MAX_TOKENS_PER_FORWARD
        config.max_seqs_per_forward = MAX_SEQS_PER_FORWARD
        super().__init__(
            *(load, config, checkpoint),
            manager=(run_watched_manager, (of_manager,)),
            worker=(run_instant_worker, (of_worker, self.counts, limits)),
            senders=(of_manager, of_worker),
        )

    def stop(self) -> bool:
        """Shut down -> whether manager or worker imported torch. Raises RuntimeError if one of them failed."""
        self.launcher.close()
        torch_imported = [facts.receive(TIMEOUT_S) for facts in self._facts]
        for process in (self.manager, self.worker):
            process.join(TIMEOUT_S)
            if process.exitcode != 0:
                raise RuntimeError(f"{process.name} ended with exit code {process.exitcode}")
        return any(torch_imported)


@contextmanager
def manager_under_load(load: Load, limits: EngineLimits) -> Iterator[ManagerUnderLoad]:
    with tempfile.TemporaryDirectory() as directory:
        engine = ManagerUnderLoad(load, limits, write_checkpoint(Path(directory)))
        try:
            yield engine
        finally:
            engine.kill()


def measure_process(
    num_sequences: int,
    is_known: bool,
    num_warm_steps: int,
    num_windows: int,
    window_s: float,
    advance: Callable[[float], None],
) -> ProcessCost:
    """Measure while about `num_sequences` run and more wait. advance: called with the share done, from 0 to 1."""
    limits = engine_options(num_pool_tokens(num_sequences)).limits
    num_warm_tokens = num_sequences * num_warm_steps
    with manager_under_load(make_load(is_known), limits) as engine:
        engine.send_requests(num_outstanding(num_sequences))
        stats = engine.serve()[-1]
        while stats.total_generation_tokens < num_warm_tokens:
            stats = engine.serve()[-1]
            advance(stats.total_generation_tokens / num_warm_tokens / 2)
        windows = []
        for index in range(num_windows):
            windows.append(measure_window(engine, stats, window_s))
            stats = engine.serve()[-1]
            advance(0.5 + (index + 1) / num_windows / 2)
        torch_imported = engine.stop()
    manager_us = [window.manager_us_per_token for window in windows]
    return ProcessCost(
        num_sequences=num_sequences,
        is_known=is_known,
        manager_us_per_token=statistics.median(manager_us),
        min_us_per_token=min(manager_us),
        max_us_per_token=max(manager_us),
        worker_us_per_token=statistics.median(window.worker_us_per_token for window in windows),
        tokens_per_s=statistics.median(window.tokens_per_s for window in windows),
        mean_running=statistics.median(window.mean_running for window in windows),
        mean_waiting=statistics.median(window.mean_waiting for window in windows),
        bytes_per_row=statistics.median(window.bytes_per_row for window in windows),
        preemptions=sum(window.preemptions for window in windows),
        torch_imported=torch_imported,
        windows=windows,
    )


def measure_window(
    engine: ManagerUnderLoad, first: EngineStats, window_s: float, sample_every_s: float = math.inf
) -> Window:
    """first: the newest statistics when the window begins. sample_every_s: time between two samples asked for."""

    def now() -> tuple[float, float, float, int, int]:
        pids = engine.manager.pid, engine.worker.pid
        manager_s, worker_s = (cpu_seconds(pid) for pid in pids if pid is not None)
        return time.monotonic(), manager_s, worker_s, engine.counts[0], engine.counts[1]

    before = now()
    seen: list[EngineStats] = []
    due_s = before[0] + sample_every_s / 2
    while (now_s := time.monotonic()) < before[0] + window_s:
        if now_s >= due_s:
            engine.ask_for_sample()
            due_s += sample_every_s
        seen += engine.serve()
    last = seen[-1]
    wall_s, manager_s, worker_s, num_bytes, num_rows = (b - a for a, b in zip(before, now(), strict=True))
    num_tokens = last.total_generation_tokens - first.total_generation_tokens
    return Window(
        manager_us_per_token=manager_s * 1e6 / num_tokens,
        worker_us_per_token=worker_s * 1e6 / num_tokens,
        tokens_per_s=num_tokens / wall_s,
        mean_running=statistics.fmean(stats.num_running for stats in seen),
        mean_waiting=statistics.fmean(stats.num_waiting for stats in seen),
        bytes_per_row=num_bytes / num_rows,
        preemptions=last.total_preemptions - first.total_preemptions,
    )
