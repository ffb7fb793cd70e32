"""Whole steps of a loaded model, compared: compiled and fused layers with their torch modules, replayed graphs with
launched steps.

Both sides round differently, and a deep model may magnify one rounding of its input to the size of the result. So each
difference is compared with what such a rounding does: the same step is also launched with a perturbed input.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.messages.forward import ForwardInput, PrefixGroups, SlotChanges, SlotOpens
from tokasaurus.messages.generation import SAMPLING_DTYPE, SamplingParams
from tokasaurus.model.attention.backend import AttentionBackend, KVShape
from tokasaurus.model.attention.block_lists import as_in_steps
from tokasaurus.model.attention.row_split import attends_over
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.decoder.decoder import Decoder, LayerExecutor
from tokasaurus.model.execution.device_batch import padded_count
from tokasaurus.model.execution.executors import ModuleExecutor
from tokasaurus.model.execution.runner import ComputedStep, ModelRunner
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.attention_check import Context, SmallForward, layout_of
from tokasaurus.model.worker.self_check import Measured
from tokasaurus.model.worker.warmup import ForwardLimits

# T tokens in this forward, R rows of a decode step, E hidden size

ROW_TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.005, torch.bfloat16: 0.02}
"""Allowed difference of a row, by dtype of activations: the norm of the difference as a share of the norm."""

NOISE_FACTOR = 4
"""A row may also differ by this many times what one rounding of the input changes."""

_PROMPTS = (5, 20, 30)
"""Tokens of the sequences that the layers compute."""
_CHUNK = 7
"""Tokens of a second chunk of the first prompt."""

_NUM_SEQUENCES = 8
"""Different sequences among a graph's rows."""
_MAX_OWN = 16
"""Tokens of a sequence after the shared block."""

_NOTHING = np.zeros(0, np.int32)


@torch.inference_mode()
def measure_layers(
    executor: LayerExecutor,
    model: Decoder,
    backend: AttentionBackend,
    shape: KVShape,
    mesh: Mesh,
    compiler: Compiler | None,
    token_multiple: int,
    num_positions: int,
) -> Iterator[Measured]:
    """The executor of all layers against torch's modules, for three forwards of the same sequences: their prompts, a
    mixed step, a decode step; the LM head too if it is compiled. Replaces the backend's cache by one of a few blocks.
    All ranks of a stage must call it.

    token_multiple: of the tokens of each forward. num_positions: of the longest sequence."""
    modules, dtype = ModuleExecutor(model), model.activation_dtype
    num_blocks, forwards = _forwards(shape.page_size)
    with torch.inference_mode(False):  # as a start allocates it: compiled layers are made for such a cache
        backend.allocate(num_blocks)
    for seed, forward in enumerate(forwards):
        num_rows = len(forward.positions)
        padding = padded_count(num_rows, token_multiple) - num_rows
        layout = as_in_steps(layout_of(forward, shape.page_size, padding), backend, shape)
        attends = attends_over(backend, layout)
        positions = torch.nn.functional.pad(forward.positions % num_positions, (0, padding)).to(shape.device)
        hidden = _first_hidden(num_rows + padding, model, seed)
        results = []
        # The modules last: what they store in the cache is what the next forward reads.
        for one, entering in ((executor, hidden), (modules, _perturbed(hidden)), (modules, hidden)):
            backend.plan(layout)
            results.append(model(positions, _copy(entering), positions, one, attends)[:num_rows])
        found, perturbed, expected = results
        yield from _compared(f"layers ({forward.name})", dtype, found, expected, perturbed)
        if compiler is not None and mesh.is_last_stage:
            logits = [model.logits(expected[-2:]).clone()]
            with compiler.paused():
                logits += (model.logits(rows[-2:]).clone() for rows in (expected, _perturbed(expected)))
            yield from _compared(f"logits ({forward.name})", dtype, *logits)


@torch.inference_mode()
def measure_graphs(
    runner: ModelRunner, model: Decoder, page_size: int, num_blocks: int, limits: ForwardLimits
) -> Iterator[Measured]:
    """Recorded decode steps of the smallest and the largest size, each replayed with two inputs, against the same steps
    launched one by one; with and without prefix groups. Their tokens, where graphs draw them, against those that
    launched sampling draws from the replay's own logits.

    Overwrites blocks of the KV cache. num_blocks: without the padding block."""
    sizes = runner.graph_sizes
    prompts = _Prompts(page_size, num_blocks, limits)
    if (first := prompts.prefill()) is not None:
        hidden = None if model.is_first_stage else _first_hidden(len(first.prompt_ids), model, seed=2)
        runner.compute_alone(first, None, hidden)
    for size in dict.fromkeys((sizes[0], sizes[-1])):
        num_padding = int(size - 1 not in (0, *sizes))  # one row, where that does not make it another size
        num_rows = size - num_padding
        for has_groups in dict.fromkeys((False, prompts.num_shared > 0)):
            replayed, launched, perturbed = list[ComputedStep](), list[ComputedStep](), list[ComputedStep]()
            for turn in (0, 1):
                step = prompts.decode(num_rows, has_groups, turn)
                # Rows of one sequence compute the same, since they write to the same place.
                token_ids = torch.from_numpy((prompts.sequences(num_rows, turn) * 7 + turn) % model.vocab_size)
                token_ids = token_ids.to(model.device)
                hidden = None if model.is_first_stage else _first_hidden(num_rows, model, turn)
                replayed.append(runner.compute_alone(step, token_ids, hidden))
                entering = model.embed(token_ids) if hidden is None else hidden
                with runner.launching():
                    perturbed.append(runner.compute_alone(step, token_ids, _perturbed(entering)))
                    launched.append(runner.compute_alone(step, token_ids, hidden))
            name = f"graph of {size} rows{' in pieces' if has_groups else ''}"
            computed = replayed, launched, perturbed
            hidden_states = (torch.cat([one.hidden for one in steps]) for steps in computed)
            yield from _compared(name, model.activation_dtype, *hidden_states)
            if replayed[0].logits is not None:
                logits = (torch.cat([one.logits for one in steps if one.logits is not None]) for steps in computed)
                yield from _compared(f"{name}, logits", model.activation_dtype, *logits)
            drawn = [one.drawn for one in replayed if one.drawn is not None]
            redrawn = [one.redrawn for one in replayed if one.redrawn is not None]
            if drawn:
                is_other = torch.cat(drawn) != torch.cat(redrawn)
                yield Measured(f"{name}: share of tokens", float(is_other.double().mean()), 0.0)


def _forwards(page_size: int) -> tuple[int, list[SmallForward]]:
    """The number of blocks with the padding block, and the forwards, each of which goes on with the last one's
    sequences."""
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


class _Prompts:
    """Short sequences with one or no shared block, and one block of their own each."""

    def __init__(self, page_size: int, num_blocks: int, limits: ForwardLimits) -> None:
        """num_blocks: without the padding block."""
        self._page_size = page_size
        max_sequences = min(_NUM_SEQUENCES, limits.max_seqs)
        max_tokens = limits.max_tokens // max_sequences
        room = min(limits.context_length, max_tokens) - page_size
        self.num_shared = int(room > 0 and num_blocks > 1)
        self._vocab_size = limits.vocab_size
        num_own = max(1, min(page_size, _MAX_OWN, room if self.num_shared else max_tokens, limits.context_length))
        count = min(max_sequences, num_blocks - self.num_shared)
        self._lengths = self.num_shared * page_size + (5 * np.arange(count, dtype=np.int32)) % num_own
        shared = np.arange(1, 1 + self.num_shared, dtype=np.int32)
        own = 1 + self.num_shared + np.arange(count, dtype=np.int32)[::-1]
        self._tables = np.concatenate((np.tile(shared, (count, 1)), own[:, None]), axis=1)

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

    def decode(self, num_rows: int, has_groups: bool, turn: int) -> ForwardInput:
        """The next token of each row's sequence."""
        sequences = self.sequences(num_rows, turn)
        lengths = self._lengths[sequences]
        changes = self._open(sequences, lengths, lengths)
        slots = np.arange(1, 1 + num_rows, dtype=np.int32)
        groups = None
        if has_groups:
            groups = PrefixGroups(np.array([num_rows], np.int32), np.array([self.num_shared], np.int32))
        return ForwardInput(0, slots, np.ones(num_rows, np.int32), num_rows, _NOTHING, changes, groups=groups)

    def _open(
        self, sequences: NDArray[np.int64], prompts: NDArray[np.int32], first_positions: NDArray[np.int32]
    ) -> SlotChanges:
        """A slot for each, from 1 on. prompts: tokens of each prompt."""
        count = len(sequences)
        slots = np.arange(1, 1 + count, dtype=np.int32)
        opened = SlotOpens(
            slots=slots,
            num_prompt_tokens=prompts,
            first_positions=first_positions,
            sampling=np.array([SamplingParams()] * count, SAMPLING_DTYPE),
            seeds=np.arange(count, dtype=np.uint64),
            sample_indices=np.zeros(count, np.uint32),
            want_logprobs=np.zeros(count, np.bool_),
        )
        tables = self._tables[sequences]
        return SlotChanges(slots, opened, np.repeat(slots, tables.shape[1]), tables.ravel())


def _compared(name: str, dtype: torch.dtype, found: Tensor, expected: Tensor, perturbed: Tensor) -> Iterator[Measured]:
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


def _first_hidden(num_rows: int, model: Decoder, seed: int) -> Tensor:
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


def _perturbed(hidden: Tensor) -> Tensor:
    """hidden [T, E] changed by about one rounding."""
    noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(9)).to(hidden.device)
    return (hidden.float() * (1 + torch.finfo(hidden.dtype).eps / 2 * noise)).to(hidden.dtype)
