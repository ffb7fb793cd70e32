"""The states of a stage's layers, and which of them a forward reads and writes.

A layer has a row of memory for each slot, and one for each snapshot. The host cuts a step into segments: adjacent
tokens of one sequence that take a state from one row, and leave it in another.
"""

# T tokens of a forward, N segments

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.checkpoint.spec import StateSpec
from tokasaurus.messages.forward import ForwardInput, StateSaves
from tokasaurus.model.cpu.bindings import StateSegmentsStruct
from tokasaurus.model.cpu.packed_layers import PackedLayers
from tokasaurus.model.cpu.states import segments_struct

ZEROS = -1
"""Source of a segment that begins with a state of zeros."""


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of a forward. The first num_decode have one token each, those after them are chains: of segments of
    one sequence, each takes the state that the one before it leaves. Chains depend on no others."""

    num_decode: int
    starts: NDArray[np.int32]
    """int32 [N], the first token of each."""
    num_tokens: NDArray[np.int32]
    """int32 [N]; 0: the state is only copied."""
    sources: NDArray[np.int32]
    """int32 [N], rows, or ZEROS."""
    targets: NDArray[np.int32]
    """int32 [N], rows."""
    chains: NDArray[np.int32]
    """int32 [chains + 1], the first segment of each chain, and the end of the last; decode rows are chains too."""

    @property
    def arrays(self) -> tuple[NDArray[np.int32], ...]:
        """As the kernels read them."""
        return self.starts, self.num_tokens, self.sources, self.targets, self.chains

    @classmethod
    def of_prompt(cls, num_tokens: int, target: int, source: int = ZEROS) -> "Segments":
        """Of a forward of one sequence."""
        start, count, first, last = np.array([[0], [num_tokens], [source], [target]], np.int32)
        return cls(0, start, count, first, last, np.array([0, 1], np.int32))


def segments_of(step: ForwardInput, sources: NDArray[np.int32], num_slots: int) -> Segments:
    """sources: int32 [S], the row where the state of each of the step's rows is now, or ZEROS."""
    ends = np.cumsum(step.num_tokens, dtype=np.int32)
    starts = ends - step.num_tokens
    if step.saves is None:
        chains = np.arange(len(starts) + 1, dtype=np.int32)
        return Segments(step.num_decode, starts, step.num_tokens, sources, step.slots, chains)
    return _with_saves(step, step.saves, starts, sources, num_slots)


def _with_saves(
    step: ForwardInput, saves: StateSaves, starts: NDArray[np.int32], sources: NDArray[np.int32], num_slots: int
) -> Segments:
    segments: list[tuple[int, int, int, int]] = []
    chains, index = [0], 0
    for row in range(len(step.slots)):
        start, done, source = int(starts[row]), 0, int(sources[row])
        while index < len(saves.rows) and saves.rows[index] == row:
            num_tokens, target = int(saves.num_tokens[index]), num_slots - 1 + int(saves.snapshots[index])
            segments.append((start + done, num_tokens - done, source, target))
            done, source, index = num_tokens, target, index + 1
        segments.append((start + done, int(step.num_tokens[row]) - done, source, int(step.slots[row])))
        chains.append(len(segments))
    firsts, counts, froms, targets = np.ascontiguousarray(np.array(segments, np.int32).reshape(-1, 4).T)
    return Segments(step.num_decode, firsts, counts, froms, targets, np.array(chains, np.int32))


Mixes = Callable[[Tensor, Tensor, Segments], Tensor]
"""What a layer does between its linear layers: features [T, F], its memory of states, segments -> [T, W]."""


class StateRows:
    """Memory for the states of a stage's layers, and the segments of the next forward."""

    def __init__(self, specs: Sequence[StateSpec], tp_size: int) -> None:
        self._sizes = [spec.num_numbers(tp_size) for spec in specs]
        self._memory: list[Tensor] = []
        """Of each layer, float32 [rows, numbers]."""
        self._num_rows, self._device = 0, torch.device("cpu")
        self._mixes: list[Mixes] = []
        self._placed: PackedLayers | None = None
        self.segments: Segments | None = None
        """Of the next forward."""

    def add_layer(self, mixes: Mixes) -> int:
        """The next layer's function -> its number."""
        self._mixes.append(mixes)
        return len(self._mixes) - 1

    def allocate(self, num_rows: int, device: torch.device) -> None:
        """Rows in place of those there were, of any numbers: no state is read that no segment has left."""
        self._num_rows, self._device = num_rows, device
        self.give_back()
        self.take_again()

    def give_back(self) -> None:
        """Free the rows. `take_again` must come before the next forward."""
        self._memory, self._placed = [], None

    def take_again(self) -> None:
        """As many rows as before. Raises RuntimeError if there is no memory, which the system provides at first use."""
        size = self._num_rows
        self._memory = [torch.empty((size, n), dtype=torch.float32, device=self._device) for n in self._sizes]

    def begin(self, segments: Segments) -> list[Tensor]:
        """Take the segments of the next forward, and copy all states: for forwards that are computed again."""
        self.segments = segments
        return [memory.clone() for memory in self._memory]

    def restore(self, copies: list[Tensor]) -> None:
        """As they were at `begin`."""
        for memory, copy in zip(self._memory, copies, strict=True):
            memory.copy_(copy)

    def __len__(self) -> int:
        """Layers with states."""
        return len(self._sizes)

    def memory(self, layer: int) -> Tensor:
        """Of a layer, float32 [rows, numbers]."""
        return self._memory[layer]

    def mix(self, features: Tensor, layer: int) -> Tensor:
        """features [T, F] -> [T, W]; the layer's states move on."""
        assert self.segments is not None, "segments come first"
        assert self._memory, "allocate comes first"
        return self._mixes[layer](features, self._memory[layer], self.segments)

    def place_in(self, layers: PackedLayers) -> StateSegmentsStruct:
        """The kernels' layers have this memory from now on -> the segments of the next forward, as they read them."""
        assert self.segments is not None, "segments come first"
        if self._placed is not layers:
            layers.place_states(self._memory)
            self._placed = layers
        return segments_struct(self.segments.arrays)


_current: StateRows | None = None


@contextmanager
def mixing(states: StateRows | None) -> Iterator[None]:
    """Inside, `mixed_by_operation` has these states."""
    global _current  # a compiled graph passes tensors and numbers only
    before, _current = _current, states
    try:
        yield
    finally:
        _current = before


def _mix(features: Tensor, output: Tensor, layer: int) -> None:
    """As StateRows.mix, into output [T, W]."""
    assert _current is not None, "states move on inside `mixing`"
    output.copy_(_current.mix(features, layer))


_mix_operation = torch.library.custom_op("tokasaurus::mix_states", _mix, mutates_args=("output",))


@_mix_operation.register_fake
def _compute_nothing(_features: Tensor, _output: Tensor, _layer: int) -> None:
    """A compiler learns what it needs from the declared arguments: the call returns nothing."""


def mixed_by_operation(features: Tensor, layer: int, width: int) -> Tensor:
    """As StateRows.mix, by one operation of torch, which a compiler leaves whole. width: W."""
    output = features.new_empty((len(features), width))
    _mix_operation(features, output, layer)
    return output
