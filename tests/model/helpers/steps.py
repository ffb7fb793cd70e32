"""Drive a model runner as the manager does: open slots, allocate blocks and build steps."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from tokasaurus.checkpoint import ModelInfo, read_model_info, weight_files
from tokasaurus.checkpoint.spec import attentions_of
from tokasaurus.messages.forward import (
    ForwardInput,
    LogitRules,
    PrefixGroups,
    PromptLogprobsInput,
    SlotChanges,
    SlotOpens,
    StateSaves,
    TokenMasks,
)
from tokasaurus.messages.generation import SAMPLING_DTYPE
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.model.attention.backend import KVShape
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.buffer_sizes import BufferSizes
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.decoder.adapters import ModelAdapters
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.decoder.decoder import build_decoder
from tokasaurus.model.decoder.model import Model
from tokasaurus.model.decoder.weights import load_weights
from tokasaurus.model.execution.runner import ModelRunner, StepResult
from tokasaurus.model.execution.slot_table import SlotTable, SlotTableSize
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.parallel.stage_links import StageLinks
from tokasaurus.model.staging.staging import Transfers

CPU = torch.device("cpu")
NOTHING = np.zeros(0, np.int32)


def make_runner(
    model: Model,
    info: ModelInfo,
    backend: str | None,
    page_size: int = 16,
    num_blocks: int = 200,
    num_slots: int = 20,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    compiler: Compiler | None = None,
    transfers: Transfers | None = None,
    buffer_sizes: BufferSizes = BufferSizes(),  # noqa: B008  (it is frozen)
    mesh: Mesh = Mesh(),  # noqa: B008  (it is frozen)
    async_tp_threshold: int | None = None,
    links: StageLinks | None = None,
    max_graph_rows: int = 0,
    adapters: ModelAdapters | None = None,
    num_snapshots: int = 0,
) -> ModelRunner:
    num_heads, num_kv_heads = mesh.shard(info.num_heads, "heads")[1], mesh.kv_head_shard(info.num_kv_heads)[1]
    layers = attentions_of(model.spec.layers[index] for index in mesh.stage_layers(info))
    shape = KVShape(
        *(len(layers), num_heads, num_kv_heads, info.head_dim, page_size, dtype, device),
        activation_dtype=model.activation_dtype,
        layers=layers,
        sinks=model.sinks,
    )
    kernels = load_kernels()
    chosen = make_backend(backend, shape, kernels, max_graph_rows)
    chosen.allocate(num_blocks + 1)
    slots = SlotTable(SlotTableSize(num_slots + 1, -(-info.context_length // page_size)), device)
    slots.rules.allocate((num_blocks + 1) * page_size)
    places = model, chosen, slots, page_size, device, kernels
    rest = transfers, buffer_sizes, mesh, async_tp_threshold
    runner = ModelRunner(*places, compiler, *rest, links=links, adapters=adapters)
    runner.allocate_states(num_snapshots)
    return runner


def load_runner(directory: Path, dtype: torch.dtype) -> ModelRunner:
    """A runner with the attention backend and the weight layout that the server would choose."""
    info = read_model_info(directory)
    model = build_decoder(info, Mesh(), dtype)
    model.materialize(CPU, info.context_length)
    load_weights(weight_files(directory), model.weight_shards(), model.ignores, lambda _: None)
    model.pack(load_kernels())
    return make_runner(model, info, None, dtype=dtype)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: small operations take 100 times as long if their threads wait for a core."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def open_greedy(slot: int, num_prompt_tokens: int) -> SlotOpens:
    """One greedy slot, from its first position, without logprobs."""
    return SlotOpens(
        slots=int32([slot]),
        num_prompt_tokens=int32([num_prompt_tokens]),
        first_positions=int32([0]),
        sampling=np.array([SamplingParams(temperature=0)], SAMPLING_DTYPE),
        seeds=np.zeros(1, np.uint64),
        sample_indices=np.zeros(1, np.uint32),
        want_logprobs=np.zeros(1, np.bool_),
    )


class Runner(Protocol):
    """A ModelRunner, or several that act as one."""

    def run(self, step: ForwardInput, /) -> StepResult | None: ...


class StepDriver:
    """Opens slots, allocates scattered blocks (all blocks of a prompt at once), and runs steps with any mix of decode
    rows and prefill chunks."""

    def __init__(
        self, runner: Runner, page_size: int = 16, num_blocks: int = 200, seed: int = 0, want_logprobs: bool = True
    ) -> None:
        self.runner = runner
        self._want_logprobs = want_logprobs
        self._page_size = page_size
        self._free = np.random.default_rng(seed).permutation(np.arange(1, num_blocks + 1)).tolist()
        self._step_ids = itertools.count(1)
        self._prompts: dict[int, list[int]] = {}
        self._done: dict[int, int] = {}
        self._tables: dict[int, list[int]] = {}
        self._num_sent: dict[int, int] = {}
        self._to_open: list[int] = []
        self._to_close: list[int] = []
        self._options: dict[int, tuple[SamplingParams, int, int]] = {}
        self._rules: dict[int, LogitRules | None] = {}
        self._num_top: dict[int, int] = {}
        self._logprobs_as_sampled: dict[int, bool] = {}
        self._num_prompt_top: dict[int, int | None] = {}
        self._first_writes: dict[int, int] = {}
        self._adapters: dict[int, int] = {}
        self._snapshots: dict[int, int] = {}
        self._to_place: list[tuple[int, str]] = []
        self.top: dict[int, list[tuple[int, float]]] = {}
        self.logprobs_by_slot: dict[int, list[PromptLogprob]] = {}

    def open(
        self,
        slot: int,
        prompt: list[int],
        temperature: float = 0.0,
        seed: int = 0,
        sample: int = 0,
        shares: tuple[int, int] | None = None,
        rules: LogitRules | None = None,
        num_top: int = 0,
        num_prompt_top: int | None = None,
        num_recomputed: int = 0,
        logprobs_as_sampled: bool = False,
        adapter: int = 0,
        snapshot: int = 0,
        **params: Any,
    ) -> None:
        """shares: (other slot, blocks): this slot shares the first blocks of the other and starts after them.
        rules: logit rules of this slot; a step may open at most one slot that has rules.
        num_top: number of top-k logprobs in `top` after each step that samples for this slot.
        num_prompt_top: number of top-k logprobs for each prompt token, in `logprobs_by_slot` after each step that
        computes some of them; None: no prompt logprobs.
        num_recomputed: number of tokens at the end of the shared blocks that this slot computes again.
        logprobs_as_sampled, adapter: as in SlotOpens. snapshot: of the states where the slot starts; 0: none.
        params: further fields of SamplingParams."""
        other, num_shared = (slot, 0) if shares is None else shares
        table = [] if shares is None else self._tables[other][:num_shared]
        assert len(table) == num_shared
        self._prompts[slot], self._done[slot] = prompt, num_shared * self._page_size - num_recomputed
        self._first_writes[slot] = num_shared * self._page_size
        self._num_prompt_top[slot] = num_prompt_top
        self._tables[slot], self._num_sent[slot] = table, 0
        self._extend_table(slot, len(prompt))
        self._options[slot] = (SamplingParams(temperature, **params), seed, sample)
        self._rules[slot] = rules
        self._num_top[slot] = num_top
        self._logprobs_as_sampled[slot] = logprobs_as_sampled
        self._adapters[slot] = adapter
        self._snapshots[slot] = snapshot
        self._to_open.append(slot)

    def place_adapter(self, number: int, digest: str) -> None:
        """With the next step."""
        self._to_place.append((number, digest))

    def close(self, slot: int) -> None:
        """With the next step, which may open it again."""
        self._to_close.append(slot)

    def remaining(self, slot: int) -> int:
        """Prompt tokens not prefilled yet."""
        return max(0, len(self._prompts[slot]) - self._done[slot])

    def run(
        self,
        decode: list[int],
        prefill: list[tuple[int, int]],
        groups: list[tuple[int, int]] | None = None,
        masks: TokenMasks | None = None,
        saves: list[tuple[int, int, int]] | None = None,
    ) -> dict[int, tuple[int, float | None]]:
        """decode: slots. prefill: (slot, tokens) of each chunk. groups: (number of slots, shared blocks) of each group;
        groups cover the first slots of `decode` in order. saves: (index of the chunk, tokens, snapshot) of each.
        -> the sampled (token, logprob) by slot."""
        prompt_ids: list[int] = []
        block_slots: list[int] = []
        blocks: list[int] = []
        sampled = list(decode)
        opened = self._opened([*decode, *(slot for slot, _ in prefill)])
        logprob_slots, wanted = self._prompt_logprobs_input(len(decode), prefill)
        for slot, count in [*((slot, 1) for slot in decode), *prefill]:
            done = self._done[slot]
            if slot not in decode:
                prompt_ids += self._prompts[slot][done : done + count]
                if done + count == len(self._prompts[slot]):
                    sampled.append(slot)
            self._done[slot] = done + count
            self._extend_table(slot, done + count)
            unsent = self._tables[slot][self._num_sent[slot] :]
            self._num_sent[slot] += len(unsent)
            block_slots += [slot] * len(unsent)
            blocks += unsent
        lists = int32(block_slots), int32(blocks)
        changes = SlotChanges(int32(self._to_close), opened, *lists, adapters=tuple(self._to_place))
        self._to_close, self._to_place = [], []
        slots = [*decode, *(slot for slot, _ in prefill)]
        counts = [1] * len(decode) + [count for _, count in prefill]
        step = ForwardInput(
            step_id=next(self._step_ids),
            slots=int32(slots),
            num_tokens=int32(counts),
            num_decode=len(decode),
            prompt_ids=int32(prompt_ids),
            changes=changes,
            groups=None if groups is None else PrefixGroups(*map(int32, zip(*groups, strict=True))),
            prompt_logprobs=wanted,
            masks=masks,
            saves=_saves(len(decode), saves or []),
        )
        result = self.runner.run(step)
        assert result is not None
        top = result.output().top
        self.top = {}
        if top is not None:
            for row, ids, logprobs in zip(top.rows, top.token_ids.tolist(), top.logprobs.tolist(), strict=True):
                pairs = list(zip(ids, logprobs, strict=True))
                self.top[sampled[row]] = pairs[: self._num_top[sampled[row]]]
        self.logprobs_by_slot = _logprobs_by_slot(result, logprob_slots, wanted)
        return _by_slot(result, sampled)

    def num_shared_blocks(self, slots: list[int]) -> int:
        """Number of leading full blocks that all `slots` share; the next token of each slot comes after them."""
        tables = [self._tables[slot][: self._done[slot] // self._page_size] for slot in slots]
        shared = itertools.takewhile(lambda blocks: len(set(blocks)) == 1, zip(*tables, strict=False))
        return sum(1 for _ in shared)

    def _extend_table(self, slot: int, num_tokens: int) -> None:
        table = self._tables[slot]
        while len(table) * self._page_size < num_tokens:
            table.append(self._free.pop())

    def _prompt_logprobs_input(
        self, num_decode: int, prefill: list[tuple[int, int]]
    ) -> tuple[list[int], PromptLogprobsInput | None]:
        """-> the slots that compute prompt logprobs in this step, and the worker's input for them."""
        slots, rows, counts, target_ids = [], [], [], []
        for row, (slot, num_tokens) in enumerate(prefill, start=num_decode):
            if self._num_prompt_top[slot] is None:
                continue
            next_ids = self._prompts[slot][self._done[slot] + 1 :][:num_tokens]
            slots.append(slot)
            rows.append(row)
            counts.append(len(next_ids))
            target_ids += next_ids
        if not rows:
            return [], None
        num_top = max(self._num_prompt_top[slot] or 0 for slot in slots)
        return slots, PromptLogprobsInput(int32(rows), int32(counts), int32(target_ids), num_top)

    def _opened(self, running: list[int]) -> SlotOpens | None:
        """Open the slots of `running` that run for the first time; None if there is none."""
        slots = [slot for slot in self._to_open if slot in running]
        self._to_open = [slot for slot in self._to_open if slot not in running]
        if not slots:
            return None
        params, seeds, samples = zip(*(self._options[slot] for slot in slots), strict=True)
        rules = [self._rules[slot] for slot in slots if self._rules[slot] is not None]
        assert len(rules) <= 1
        return SlotOpens(
            slots=int32(slots),
            num_prompt_tokens=int32([len(self._prompts[slot]) for slot in slots]),
            first_positions=int32([self._done[slot] for slot in slots]),
            sampling=np.array(list(params), SAMPLING_DTYPE),
            seeds=np.array(seeds, np.uint64),
            sample_indices=np.array(samples, np.uint32),
            want_logprobs=np.full(len(slots), self._want_logprobs),
            rules=rules[0] if rules else None,
            num_top_logprobs=int32([self._num_top[slot] for slot in slots]),
            first_writes=int32([self._first_writes[slot] for slot in slots]),
            logprobs_as_sampled=np.array([self._logprobs_as_sampled[slot] for slot in slots]),
            adapters=int32([self._adapters[slot] for slot in slots]),
            snapshots=int32([self._snapshots[slot] for slot in slots]),
        )


@dataclass(frozen=True)
class PromptLogprob:
    """Log-probability of one prompt token."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    top: list[tuple[int, float]]
    """The most likely tokens: (token, logprob), most likely first."""


def _saves(num_decode: int, saves: list[tuple[int, int, int]]) -> StateSaves | None:
    if not saves:
        return None
    chunks, num_tokens, snapshots = zip(*saves, strict=True)
    return StateSaves(int32([num_decode + chunk for chunk in chunks]), int32(num_tokens), int32(snapshots))


def int32(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)


def _by_slot(result: StepResult, sampled: list[int]) -> dict[int, tuple[int, float | None]]:
    tokens = result.output().token_ids.tolist()
    if not sampled:
        assert tokens == []
        return {}
    logprobs = result.output().logprobs
    assert len(tokens) == len(sampled)
    values = [None] * len(tokens) if logprobs is None else logprobs.tolist()  # None from other ranks than the first
    return {slot: (token, value) for slot, token, value in zip(sampled, tokens, values, strict=True)}


def _logprobs_by_slot(
    result: StepResult, slots: list[int], wanted: PromptLogprobsInput | None
) -> dict[int, list[PromptLogprob]]:
    logprobs_by_slot = result.output().prompt_logprobs
    if wanted is None:
        assert logprobs_by_slot is None
        return {}
    assert logprobs_by_slot is not None
    tops = [
        list(zip(ids, logprobs, strict=True))
        for ids, logprobs in zip(logprobs_by_slot.top_ids.tolist(), logprobs_by_slot.top_logprobs.tolist(), strict=True)
    ]
    in_order = map(PromptLogprob, logprobs_by_slot.logprobs.tolist(), logprobs_by_slot.ranks.tolist(), tops)
    return {
        slot: list(itertools.islice(in_order, count)) for slot, count in zip(slots, wanted.counts.tolist(), strict=True)
    }
