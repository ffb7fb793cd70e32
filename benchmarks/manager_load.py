"""A load for the manager, a worker that answers at once, and both driven in one process with the manager's turns."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler

import numpy as np

from tokasaurus.manager.engine.engine import Engine
from tokasaurus.manager.loop import LARGE_BYTES
from tokasaurus.manager.state.engine_state import EngineOptions, EngineState, make_state
from tokasaurus.messages.forward import ForwardInput, ForwardOutput
from tokasaurus.messages.generation import EngineUpdate, GenerateRequest
from tokasaurus.messages.lifecycle import EngineLimits
from tokasaurus.messages.sampling import SamplingParams

EOS_ID = 0
VOCAB_SIZE = 50_000
PAGE_SIZE = 16
MAX_TOKENS_PER_SEQUENCE = 8192
MAX_SEQS_PER_FORWARD = 16_384
MAX_TOKENS_PER_FORWARD = 32_768

NUM_POOL_TOKENS = 1 << 22
NUM_DRAWS = 1 << 16
"""Random tokens, of which prompts and samples are cut, and random lengths are made once, since the server must keep up
with the manager. Who needs more begins anew, prompts at other places."""


def engine_options(
    num_kv_tokens: int,
    max_seqs_per_forward: int = MAX_SEQS_PER_FORWARD,
    max_tokens_per_forward: int = MAX_TOKENS_PER_FORWARD,
    deferred_tasks: str | None = None,
) -> EngineOptions:
    """The engine's defaults, with a pool of about `num_kv_tokens`. No request of a Load has stop strings."""
    return EngineOptions(
        limits=EngineLimits(num_kv_tokens // PAGE_SIZE, PAGE_SIZE, MAX_TOKENS_PER_SEQUENCE),
        max_tokens_per_forward=max_tokens_per_forward,
        max_seqs_per_forward=max_seqs_per_forward,
        max_steps_ahead=8,
        eos_ids=frozenset({EOS_ID}),
        decode_text=lambda token_ids: "".join(map(chr, token_ids)),
        special_ids=frozenset({EOS_ID}),
        min_lookback_tokens=5,
        deferred_tasks=deferred_tasks,
    )


class Load:
    """An endless row of requests with random prompts, which share nothing.

    prompt_lengths, completion_lengths: tokens; each request draws one of either, all entries being equally likely.
    max_new_tokens: what requests ask for, at least the longest completion: eos ends them before, at a length that only
    the worker knows. None: each asks for exactly its length, and ignores eos.
    """

    def __init__(
        self,
        prompt_lengths: Sequence[int],
        completion_lengths: Sequence[int],
        max_new_tokens: int | None,
        seed: int = 0,
        num_samples: int = 1,
    ) -> None:
        rng = np.random.default_rng(seed)
        self._prompt_lengths: list[int] = rng.choice(prompt_lengths, NUM_DRAWS).tolist()
        self._completion_lengths: list[int] = rng.choice(completion_lengths, NUM_DRAWS).tolist()
        self._starts: list[int] = rng.integers(NUM_POOL_TOKENS // 2, size=NUM_DRAWS).tolist()
        self._tokens = rng.integers(1, VOCAB_SIZE, NUM_POOL_TOKENS, dtype=np.int32)
        self._max_new_tokens = max_new_tokens
        self._num_samples = num_samples
        self.num_requests = 0

    def next(self) -> GenerateRequest:
        round_, draw = divmod(self.num_requests, NUM_DRAWS)
        num_prompt_tokens, num_tokens = self._prompt_lengths[draw], self._completion_lengths[draw]
        start = self._starts[draw] + round_
        self.num_requests += 1
        return GenerateRequest(
            request_id=f"request-{self.num_requests}",
            prompt_ids=self._tokens[start : start + num_prompt_tokens].copy(),
            num_sequences=self._num_samples,
            max_new_tokens=num_tokens if self._max_new_tokens is None else self._max_new_tokens,
            sampling=SamplingParams(),
            # The seed is the one thing of a request that reaches the worker unread: it says where eos comes.
            seed=num_prompt_tokens + num_tokens,
            stop_strings=(),
            ignore_eos=self._max_new_tokens is None,
            want_logprobs=False,
        )


class InstantWorker:
    """Samples random tokens for the rows that sample, and eos as the last of each completion of a Load.

    forward_seconds: how long it says that a step took. num_prefill_tokens, num_decode_tokens: computed so far.
    """

    def __init__(self, num_slots: int, forward_seconds: float) -> None:
        self.forward_seconds = forward_seconds
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self._num_tokens = np.zeros(num_slots + 1, np.int64)
        self._num_prompt_tokens = np.zeros(num_slots + 1, np.int64)
        self._num_tokens_at_end = np.zeros(num_slots + 1, np.int64)
        self._tokens = np.random.default_rng(1).integers(1, VOCAB_SIZE, NUM_POOL_TOKENS, dtype=np.int32)
        self._next_token = 0

    def forward(self, message: ForwardInput) -> ForwardOutput:
        opened, num_decode = message.changes.opened, message.num_decode
        if opened is not None:
            self._num_tokens[opened.slots] = opened.first_positions
            self._num_prompt_tokens[opened.slots] = opened.num_prompt_tokens
            self._num_tokens_at_end[opened.slots] = opened.seeds
        slots = message.slots
        num_tokens = self._num_tokens[slots] + message.num_tokens
        self._num_tokens[slots] = num_tokens
        if len(slots) > num_decode:
            samples = num_tokens >= self._num_prompt_tokens[slots]
            slots, num_tokens = slots[samples], num_tokens[samples]
        if self._next_token + len(slots) > NUM_POOL_TOKENS:
            self._next_token = 0
        token_ids = self._tokens[self._next_token : self._next_token + len(slots)].copy()
        self._next_token += len(slots) + 1
        token_ids[num_tokens + 1 == self._num_tokens_at_end[slots]] = EOS_ID
        self.num_prefill_tokens += len(message.prompt_ids)
        self.num_decode_tokens += num_decode
        return ForwardOutput(message.step_id, token_ids, None, self.forward_seconds)


@dataclass(slots=True)
class Counts:
    """What an engine has done so far: of its manager, CPU seconds in all and wall seconds by section."""

    num_steps_deferred: int = 0
    cpu_s: float = 0.0
    num_generated_tokens: int = 0
    num_finished: int = 0
    num_bytes_sent: int = 0
    num_prompt_bytes_sent: int = 0
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    sum_running: int = 0
    section_s: dict[str, float] = field(default_factory=dict)

    def since(self, before: "Counts") -> "Counts":
        """What came after `before`."""
        names = [name for name in Counts.__slots__ if name != "section_s"]
        sections = {name: total - before.section_s.get(name, 0.0) for name, total in self.section_s.items()}
        return Counts(**{name: getattr(self, name) - getattr(before, name) for name in names}, section_s=sections)


class InlineEngine:
    """The manager's turns and an InstantWorker in one process. Messages are pickled and unpickled as between processes.

    One turn takes the results of one step, as in a server whose worker is busy all the time. Load and worker are not
    in the CPU time.
    """

    def __init__(self, options: EngineOptions, load: Load, forward_seconds: float) -> None:
        np.empty(LARGE_BYTES, np.uint8)  # and freed: glibc then keeps small arrays' pages, as in the manager's process
        self.state: EngineState = make_state(options)
        self.load = load
        self._engine = Engine(self.state, self._send)
        self._worker = InstantWorker(options.num_slots, forward_seconds)
        self._sent: deque[ForwardInput] = deque()
        self._counts = Counts()

    @property
    def counts(self) -> Counts:
        """A copy."""
        return Counts(
            **{name: getattr(self._counts, name) for name in Counts.__slots__ if name != "section_s"},
            section_s=dict(self._engine.timers.totals),
        )

    @property
    def is_idle(self) -> bool:
        return not self._sent and not self.state.num_running and not self.state.queues.num_waiting

    def turn(self, num_new_requests: int) -> int:
        """Add requests, and take one turn with the results of the oldest step. How many sequences it ended."""
        counts, state = self._counts, self.state
        requests = [ForkingPickler.dumps(self.load.next()) for _ in range(num_new_requests)]
        results = []
        if self._sent:
            message = self._sent.popleft()
            counts.num_decode_tokens += message.num_decode
            counts.num_prefill_tokens += len(message.prompt_ids)
            results = [ForkingPickler.dumps(self._worker.forward(message))]
        start_s = time.process_time()
        with self._engine.timers.section("receiving"):
            requests_read = [ForkingPickler.loads(data) for data in requests]
            results_read = [ForkingPickler.loads(data) for data in results]
        self._engine.step(requests_read, results_read)
        num_finished = len(state.deltas)
        if num_finished:
            with self._engine.timers.section("updates"):
                ForkingPickler.dumps(EngineUpdate(state.deltas, state.stats()))
                state.deltas = []
        counts.cpu_s += time.process_time() - start_s
        counts.num_steps_deferred += 1
        counts.num_finished += num_finished
        counts.num_generated_tokens = state.totals.generation_tokens
        counts.sum_running += state.num_running
        return num_finished

    def _send(self, message: ForwardInput) -> None:
        self._counts.num_bytes_sent += len(ForkingPickler.dumps(message))
        self._counts.num_prompt_bytes_sent += message.prompt_ids.nbytes
        self._sent.append(message)
