"""The checks of a start. It computes with small inputs on the device at hand, compares with plain torch, and switches
off what differs or raises. Each check yields what it measured; `toka check` shows it all.

- Attention of a backend, against plain float32 torch on the host, for this worker's heads and dtypes.
- Sampling, against the same by plain torch.
- Whole steps of the loaded model: compiled and fused layers against their torch modules, replayed graphs against
  launched steps. Both sides round differently, and a deep model may magnify one rounding of its input to the size of
  the result. So each difference is compared with what such a rounding does: the same step is also launched with a
  perturbed input.

Triton kernels take part in these by groups. What differs or raises is computed once more without each of its groups: if
that is right, the group is switched off alone. kernel_checks.py compares each kernel by itself.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.messages.forward import ForwardInput, PrefixGroups, SlotChanges
from tokasaurus.messages.status import FlagRefused, UserError, describe_error
from tokasaurus.model.attention.backend import (
    AttentionBackend,
    KVShape,
    PagedLayout,
    PagedPart,
    RecordableBackend,
    RecordedMemory,
    allocate_apart,
    as_stored,
)
from tokasaurus.model.attention.block_lists import as_in_steps, in_recorded
from tokasaurus.model.attention.reference import ReferenceBackend
from tokasaurus.model.attention.row_split import Attends, attends_over
from tokasaurus.model.buffer_sizes import max_graph_groups, padded_count
from tokasaurus.model.decoder.adapters import ModelAdapters
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.decoder.model import LayerExecutor, Model
from tokasaurus.model.decoder.state_rows import ZEROS, Segments
from tokasaurus.model.execution.executors import ModuleExecutor
from tokasaurus.model.execution.runner import ComputedStep, ModelRunner
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.triton_choice import KernelGroup, switch_off, switched_off
from tokasaurus.model.worker.warmup import ForwardLimits, plain_opens

# T tokens in this forward, R rows that sample or decode, E hidden size, H query heads, K key/value heads, D head size,
# V vocabulary

logger = logging.getLogger(__name__)

TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.03, torch.int8: 0.03}
"""Largest allowed difference, as a share of the largest expected value, by dtype of what is computed. Codes of an int8
cache are compared with what they stand for; they are multiplied as bfloat16, where the processor can."""

_CPU = torch.device("cpu")
_DECODE_TOKENS = (1, 16, 40, 47)
"""Tokens that decode rows attend to, their own included."""
_PREFILL = ((5, 5), (3, 37), (20, 50))
"""(rows, tokens that the last one attends to) of each prompt: a first chunk and two later ones."""
_SHARED_BLOCKS = 2
"""Blocks of the prefix of a group."""

_LONGEST_WINDOW, _LONGEST_CHUNK = 4096, 8192
"""No sequence fills a longer window, or ends a longer chunk: plain torch would need too much time and memory on the
host."""

_LOST: dict[KernelGroup, str] = {
    "attention": "KV writes, merging of shared prefixes and block lists take several launches each",
    "sampling": "tokens are drawn by plain torch, which sorts the vocabulary for limits and is not in CUDA graphs",
    "layers": "layers take over 25 launches instead of eight, unless torch_compile=T compiles them",
    "steps": "a recorded decode step takes up to twenty launches beside its graphs instead of one",
    "experts": "each expert multiplies all rows",
    "adapters": "steps with adapters are in no graphs, and each layer takes several launches for each adapter",
}

ROW_TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.005, torch.bfloat16: 0.02}
"""Allowed difference of a row, by dtype of activations: the norm of the difference as a share of the norm."""

NOISE_FACTOR = 4
"""A row may also differ by this many times what one rounding of the input changes."""

_PROMPTS = (5, 20, 30)
"""Tokens of the sequences that the layers compute."""
_CHUNK = 7
"""Tokens of a second chunk of the first prompt."""

NUM_SEQUENCES = 8
"""Different sequences among a decode step's rows."""
_NUM_MIXED_DECODES = 2
"""Decode rows of a checked step with prompts."""
_MAX_OWN = 16
"""Tokens of a sequence after the shared block."""

_RANDOM, _RANK = "random", 4
"""Of a checked adapter."""

_NOTHING = np.zeros(0, np.int32)


class Measured(NamedTuple):
    """How far a result is from what is expected."""

    name: str
    """What was computed, for the user."""
    error: float
    """The difference as a share of what is expected. NaN: only one of both is NaN somewhere."""
    tolerance: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.tolerance


Measure: TypeAlias = Callable[[], Iterator[Measured]]


def compared(name: str, found: Tensor, expected: Tensor, tolerance: float) -> Measured:
    """Both of one shape: the largest difference as a share of the largest expected value. NaN equals NaN."""
    found, expected = found.double(), expected.double()
    is_nan = expected.isnan()
    if not torch.equal(found.isnan(), is_nan):
        return Measured(name, torch.nan, tolerance)
    found, expected = found.masked_fill(is_nan, 0), expected.masked_fill(is_nan, 0)
    if torch.equal(found, expected):
        return Measured(name, 0.0, tolerance)
    return Measured(name, float((found - expected).abs().max() / expected.abs().max()), tolerance)


def _describe(measured: Measured) -> str:
    """One line on a result that is not right."""
    return f"{measured.name} differs by {measured.error:.2g}, allowed is {measured.tolerance:.2g}"


@dataclass(frozen=True, slots=True)
class Result:
    """What a check has found."""

    feature: str
    """The checked feature's label in the metric toka_switched_off."""
    measured: Measured | None
    """None: the check raised an error."""
    failure: str | None
    """One line if it is not right."""
    seconds: float
    """Seconds since the last result of the same check, or since its beginning."""


class Checks:
    """The checks of one start: their results, and what they have switched off."""

    def __init__(
        self,
        all_agree: Callable[[bool], bool] = bool,
        is_thorough: bool = False,
        on_result: Callable[[Result], None] = lambda _: None,
    ) -> None:
        """all_agree: whether it is true of every rank; all ranks run the same checks. is_thorough: check also what a
        start takes for granted, such as the kernels of the CPU. on_result: called with each as it is found."""
        self._on_result = on_result
        self.all_agree = all_agree
        self.is_thorough = is_thorough
        self.results: list[Result] = []
        self.switched_off: list[str] = []
        """Features, in the order in which they were found."""

    def describe(self) -> str:
        """How many comparisons there were, and their time with all that they compiled and recorded, for the user."""
        return f"{len(self.results)} comparisons in {sum(result.seconds for result in self.results):.1f} s"

    def add(self, result: Result) -> None:
        self.results.append(result)
        self._on_result(result)

    def passes(
        self,
        feature: str,
        measure: Measure,
        what: str,
        without: str,
        flag: str | None = None,
        groups: Iterable[KernelGroup] = (),
    ) -> bool:
        """Whether the feature computes rightly on all ranks. Otherwise it is noted as switched off, with one line in
        the log: `what` is switched off, why, and what happens `without`.

        what: the feature as the subject of a sentence, with its verb. flag: asks for the feature by name; then
        FlagRefused is raised instead. groups: of the Triton kernels in use that take part; one without which the
        feature is right is switched off in its place. Raises OutOfMemoryError, which says nothing about the
        feature."""
        wrong = self.describe_wrong(feature, measure)
        if self.all_agree(wrong is None):
            return True
        wrong = wrong or "it fails on another rank"
        for group in groups:
            with switched_off(group):
                is_right = self.all_agree(self.describe_wrong(feature, measure) is None)
            if is_right:
                self._switch_off_kernels(group, wrong)
                return True
        if flag is not None:
            raise FlagRefused(f"{flag}: {wrong}")
        self._note_switched_off(feature, what, wrong, without)
        return False

    def check_kernels(self, group: KernelGroup, measure: Measure) -> None:
        """Switch the group off if what it computes is wrong on any rank."""
        wrong = self.describe_wrong(f"triton_{group}", measure)
        if not self.all_agree(wrong is None):
            self._switch_off_kernels(group, wrong or "it fails on another rank")

    def _switch_off_kernels(self, group: KernelGroup, wrong: str) -> None:
        switch_off(group)
        without = f"without them, {_LOST[group]}. Triton needs a C compiler"
        self._note_switched_off(f"triton_{group}", f"the Triton kernels of {group} are", wrong, without)

    def _note_switched_off(self, feature: str, what: str, wrong: str, without: str) -> None:
        logger.warning("%s switched off: %s; %s", what, wrong, without)
        self.switched_off.append(feature)

    def describe_wrong(self, feature: str, measure: Measure) -> str | None:
        """One line on the first result beyond its tolerance, or on what was raised; None if all is right."""
        failures: list[str] = []
        began_s = time.perf_counter()
        try:
            for measured in measure():  # all: also after a wrong one, other ranks wait for this one in its collectives
                failure = None if measured.is_right else _describe(measured)
                failures += [] if failure is None else [failure]
                self.add(Result(feature, measured, failure, time.perf_counter() - began_s))
                began_s = time.perf_counter()
        except (torch.OutOfMemoryError, UserError):
            raise
        except Exception as error:  # of a library, its compilers or a driver, which have errors of many classes
            logger.debug("the check of %s failed", feature, exc_info=error)
            failures.append(describe_error(error))
            self.add(Result(feature, None, failures[-1], 0.0))
        return next(iter(failures), None)

    def leave_out(self, feature: str, reason: str) -> None:
        """Note a feature that is switched off, which the caller has logged."""
        self.add(Result(feature, None, reason, 0.0))
        self.switched_off.append(feature)


class Context(NamedTuple):
    """A sequence's end in this forward."""

    num_rows: int
    num_tokens: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class SmallForward:
    """A forward of few short sequences, with a name for the user. Rows that are grouped by prefix can also be computed
    alone."""

    name: str
    contexts: tuple[Context, ...]
    num_grouped: int = 0
    """The first contexts, which share _SHARED_BLOCKS."""
    is_recorded: bool = False

    @property
    def positions(self) -> Tensor:
        """int64 [T]."""
        return torch.tensor(
            [
                position
                for context in self.contexts
                for position in range(context.num_tokens - context.num_rows, context.num_tokens)
            ]
        )

    @property
    def segments(self) -> Segments:
        """Of layers with states, where each context has a row of its own."""
        counts = np.array([context.num_rows for context in self.contexts], np.int32)
        begins = np.array([context.num_rows == context.num_tokens for context in self.contexts])
        targets = np.arange(1, 1 + len(counts), dtype=np.int32)
        num_decode = int(np.argmax(np.append((counts > 1) | begins, True)))
        chains = np.arange(len(counts) + 1, dtype=np.int32)
        sources = np.where(begins, np.int32(ZEROS), targets)
        return Segments(num_decode, np.cumsum(counts, dtype=np.int32) - counts, counts, sources, targets, chains)

    def planned(
        self, backend: AttentionBackend, shape: KVShape, num_padding: int = 0
    ) -> tuple[PagedLayout, Tensor, Attends]:
        """The forward as the backend's next one: its layout, positions, int64 [T + padding], and attention.
        num_padding: rows after its own, of position 0."""
        layout = as_in_steps(layout_of(self, shape.page_size, num_padding), backend, shape)
        backend.plan(layout)
        positions = torch.nn.functional.pad(self.positions, (0, num_padding)).to(shape.device)
        return layout, positions, attends_over(backend, layout)


def measure_attention(backend: AttentionBackend, shape: KVShape) -> Iterator[Measured]:
    """One result of each kind of forward, in a layer of each kind. Replaces the backend's cache by one of a few
    blocks."""
    every = [shape.scores_of(index) for index in range(shape.num_layers)]
    layers = {(*scores[:3], scores.sinks is None): index for index, scores in enumerate(every)}
    can_record = isinstance(backend, RecordableBackend)
    can_group = backend.computes_groups and not shape.has_chunks
    num_blocks, forwards = _attention_forwards(shape.page_size, can_record, can_group)
    sizes = shape.page_size, num_blocks, can_record
    of_windows = {window: _window_forwards(window, *sizes) for window in shape.windows if window is not None}
    contexts = (context for each in (forwards, *of_windows.values()) for one in each for context in one.contexts)
    longest = max(len(context.blocks) for context in contexts)
    allocate_apart(backend, shape, num_blocks + 1)
    memory = None
    if isinstance(backend, RecordableBackend):
        memory = backend.prepare_recording(len(_DECODE_TOKENS), max(longest, num_blocks))
    random = SeededNumbers(_CPU)
    for layer in layers.values():
        window = every[layer].window
        own = [*forwards, *([] if window is None else of_windows.get(window, []))]
        for measured in _measure_layer(backend, shape, layer, num_blocks, own, memory, random):
            name = f"{measured.name[:-1]}, layer {layer})" if len(layers) > 1 else measured.name
            yield measured._replace(name=name)
    if isinstance(backend, RecordableBackend):
        backend.prepare_recording(0, 0)
    backend.allocate(1)  # what is measured next must not count this cache


def _measure_layer(
    backend: AttentionBackend,
    shape: KVShape,
    layer: int,
    large_block: int,
    forwards: Sequence[SmallForward],
    memory: RecordedMemory | None,
    random: "SeededNumbers",
) -> Iterator[Measured]:
    """large_block: the last block, for windows to end before it. memory: what recorded forwards read."""
    tolerance = max(TOLERANCES[shape.dtype], TOLERANCES[shape.query_dtype])
    one = slice(layer, layer + 1)
    one_layer = replace(
        shape, num_layers=1, layers=shape.layers[one], sinks=shape.sinks[one], places=(), num_groups=0, block_layers=0
    )
    oracle = ReferenceBackend(replace(one_layer, dtype=torch.float32, activation_dtype=torch.float32, device=_CPU))
    oracle.allocate(large_block + 1)
    indices = torch.arange(shape.page_size, (large_block + 1) * shape.page_size)
    key, value = (
        random.normal((len(indices), shape.num_kv_heads, shape.head_dim), shape.query_dtype) for _ in range(2)
    )
    value[-shape.page_size :] *= max(1, (shape.scores_of(layer).window or 0) // 4)
    backend.plan(PagedLayout(indices.to(shape.device), ()))
    backend.write(key.to(shape.device), value.to(shape.device), layer)
    oracle.plan(PagedLayout(indices, ()))
    oracle.write(as_stored(key, shape.dtype).float(), as_stored(value, shape.dtype).float(), 0)
    for forward in forwards:
        num_rows = len(forward.positions)
        query = random.normal((num_rows, shape.num_heads, shape.head_dim), shape.query_dtype)
        new = [random.normal((num_rows, shape.num_kv_heads, shape.head_dim), shape.query_dtype) for _ in range(2)]
        on_device = as_in_steps(layout_of(forward, shape.page_size), backend, shape)
        if forward.is_recorded:
            assert isinstance(backend, RecordableBackend)
            assert memory is not None
            on_device = in_recorded(on_device, memory)
            backend.plan_recorded(on_device)
        else:
            backend.plan(on_device)
        attends = attends_over(backend, on_device)
        sent, key, value = (x.to(shape.device) for x in (query, *new))
        found = attends(sent, key, value, layer).to(_CPU)
        alone = layout_of(replace(forward, num_grouped=0), shape.page_size)
        oracle.plan(alone)
        key, value = (as_stored(x, shape.dtype).float() for x in new)
        expected = attends_over(oracle, alone)(query.float(), key, value, 0)
        yield compared(f"attention ({forward.name})", found, expected, tolerance)


def _window_forwards(window: int, page_size: int, large_block: int, can_record: bool) -> list[SmallForward]:
    """A row whose window begins right behind the block of large values, and a chunk of which the earlier rows see some
    of these. The blocks in the window repeat, so that few are enough. window: as in Scores."""
    if window < 0:
        return _border_forwards(-window, page_size, large_block) if -window <= _LONGEST_CHUNK else []
    if window > _LONGEST_WINDOW:
        return []
    num_tokens = page_size + window
    blocks = [large_block, *(1 + index % (large_block - 1) for index in range(-(-window // page_size)))]
    decode, chunk = (Context(num_rows, num_tokens, blocks) for num_rows in (1, min(_CHUNK, num_tokens)))
    forwards = [SmallForward("decode with a full window", (decode,)), SmallForward("full windows", (chunk,))]
    return forwards + [replace(forwards[0], name="recorded full window", is_recorded=True)] * can_record


def _border_forwards(chunk: int, page_size: int, num_blocks: int) -> list[SmallForward]:
    """Rows that end a chunk of attention and begin the next one, decoding and in a prompt. Blocks repeat. No backend
    that records computes chunks."""
    num_tokens = chunk + _CHUNK // 2
    blocks = [1 + index % num_blocks for index in range(-(-num_tokens // page_size))]
    decode = SmallForward("decode at a chunk's ends", (Context(1, chunk, blocks), Context(1, chunk + 1, blocks)))
    prompt = SmallForward("prompt across chunks", (Context(min(_CHUNK, num_tokens), num_tokens, blocks),))
    return [decode, prompt]


def _attention_forwards(page_size: int, can_record: bool, can_group: bool) -> tuple[int, list[SmallForward]]:
    """The number of blocks with the padding block, and the forwards. Tokens scale with pages, so that every case
    has the same number of blocks."""
    next_block = 1 + _SHARED_BLOCKS

    def own(num_blocks: int) -> list[int]:
        nonlocal next_block
        next_block += num_blocks
        return list(range(next_block - num_blocks, next_block))[::-1]

    def alone(num_rows: int, num_tokens: int) -> Context:
        return Context(num_rows, num_tokens, own(-(-num_tokens // page_size)))

    def grouped(num_own: int) -> Context:
        shared = list(range(1, 1 + _SHARED_BLOCKS))
        return Context(1, _SHARED_BLOCKS * page_size + num_own, shared + own(-(-num_own // page_size)))

    decode = tuple(alone(1, num_tokens) for num_tokens in _DECODE_TOKENS)
    others = decode[::-1]
    prefill = tuple(alone(*sizes) for sizes in _PREFILL)
    group = tuple(grouped(num_own) for num_own in (1, 5, page_size + 3))
    forwards = [
        SmallForward("decode", decode),
        SmallForward("prefill", prefill),
        SmallForward("decode and prefill", (*decode, *prefill)),
    ]
    if can_group:
        forwards.append(SmallForward("prefix group", (*group, *decode[:1]), num_grouped=len(group)))
    if can_record:
        recorded = (SmallForward("recorded decode", contexts, is_recorded=True) for contexts in (decode, others))
        forwards += recorded
    return next_block, forwards


def layout_of(forward: SmallForward, page_size: int, num_padding: int = 0) -> PagedLayout:
    """Grouped rows, other decode rows and prompts are a part each, as in a step. num_padding: rows after them."""
    decode = [context for context in forward.contexts if context.num_rows == 1]
    prefill = [context for context in forward.contexts if context.num_rows > 1]
    num_grouped = forward.num_grouped
    indices = [
        context.blocks[token // page_size] * page_size + token % page_size
        for context in (*decode, *prefill)
        for token in range(context.num_tokens - context.num_rows, context.num_tokens)
    ]
    parts, prefix = [], None
    if num_grouped:
        num_shared = _SHARED_BLOCKS * page_size
        prefix = _part([Context(num_grouped, num_shared, decode[0].blocks[:_SHARED_BLOCKS])], 0, False, True)
        after = [
            context._replace(num_tokens=context.num_tokens - num_shared, blocks=context.blocks[_SHARED_BLOCKS:])
            for context in decode[:num_grouped]
        ]
        parts.append(_part(after, 0, True, True))
    if decode[num_grouped:]:
        parts.append(_part(decode[num_grouped:], num_grouped, True, False))
    if prefill:
        parts.append(_part(prefill, len(decode), True, False))
    return PagedLayout(torch.tensor([*indices, *[0] * num_padding]), tuple(parts), prefix)


def _part(contexts: list[Context], first_row: int, causal: bool, is_partial: bool) -> PagedPart:
    width = max(len(context.blocks) for context in contexts)
    counts = torch.tensor([0, *(context.num_rows for context in contexts)])
    return PagedPart(
        first_row=first_row,
        num_rows=int(counts.sum()),
        query_starts=counts.cumsum(0).int(),
        block_table=torch.tensor([c.blocks + [0] * (width - len(c.blocks)) for c in contexts], dtype=torch.int32),
        kv_lengths=torch.tensor([context.num_tokens for context in contexts], dtype=torch.int32),
        causal=causal,
        is_partial=is_partial,
    )


class SeededNumbers:
    """The same numbers on every device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(size, generator=self._generator).to(self._device, dtype)

    def integers(self, size: tuple[int, ...], end: int) -> Tensor:
        """int64, from 0 to before `end`."""
        return torch.randint(end, size, generator=self._generator).to(self._device)


@torch.inference_mode()
def measure_layers(
    executor: LayerExecutor,
    model: Model,
    backend: AttentionBackend,
    shape: KVShape,
    mesh: Mesh,
    compiler: Compiler | None,
    token_multiple: int,
    num_positions: int,
) -> Iterator[Measured]:
    """The executor of all layers against modules that are not compiled, for three forwards of the same sequences: their
    prompts, a mixed step, a decode step; the LM head too if there is a compiler. Replaces the backend's cache by one of
    a few blocks, and the memory of states by a few rows. All ranks of a stage must call it.

    token_multiple: of the tokens of each forward. num_positions: of the longest sequence."""
    modules, dtype = ModuleExecutor(model) if isinstance(model, Decoder) else executor, model.activation_dtype
    paused = nullcontext if compiler is None else compiler.paused
    num_blocks, forwards = _layer_forwards(shape.page_size)
    with torch.inference_mode(False):  # as a start allocates it: compiled layers are made for such a cache
        allocate_apart(backend, shape, num_blocks)
        if model.states is not None:
            model.states.allocate(1 + len(_PROMPTS), shape.device)
    for seed, forward in enumerate(forwards):
        num_rows = len(forward.positions)
        padding = padded_count(num_rows, token_multiple) - num_rows
        layout, positions, attends = forward.planned(backend, shape, padding)
        positions %= num_positions
        hidden, token_ids = first_hidden(num_rows + padding, model, seed), torch.zeros_like(positions)
        before = None if model.states is None else model.states.begin(forward.segments)
        found, results = model(token_ids, _copy(hidden), positions, executor, attends)[:num_rows], list[Tensor]()
        for entering in (perturbed_rows(hidden), hidden):  # last: what it stores in the cache, the next forward reads
            backend.plan(layout)
            if model.states is not None and before is not None:
                model.states.restore(before)
            with paused():
                results.append(model(token_ids, _copy(entering), positions, modules, attends)[:num_rows])
        perturbed, expected = results
        yield from compared_rows(f"layers ({forward.name})", dtype, found, expected, perturbed)
        if compiler is not None and mesh.is_last_stage:
            logits = [model.logits(expected[-2:]).clone()]
            with paused():
                logits += (model.logits(rows[-2:]).clone() for rows in (expected, perturbed_rows(expected)))
            yield from compared_rows(f"logits ({forward.name})", dtype, *logits)


@torch.inference_mode()
def measure_graphs(
    runner: ModelRunner, model: Model, page_size: int, num_blocks: int, limits: ForwardLimits
) -> Iterator[Measured]:
    """Recorded steps of the smallest and the largest size, each replayed with two inputs, against the same steps
    launched one by one: decode steps with and without prefix groups, and steps with prompts. Where graphs draw tokens,
    these against the tokens that launched sampling draws from the replay's own logits.

    Overwrites blocks of the KV cache. num_blocks: without the padding block."""
    sizes, all_sizes = runner.graph_sizes, runner.all_graph_sizes
    prompts = _prefilled(runner, model, page_size, num_blocks, limits)
    if runner.adapters is not None and runner.adapters.in_graphs:
        yield from _measure_adapters(runner, runner.adapters, model, prompts, limits)
    for size in dict.fromkeys((sizes[0], sizes[-1])):
        num_padding = int(size - 1 not in (0, *sizes))  # one row, where that does not make it another size
        num_rows = size - num_padding
        for has_groups in dict.fromkeys((False, prompts.num_shared > 0 and limits.has_groups)):
            name = f"graph of {size} rows{' in pieces' if has_groups else ''}"
            groups = [num_rows] if has_groups else []
            decodes = (prompts.decode(num_rows, groups, turn) for turn in (0, 1))
            # Rows of one sequence compute the same, since they write to the same place.
            places = (prompts.sequences(num_rows, turn) for turn in (0, 1))
            yield from _compare_graph(name, runner, model, zip(decodes, places, strict=True))
    for size in dict.fromkeys((all_sizes[0], all_sizes[-1])):
        mixed = [prompts.mixed(min(size, limits.max_tokens), turn) for turn in (0, 1)]
        found = [step for step in mixed if step is not None]
        if found:
            # Where there are few slots, their prompts may fit into less.
            num_tokens = max(len(places) for _, places in found)
            fitting = min(each for each in all_sizes if each >= num_tokens)
            yield from _compare_graph(f"graph of {fitting} tokens with prompts", runner, model, found)


@torch.inference_mode()
def measure_group_graphs(
    runner: ModelRunner, model: Model, page_size: int, num_blocks: int, limits: ForwardLimits
) -> Iterator[Measured]:
    """As measure_graphs, of the recordings with prefix groups: a step whose rows are all in one group, then one with as
    many groups of two rows as there may be, and rows in none. Nothing where no step can have groups."""
    prompts = _prefilled(runner, model, page_size, num_blocks, limits)
    if not prompts.num_shared:
        return
    sizes = runner.group_graph_sizes
    for size in dict.fromkeys((sizes[0], sizes[-1])):
        num_rows = size - int(size - 1 not in (0, *sizes))  # with a row of padding
        num_groups = min(max_graph_groups(size, runner.graph_sizes[-1]), (num_rows - 1) // 2)
        decodes = (prompts.decode(num_rows, sizes, turn) for turn, sizes in enumerate(([num_rows], [2] * num_groups)))
        places = (prompts.sequences(num_rows, turn) for turn in (0, 1))
        yield from _compare_graph(
            f"graph of {size} rows with prefix groups", runner, model, zip(decodes, places, strict=True)
        )


def _measure_adapters(
    runner: ModelRunner, adapters: ModelAdapters, model: Model, prompts: "Prompts", limits: ForwardLimits
) -> Iterator[Measured]:
    """Recorded steps of the smallest and the largest size, in which each second sequence has an adapter."""
    sizes = runner.graph_sizes
    adapters.load(_RANDOM, adapters.random_share(_RANK))
    adapters.place(1, _RANDOM)
    prompts.have_adapters = True
    try:
        for size in dict.fromkeys((sizes[0], sizes[-1])):
            steps = ((prompts.decode(size, [], turn), prompts.sequences(size, turn)) for turn in (0, 1))
            yield from _compare_graph(f"graph of {size} rows with adapters", runner, model, steps)
        most = min(runner.all_graph_sizes[-1], limits.max_tokens)
        mixed = [step for turn in (0, 1) if (step := prompts.mixed(most, turn)) is not None]
        if mixed:
            yield from _compare_graph("graph of a step with prompts and adapters", runner, model, mixed)
    finally:
        prompts.have_adapters = False
        adapters.unload(_RANDOM)


def _prefilled(runner: ModelRunner, model: Model, page_size: int, num_blocks: int, limits: ForwardLimits) -> "Prompts":
    """Prompts that are in the KV cache."""
    prompts = Prompts(page_size, num_blocks, limits)
    if (first := prompts.prefill()) is not None:
        hidden = None if model.is_first_stage else first_hidden(len(first.prompt_ids), model, seed=2)
        runner.compute_alone(first, None, hidden)
    return prompts


def _compare_graph(
    name: str, runner: ModelRunner, model: Model, steps: Iterable[tuple[ForwardInput, NDArray[np.int64]]]
) -> Iterator[Measured]:
    """steps: each with a number for each of its tokens, int64 [T], the same for tokens that are computed twice."""
    replayed, launched, perturbed = list[ComputedStep](), list[ComputedStep](), list[ComputedStep]()
    for turn, (step, places) in enumerate(steps):
        token_ids = torch.from_numpy((places * 7 + turn) % model.vocab_size).to(model.device)
        token_ids[step.num_decode :] = torch.from_numpy(step.prompt_ids).to(model.device)
        last_tokens = token_ids[: step.num_decode]
        hidden = None
        if not model.is_first_stage:
            distinct, inverse = np.unique(places, return_inverse=True)
            of_distinct = first_hidden(len(distinct), model, turn)
            with torch.inference_mode(False):
                hidden = of_distinct[torch.from_numpy(inverse).to(model.device)]
        replayed.append(runner.compute_alone(step, last_tokens, hidden))
        entering = model.embed(token_ids) if hidden is None else hidden
        with runner.launching():
            perturbed.append(runner.compute_alone(step, last_tokens, perturbed_rows(entering)))
            launched.append(runner.compute_alone(step, last_tokens, hidden))
    computed = replayed, launched, perturbed
    hidden_states = (torch.cat([one.hidden for one in steps]) for steps in computed)
    yield from compared_rows(name, model.activation_dtype, *hidden_states)
    if replayed[0].logits is not None:
        logits = (torch.cat([one.logits for one in steps if one.logits is not None]) for steps in computed)
        yield from compared_rows(f"{name}, logits", model.activation_dtype, *logits)
    drawn = [one.drawn for one in replayed if one.drawn is not None]
    redrawn = [one.redrawn for one in replayed if one.redrawn is not None]
    if drawn:
        is_other = torch.cat(drawn) != torch.cat(redrawn)
        yield Measured(f"{name}: share of tokens", float(is_other.double().mean()), 0.0)


def _layer_forwards(page_size: int) -> tuple[int, list[SmallForward]]:
    """The number of blocks with the padding block, and the forwards; each goes on with the sequences of the one
    before."""
    tables, next_block = list[list[int]](), 1
    for num_tokens in _PROMPTS:
        num_blocks = -(-(num_tokens + _CHUNK + 1) // page_size)
        tables.append(list(range(next_block, next_block + num_blocks))[::-1])
        next_block += num_blocks
    lengths = [0] * len(tables)

    def forward(name: str, *counts: int) -> SmallForward:
        """counts: rows of each sequence. Sequences with one row come first."""
        contexts = []
        for index, (num_rows, blocks) in enumerate(zip(counts, tables, strict=True)):
            lengths[index] += num_rows
            contexts.append(Context(num_rows, lengths[index], blocks))
        return SmallForward(name, (*contexts[1:], *contexts[:1]))

    decodes = [1] * (len(tables) - 1)
    forwards = [
        forward("prefill", *_PROMPTS),
        forward("decode and prefill", _CHUNK, *decodes),
        forward("decode", 1, *decodes),
    ]
    return next_block, forwards


class Prompts:
    """Short sequences with one or no shared block, and one block of their own each."""

    def __init__(self, page_size: int, num_blocks: int, limits: ForwardLimits) -> None:
        """num_blocks: without the padding block."""
        self._page_size = page_size
        self._max_seqs = limits.max_seqs
        max_sequences = min(NUM_SEQUENCES, limits.max_seqs)
        max_tokens = limits.max_tokens // max_sequences
        room = min(limits.context_length, max_tokens) - page_size
        self.num_shared = int(room > 0 and num_blocks > 1)
        self._vocab_size = limits.vocab_size
        num_own = max(1, min(page_size, _MAX_OWN, room if self.num_shared else max_tokens, limits.context_length))
        self.num_decodes = min(2, num_own)
        """Decode steps that have room after each prompt."""
        count = min(max_sequences, num_blocks - self.num_shared)
        self._lengths = self.num_shared * page_size + (5 * np.arange(count, dtype=np.int32)) % (
            num_own - self.num_decodes + 1
        )
        shared = np.arange(1, 1 + self.num_shared, dtype=np.int32)
        own = 1 + self.num_shared + np.arange(count, dtype=np.int32)[::-1]
        self._tables = np.concatenate((np.tile(shared, (count, 1)), own[:, None]), axis=1)
        self.have_adapters = False
        """Whether each second sequence has the adapter number 1."""

    def sequences(self, num_rows: int, turn: int) -> NDArray[np.int64]:
        """The sequence of each row, another one in each turn."""
        return (np.arange(num_rows) * (1 + 2 * turn) + turn) % len(self._lengths)

    def prefill(self) -> ForwardInput | None:
        """The prompts; None if they have no tokens."""
        sequences = np.flatnonzero(self._lengths)
        if not len(sequences):
            return None
        lengths = self._lengths[sequences]
        positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        is_own = positions >= self.num_shared * self._page_size
        prompt_ids = (positions * 7 + is_own * np.repeat(sequences, lengths)) % self._vocab_size
        changes = self._open(sequences, lengths, np.zeros_like(lengths))
        slots = np.arange(1, 1 + len(sequences), dtype=np.int32)
        return ForwardInput(0, slots, lengths, 0, prompt_ids.astype(np.int32), changes)

    def decode(self, num_rows: int, group_sizes: Sequence[int], turn: int) -> ForwardInput:
        """The next token of each row's sequence. group_sizes: rows of each prefix group, which the first rows form."""
        sequences = self.sequences(num_rows, turn)
        lengths = self._lengths[sequences]
        changes = self._open(sequences, lengths, lengths)
        slots = np.arange(1, 1 + num_rows, dtype=np.int32)
        groups = None
        if len(group_sizes):
            num_blocks = np.full(len(group_sizes), self.num_shared, np.int32)
            groups = PrefixGroups(np.array(group_sizes, np.int32), num_blocks)
        return ForwardInput(0, slots, np.ones(num_rows, np.int32), num_rows, _NOTHING, changes, groups=groups)

    def mixed(self, num_tokens: int, turn: int) -> tuple[ForwardInput, NDArray[np.int64]] | None:
        """A step with up to num_tokens tokens: two decode rows, and prompts' tokens after the shared block, again. And
        a number of each token, by its sequence and its position. None if no prompt has such tokens, or too few fit."""
        first_positions = self.num_shared * self._page_size
        own = self._lengths - first_positions
        sequences = np.flatnonzero(own)
        num_prefill = self._max_seqs - _NUM_MIXED_DECODES
        if not len(sequences) or num_prefill < 1:
            return None
        sequences = sequences[(np.arange(num_prefill) + turn) % len(sequences)]
        sequences = sequences[np.cumsum(own[sequences]) <= num_tokens - _NUM_MIXED_DECODES]
        if not len(sequences):
            return None
        decode, counts = self.decode(_NUM_MIXED_DECODES, [], turn), own[sequences]
        decoding = self.sequences(_NUM_MIXED_DECODES, turn)
        rows = np.concatenate((decoding, sequences))
        starts = np.concatenate((self._lengths[decoding], np.full(len(sequences), first_positions, np.int32)))
        positions = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + first_positions
        owners = np.repeat(sequences, counts)
        step = replace(
            decode,
            slots=np.arange(1, 1 + len(rows), dtype=np.int32),
            num_tokens=np.concatenate((decode.num_tokens, counts)),
            prompt_ids=((positions * 7 + owners) % self._vocab_size).astype(np.int32),
            changes=self._open(rows, self._lengths[rows], starts),
        )
        return step, np.concatenate((decoding, (1 + positions) * len(self._lengths) + owners))

    def _open(
        self, sequences: NDArray[np.int64], prompts: NDArray[np.int32], first_positions: NDArray[np.int32]
    ) -> SlotChanges:
        """A slot for each, from 1 on. prompts: tokens of each prompt."""
        slots = np.arange(1, 1 + len(sequences), dtype=np.int32)
        tables = self._tables[sequences]
        opened = plain_opens(slots, prompts, first_positions)
        if self.have_adapters:
            opened = replace(opened, adapters=(sequences % 2).astype(np.int32))
        return SlotChanges(slots, opened, np.repeat(slots, tables.shape[1]), tables.ravel())


def compared_rows(
    name: str, dtype: torch.dtype, found: Tensor, expected: Tensor, perturbed: Tensor
) -> Iterator[Measured]:
    """All [T, E]. The worst row, which a magnified rounding may excuse, and the median one, which it hardly can. Rows
    that the model itself makes infinite or NaN are left out."""
    is_finite = expected.isfinite().all(dim=-1)
    found, expected, perturbed = (rows[is_finite].double() for rows in (found, expected, perturbed))
    if not len(expected):
        return
    size = expected.norm(dim=-1)
    errors, noise = ((rows - expected).norm(dim=-1) / size for rows in (found, perturbed))
    pairs = {"worst row": (errors.max(), noise.max()), "median row": (errors.median(), noise.median())}
    for which, (error, of_noise) in pairs.items():
        yield Measured(f"{name}: {which}", float(error), max(ROW_TOLERANCES[dtype], NOISE_FACTOR * float(of_noise)))


def first_hidden(num_rows: int, model: Model, seed: int) -> Tensor:
    """What enters this stage, [T, E], the same on every rank: embeddings of random tokens, or random numbers."""
    generator = torch.Generator().manual_seed(seed)
    if model.is_first_stage:
        token_ids = torch.randint(model.vocab_size, (num_rows,), generator=generator)
        return model.embed(token_ids.to(model.device))
    with torch.inference_mode(False):  # as the buffers that later stages receive to: compiled layers are made for them
        return torch.randn((num_rows, model.hidden_size), generator=generator).to(model.device, model.activation_dtype)


def _copy(hidden: Tensor) -> Tensor:
    with torch.inference_mode(hidden.is_inference()):
        return hidden.clone()


def perturbed_rows(hidden: Tensor) -> Tensor:
    """hidden [T, E] changed by about one rounding."""
    noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(9)).to(hidden.device)
    return (hidden.float() * (1 + torch.finfo(hidden.dtype).eps / 2 * noise)).to(hidden.dtype)
