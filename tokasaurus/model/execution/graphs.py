"""Decode steps as graphs: the launches of a forward are recorded once for each of some sizes, and replayed afterwards.

Launching a kernel costs the host microseconds, and a forward has hundreds; a replay is one call. A graph has fixed
addresses, so each forward copies its inputs to buffers that stay where they are. A step with fewer tokens than a size
is padded to it.

Attention is not recorded: what it launches depends on the step's contexts and prefix groups. The recording is
interrupted at each layer's attention, so that a forward replays one piece more than the model has layers.
"""

# S size of a graph in tokens, E hidden size, V vocabulary, H query heads, K key/value heads, D head size

import bisect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tokasaurus.messages.forward import ForwardInput
from tokasaurus.model.attention.operation import Attends
from tokasaurus.model.decoder.decoder import Decoder, LayerExecutor


class Graph(Protocol):
    """Recorded launches."""

    def replay(self) -> None:
        """Launch them again, on the same memory."""


class Recorder(Protocol):
    """Records launches on a device into graphs that share their temporary memory: they may never run at once."""

    def preparing(self) -> AbstractContextManager[None]:
        """Around the recording of a size, and around the forward before it that loads what it launches."""

    def begin(self) -> None:
        """From now on, launches are recorded and not run; memory that is allocated belongs to the graphs."""

    def end(self) -> Graph:
        """What was launched since `begin`."""

    def unowned(self, tensor: Tensor) -> Tensor:
        """A tensor of a graph at the same address, which lets later pieces use its memory once they need it."""


class DecodeOutput(NamedTuple):
    """What a forward computed, in memory that the next one overwrites."""

    hidden: Tensor
    """[S, E]."""

    logits: Tensor | None
    """[S, V] of all tokens, or None if they are not part of the graphs."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """The launches up to a layer's attention, and the arguments of the latter, at fixed addresses."""

    graph: Graph
    query: Tensor
    key: Tensor
    value: Tensor
    layer_index: int
    output: Tensor


@dataclass(frozen=True, slots=True)
class _RecordedForward:
    pieces: Sequence[_Piece]
    last: Graph
    """The launches after the last attention."""
    output: DecodeOutput


def graph_sizes(max_size: int, step: int) -> list[int]:
    """max_size and the multiples of `step` below it, largest first: the others then fit in the memory of the first."""
    return [max_size, *range((max_size - 1) // step * step, 0, -step)]


class DecodeGraphs:
    """The graphs of one model's decode steps. Recorded before use."""

    def __init__(
        self,
        model: Decoder,
        executor: LayerExecutor,
        recorder: Recorder,
        sizes: Sequence[int],
        has_logits: bool,
        device: torch.device,
    ) -> None:
        """sizes: as from graph_sizes. has_logits: record the LM head too."""
        self._model = model
        self._executor = executor
        self._recorder = recorder
        self._sizes = sorted(sizes)
        self._forwards: dict[int, _RecordedForward] = {}
        largest = self._sizes[-1]
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._entering = None if model.is_first_stage else model.new_hidden(largest, device)
        self._has_logits = has_logits

    def record(self, progress: Callable[[Iterable[int]], Iterable[int]] = iter) -> None:
        """Record all sizes, or those that are left. progress: wraps the iteration over them."""
        for size in progress(self._sizes[::-1]):
            self._forwards[size] = self._record(size)

    def size_for(self, step: ForwardInput) -> int | None:
        """The smallest size that `step` fits in; None if it has prefill rows, or more rows than any size."""
        if step.num_decode < len(step.slots):
            return None
        index = bisect.bisect_left(self._sizes, step.num_decode)
        return self._sizes[index] if index < len(self._sizes) else None

    def is_missed_by(self, step: ForwardInput) -> bool:
        """Whether `step` only decodes, but has too many rows for all graphs."""
        return step.num_decode == len(step.slots) > self._sizes[-1]

    def run(self, token_ids: Tensor, positions: Tensor, attends: Attends, hidden: Tensor | None = None) -> DecodeOutput:
        """Run a forward whose number of tokens, with padding, is a recorded size. The arguments are as in
        Decoder.forward."""
        size = len(token_ids)
        forward = self._forwards[size]
        self._token_ids[:size].copy_(token_ids)
        self._positions[:size].copy_(positions)
        if self._entering is not None:
            assert hidden is not None, "an earlier stage sends it"
            self._entering[:size].copy_(hidden)
        for piece in forward.pieces:
            piece.graph.replay()
            attends(piece.query, piece.key, piece.value, piece.layer_index, piece.output)
        forward.last.replay()
        return forward.output

    def _record(self, size: int) -> _RecordedForward:
        recorder, pieces = self._recorder, list[_Piece]()

        def leave_out(
            query: Tensor, key: Tensor, value: Tensor, layer_index: int, output: Tensor | None = None
        ) -> Tensor:
            output = torch.empty_like(query) if output is None else output
            graph = recorder.end()
            fixed = recorder.unowned(query), recorder.unowned(key), recorder.unowned(value)
            pieces.append(_Piece(graph, *fixed, layer_index, recorder.unowned(output)))
            recorder.begin()
            return output

        with recorder.preparing():
            self._compute(size, _no_attention)
            recorder.begin()
            hidden, logits = self._compute(size, leave_out)
            last = recorder.end()
            output = DecodeOutput(recorder.unowned(hidden), None if logits is None else recorder.unowned(logits))
            return _RecordedForward(pieces, last, output)

    def _compute(self, size: int, attends: Attends) -> DecodeOutput:
        entering = None if self._entering is None else self._entering[:size]
        hidden = self._model(self._token_ids[:size], entering, self._positions[:size], self._executor, attends)
        return DecodeOutput(hidden, self._model.logits(hidden) if self._has_logits else None)


def _no_attention(  # a forward whose results nobody reads
    query: Tensor,
    key: Tensor,  # noqa: ARG001
    value: Tensor,  # noqa: ARG001
    layer_index: int,  # noqa: ARG001
    output: Tensor | None = None,
) -> Tensor:
    return torch.zeros_like(query) if output is None else output.zero_()
