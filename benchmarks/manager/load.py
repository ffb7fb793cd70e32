"""A synthetic load for the manager, a worker without a model, and an engine that runs with both in one process."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler

import numpy as np

from tokasaurus.config import ServerConfig
from tokasaurus.manager.engine.engine import Engine
from tokasaurus.manager.loop import LARGE_BYTES
from tokasaurus.manager.state.engine_state import DeferredTasks, EngineOptions, EngineState, make_state
from tokasaurus.messages.forward import ForwardInput, ForwardOutput
from tokasaurus.messages.generation import EngineUpdate, GenerateRequest
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.messages.status import EngineLimits
from tokasaurus.text.token_decoder import NO_TAIL

EOS_ID = 0
VOCAB_SIZE = 50_000
PAGE_SIZE = 16
MAX_TOKENS_PER_SEQUENCE = 8192
MAX_SEQS_PER_FORWARD = 16_384
MAX_TOKENS_PER_FORWARD = 32_768

NUM_POOL_TOKENS = 1 << 22
NUM_DRAWS = 1 << 16
"""Random lengths and positions drawn in advance, since the load must be made faster than the manager consumes it. The
same holds for the NUM_POOL_TOKENS random tokens, from which prompts and samples are cut. A load with more requests
reuses the draws, with its prompts cut at other positions."""


def engine_options(
    num_kv_tokens: int,
    max_seqs_per_forward: int = MAX_SEQS_PER_FORWARD,
    max_tokens_per_forward: int = MAX_TOKENS_PER_FORWARD,
    deferred_tasks: DeferredTasks | None = None,
) -> EngineOptions:
    """The default flags, with a KV cache of about `num_kv_tokens` tokens.

    Placeholders are enough for `decode_text` and `prompt_tail`, since no request of a Load has stop strings."""
    config = ServerConfig()
    config.max_seqs_per_forward, config.max_tokens_per_forward = max_seqs_per_forward, max_tokens_per_forward
    return EngineOptions(
        config=config,
        limits=EngineLimits(num_kv_tokens // PAGE_SIZE, PAGE_SIZE, MAX_TOKENS_PER_SEQUENCE),
        eos_ids=frozenset({EOS_ID}),
        decode_text=lambda token_ids: "".join(map(chr, token_ids)),
        prompt_tail=lambda _: NO_TAIL,
        special_ids=frozenset({EOS_ID}),
        deferred_tasks=deferred_tasks,
    )


class Load:
    """An endless sequence of requests with random prompts that share no prefix.

    prompt_lengths, completion_lengths: tokens; each request draws one entry of each, all entries equally likely.
    max_new_tokens: the limit in every request, at least the longest completion; eos ends a completion earlier, at a
    length that only the worker knows. None: each request asks for exactly its length and ignores eos.
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
            # The manager passes the seed to the worker unused, so here it tells the worker where to sample eos.
            seed=num_prompt_tokens + num_tokens,
            stop_strings=(),
            ignore_eos=self._max_new_tokens is None,
            want_logprobs=False,
        )


class InstantWorker:
    """Answers at once: random tokens for the rows that sample, and eos as the last token of each completion of a Load.

    forward_seconds: time that it reports for each step.
    """

    def __init__(self, num_slots: int, forward_seconds: float) -> None:
        self.forward_seconds = forward_seconds
        self.num_prefill_tokens = 0
        """Prompt tokens computed so far."""
        self.num_decode_tokens = 0
        """Decode rows computed so far."""
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
    """Totals of an InlineEngine since it was created."""

    num_steps: int = 0
    cpu_s: float = 0.0
    """CPU seconds of the manager, without load and worker."""
    num_generated_tokens: int = 0
    num_finished: int = 0
    """Finished sequences."""
    num_bytes_sent: int = 0
    """Bytes of pickled messages to the worker."""
    num_prompt_bytes_sent: int = 0
    """Bytes of prompt tokens in these messages."""
    num_decode_tokens: int = 0
    """Decode rows of all steps."""
    num_prefill_tokens: int = 0
    """Prompt tokens of all steps."""
    sum_running: int = 0
    """Running sequences, summed over steps."""
    section_s: dict[str, float] = field(default_factory=dict)
    """Wall seconds of the manager by section of a step."""

    def since(self, before: "Counts") -> "Counts":
        """Totals since `before`."""
        names = [name for name in Counts.__slots__ if name != "section_s"]
        sections = {name: total - before.section_s.get(name, 0.0) for name, total in self.section_s.items()}
        return Counts(**{name: getattr(self, name) - getattr(before, name) for name in names}, section_s=sections)


class InlineEngine:
    """The manager's engine and an InstantWorker in one process, with messages pickled as between processes.

    Each step of the engine receives the results of one forward, as in a server whose worker is always busy. The CPU
    time excludes load and worker.
    """

    def __init__(self, options: EngineOptions, load: Load, forward_seconds: float) -> None:
        np.empty(LARGE_BYTES, np.uint8)  # freed at once: glibc then keeps the memory of small arrays, as in run_manager
        self.state: EngineState = make_state(options)
        self.load = load
        self._engine = Engine(self.state, self._send)
        self._worker = InstantWorker(options.num_slots, forward_seconds)
        self._sent: deque[ForwardInput] = deque()
        self._counts = Counts()

    @property
    def counts(self) -> Counts:
        """A copy of the totals."""
        return Counts(
            **{name: getattr(self._counts, name) for name in Counts.__slots__ if name != "section_s"},
            section_s=dict(self._engine.timers.totals),
        )

    @property
    def is_idle(self) -> bool:
        return not self._sent and not self.state.slots.num_running and not self.state.queues.num_waiting

    def step(self, num_new_requests: int) -> int:
        """Run one engine step with new requests and the results of the oldest forward -> sequences that it finished."""
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
        counts.num_steps += 1
        counts.num_finished += num_finished
        counts.num_generated_tokens = state.totals.generation_tokens
        counts.sum_running += state.slots.num_running
        return num_finished

    def _send(self, message: ForwardInput) -> None:
        self._counts.num_bytes_sent += len(ForkingPickler.dumps(message))
        self._counts.num_prompt_bytes_sent += message.prompt_ids.nbytes
        self._sent.append(message)
