"""Drives an engine and a fake worker in one process, step by step."""

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.helpers.flags import config_with
from tests.manager.helpers.block_accounting import assert_each_block_has_one_owner, tree_nodes
from tests.manager.helpers.fake_grammars import EOS_ID
from tests.manager.helpers.fake_prompt_logprobs import assert_stored_logprobs_are_true
from tests.manager.helpers.fake_worker import FakeWorker
from tests.manager.helpers.simulation import decode_text, prompt_tail
from tokasaurus.config import ServerConfig
from tokasaurus.manager.engine.engine import Engine
from tokasaurus.manager.planning.length_predictor import Forecast
from tokasaurus.manager.state.engine_state import EngineOptions, make_state
from tokasaurus.manager.state.grammar_manager import Grammars, Job
from tokasaurus.manager.state.sequence import Sequence
from tokasaurus.messages.commands import (
    FIRST_VERSION,
    ClearCache,
    CommandDone,
    EngineCommand,
    LoadAdapter,
    Pause,
    Resume,
    UnloadAdapter,
    UpdateWeights,
    WorkerCommand,
)
from tokasaurus.messages.forward import ForwardInput, ForwardOutput
from tokasaurus.messages.generation import CancelRequest, GenerateRequest, SequenceDelta
from tokasaurus.messages.status import EngineLimits, WindowGroups
from tokasaurus.text.grammars import GrammarVocabulary

QUICK_STEP_SECONDS = 0.001

NEVER_LEARNS: dict[str, Any] = {
    "use_spec_allocation": True,
    "track_early_stopping": False,
    "early_stopping_init_mean": 0.01,
}
"""Flags. They predict that a sequence ends with its first tokens, and that it reaches max_new_tokens if it did not."""


class EndsNext:
    """A forecast that every sequence ends with its next token: it admits far too many, so preemption is constant."""

    def expected(
        self, num_generated: NDArray[np.int64], max_new_tokens: NDArray[np.int64], _ranks: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        return np.minimum(num_generated + 1, max_new_tokens)


def make_options(
    num_blocks: int = 20,
    page_size: int = 4,
    windows: WindowGroups | None = None,
    num_snapshots: int = 0,
    **changed: Any,
) -> EngineOptions:
    """Options of a small engine, which expects every sequence to reach max_new_tokens. num_blocks: of tokens; with
    windows, as many blocks as a sequence of so many needs. changed: flags, and fields of EngineOptions."""
    max_tokens = num_blocks * page_size
    if windows is not None:
        num_blocks = windows.num_blocks(num_blocks, page_size)
    flags = {
        "max_tokens_per_forward": 16,
        "max_seqs_per_forward": 4,
        "use_spec_allocation": False,
    }
    fields: dict[str, Any] = {
        "limits": EngineLimits(num_blocks, page_size, max_tokens, windows=windows, num_snapshots=num_snapshots),
        "eos_ids": frozenset({EOS_ID}),
        "decode_text": decode_text,
        "prompt_tail": prompt_tail,
        "special_ids": frozenset({EOS_ID}),
    }
    for name, value in changed.items():
        (flags if hasattr(ServerConfig, name) else fields)[name] = value
    return EngineOptions(config=config_with(**flags), **fields)


def with_flags(options: EngineOptions, **flags: Any) -> EngineOptions:
    """The same options with other flags."""
    before = {name: getattr(options.config, name) for name in ServerConfig.flags}
    return replace(options, config=config_with(**before | flags))


@dataclass
class EngineDriver:
    """Runs one `step` at a time: the worker computes some of the steps sent to it, then the engine gets the results."""

    options: EngineOptions = field(default_factory=make_options)
    step_seconds: tuple[float, ...] = (0.002, 0.01, 0.1)
    """Durations that the worker reports for a step; one of them is chosen at random."""
    forecast: Forecast | None = None
    """Used throughout, in place of the forecast that `options` configure."""
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    queue: deque[ForwardInput] = field(default_factory=deque)
    """Steps sent to the worker and not yet computed."""
    deltas: list[SequenceDelta] = field(default_factory=list)
    """Deltas of all steps."""
    max_in_flight: int = 0
    """The largest number of steps that the worker had at once."""
    vocabulary: GrammarVocabulary | None = None
    """Vocabulary of grammars; None if no request has a grammar."""
    pause_rate: float = 0.0
    """Probability that `run` sends the commands of a pause in a step, some with new weights."""
    commands: list[WorkerCommand] = field(default_factory=list)
    """Sent to the worker and not yet answered: one at most."""
    done: list[CommandDone] = field(default_factory=list)
    """Answers to all commands."""
    versions: list[str] = field(default_factory=lambda: [FIRST_VERSION])
    """Of all weights that the worker has had, the first ones included."""
    jobs: tuple[deque[Job], deque[Job]] = field(default_factory=lambda: (deque(), deque()))
    """Waiting jobs of the grammar manager's two threads; a step runs some, each with probability job_rate."""

    def __post_init__(self) -> None:
        options = self.options
        self.worker = FakeWorker(
            options.limits, options.config.max_tokens_per_forward, options.config.max_seqs_per_forward
        )
        grammars = None
        self.job_rate = self.rng.choice([0.2, 0.7, 0.9])
        if self.vocabulary is not None:
            grammars = Grammars(self.vocabulary, 1, *(partial(self._add_job, jobs) for jobs in self.jobs))
        self.state = make_state(options, grammars)
        if self.forecast is not None:
            self.state.lengths.forecast = self.forecast
        self.engine = Engine(self.state, self.send, send_command=self.send_command)

    def assume_step_seconds(self, seconds: float) -> None:
        """Let the engine expect that every step takes this time, whatever it computes."""
        self.state.step_seconds = seconds
        self.state.step_time_model.weights = np.array([seconds, *[1e-15] * 4])

    def send(self, message: ForwardInput) -> None:
        self.queue.append(message)
        self.max_in_flight = max(self.max_in_flight, len(self.queue))

    def send_command(self, command: WorkerCommand) -> None:
        assert not self.commands
        if not isinstance(command, LoadAdapter | UnloadAdapter):
            assert not self.queue, "a command while steps run"
            assert not self.running()
        self.commands.append(command)

    def step(
        self, messages: Iterable[GenerateRequest | CancelRequest | EngineCommand] = (), num_results: int = 0
    ) -> list[SequenceDelta]:
        """Compute up to `num_results` of the steps sent, then run one engine step; return its deltas."""
        messages = list(messages)
        requests = [message for message in messages if isinstance(message, GenerateRequest)]
        self.worker.requests.update((request.seed, request) for request in requests)
        for jobs in self.jobs:
            self._run_jobs(jobs)
        num_results = min(num_results, len(self.queue))
        results: list[ForwardOutput | CommandDone] = [
            self.worker.forward(self.queue.popleft(), self.rng.choice(self.step_seconds)) for _ in range(num_results)
        ]
        if self.commands and self.rng.random() < 0.5:
            results.append(self._answer(self.commands.pop()))
        self.engine.step(messages, results)
        self.done += self.state.done
        self.state.done = []
        deltas, self.state.deltas = self.state.deltas, []
        self.deltas += deltas
        assert len(self.state.steps_in_flight) == len(self.queue)
        return deltas

    def _answer(self, command: WorkerCommand) -> CommandDone:
        if isinstance(command, UpdateWeights):
            if command.directory == "bad":
                return CommandDone(command.command_id, "no such directory")
            self.versions.append(command.version)
        return CommandDone(command.command_id)

    def _unfinished_work(self) -> list[object]:
        return [self.state.ending, self.state.queues.num_waiting, self.state.commands]

    def _pause_commands(self, first_id: int) -> list[EngineCommand]:
        """A pause, with what may happen in it, and its end."""
        commands: list[EngineCommand] = [Pause(first_id, aborts=False)]
        if self.rng.random() < 0.3:
            commands.append(ClearCache(first_id + 1))
        if self.rng.random() < 0.7:
            directory, clears = self.rng.choice(["good", "good", "bad"]), self.rng.random() < 0.5
            commands.append(
                UpdateWeights(first_id + 2, directory, f"v{first_id}", is_partial=False, clears_cache=clears)
            )
        return [*commands, Resume(first_id + 3)]

    def _add_job(self, jobs: deque[Job], job: Job) -> None:
        jobs.append(job)
        self._run_jobs(jobs)

    def _run_jobs(self, jobs: deque[Job]) -> None:
        while jobs and self.rng.random() < self.job_rate:
            jobs.popleft()()

    def run_until_idle(self, max_results: int = 3) -> None:
        while self.queue or self.state.ending or any(self.jobs):
            self.step([], self.rng.randint(1, max_results))
        assert self.state.queues.num_waiting == 0, "sequences wait but no step was sent"

    def run(self, requests: Iterable[GenerateRequest], cancelled: Iterable[str] = (), check_share: float = 0.1) -> None:
        """Send `requests` in order at random steps; later cancel the ids in `cancelled`, some of them twice.

        check_share: fraction of the steps after which the owners of all blocks are checked."""
        unsent, cancelled = deque(requests), set(cancelled)
        to_cancel: list[str] = []
        commands: deque[EngineCommand] = deque()
        num_commands = 0
        while any([unsent, commands, to_cancel, self.queue, *self.jobs, *self._unfinished_work()]):
            messages: list[GenerateRequest | CancelRequest | EngineCommand] = []
            while unsent and self.rng.random() < 0.5:
                request = unsent.popleft()
                messages.append(request)
                if request.request_id in cancelled:
                    to_cancel += [request.request_id] * self.rng.choice([1, 1, 2])
            self.rng.shuffle(to_cancel)
            while to_cancel and self.rng.random() < 0.2:
                messages.append(CancelRequest(to_cancel.pop()))
            if not commands and self.rng.random() < self.pause_rate:
                commands += self._pause_commands(4 * num_commands)
                num_commands += 1
            while commands and self.rng.random() < 0.5:
                messages.append(commands.popleft())
            self.step(messages, self.rng.randint(0, 3))
            if self.rng.random() < check_share:
                assert_each_block_has_one_owner(self.state)

    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.state.slots.sequences if sequence is not None]

    def assert_nothing_is_left(self) -> None:
        """After all work: no sequence has left state, every slot is free, the worker's memory has the tokens that the
        prefix tree caches, and every block can be allocated."""
        assert not self.step()
        state, num_slots = self.state, self.options.num_slots
        stats = state.stats()
        assert stats.num_running_background == 0
        assert (stats.num_running, stats.num_waiting, stats.num_kv_blocks_used, stats.worker_queue_depth) == (0,) * 4
        assert not state.unfinished
        assert not state.adapters.num_held
        assert not state.adapters.take_released()
        assert state.slots.num_with_adapters == 0
        assert not state.has_uncounted
        assert state.slots.num_with_stops == state.slots.num_with_stop_tokens == state.slots.num_with_grammars == 0
        assert state.slots.num_with_experts == 0
        assert not state.slots.has_grammar.any()
        assert not state.slots.awaits_matcher.any()
        assert (state.slots.stop_token_ids == -1).all()
        assert state.slots.sequences == [None] * (num_slots + 1)
        assert sorted(state.slots.free) == list(range(1, num_slots + 1))
        assert not state.slots.is_running.any()
        assert not state.slots.is_decoding.any()
        assert not state.slots.block_tables.any()
        assert not state.queues.prefilling
        assert not len(state.queues.decoding())
        assert_each_block_has_one_owner(state)
        for node in tree_nodes(state):
            assert state.blocks.is_computed[node.blocks].all()
            assert self.worker.memory[node.blocks].astype(np.int32).tobytes() == node.tokens
        if state.blocks.prompt_logprobs is not None:
            assert not (state.blocks.prompt_logprobs.num_top > np.where(state.blocks.is_computed, 1 << 30, -1)).any()
            assert_stored_logprobs_are_true(state, state.blocks.prompt_logprobs)
        num_blocks = state.blocks.num_blocks
        assert sorted(state.blocks.allocate(num_blocks).tolist()) == list(range(1, num_blocks + 1))
        assert state.blocks.tree.num_blocks == 0


def make_quick_driver(options: EngineOptions, seed: int = 0, forecast: Forecast | None = None) -> EngineDriver:
    """An engine whose measured step time is so short that it sends scheduling_steps_ahead steps ahead."""
    driver = EngineDriver(options, (QUICK_STEP_SECONDS,), forecast, random.Random(seed))
    driver.assume_step_seconds(QUICK_STEP_SECONDS)
    return driver
