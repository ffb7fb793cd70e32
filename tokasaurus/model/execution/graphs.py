"""Steps as graphs: the launches of a forward are recorded once for each of some sizes, and replayed afterwards.

Launching a kernel costs the host microseconds, and a forward has hundreds; a replay is one call. A graph has fixed
addresses, so each forward has its inputs in memory that stays where it is (recorded_inputs.py). A step that is smaller
than a size is padded to it: a decode step with rows of the padding slot, a step with prompts with tokens that no row
attends to.

In one recording of each size, attention is left out: what it launches depends on the step's contexts, chunks and prefix
groups. All the rest, storing keys and values included, depends on the number of tokens alone. That recording is
interrupted at each layer's attention, so that a forward replays one piece more than the model has layers; any step
takes it. In another recording of the decode sizes, for backends that allow it and decode steps without prefix groups,
attention is included. A few of these sizes have a third recording, for decode steps with up to some number of prefix
groups: it includes attention to the prefixes, to the tokens after them, and the merge.

Where Triton kernels compute adapters, the first two recordings exist once more, with these kernels in each layer: for
steps whose rows have adapters.
"""

# S size of a graph in tokens, E hidden size, V vocabulary, F sampling parameters of a row

import bisect
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tokasaurus.messages.forward import ForwardInput, SlotChanges
from tokasaurus.model.attention.backend import AttentionBackend, PagedLayout
from tokasaurus.model.attention.row_split import Attends
from tokasaurus.model.decoder.model import LayerExecutor, Model
from tokasaurus.model.decoder.row_adapters import RowAdapters
from tokasaurus.model.execution.device_batch import DeviceBatch
from tokasaurus.model.execution.recorded_inputs import RecordedInputs
from tokasaurus.model.sampling.finish import Finished
from tokasaurus.model.sampling.sample import SamplingRows

_NOTHING = np.zeros(0, np.int32)

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size: NumPy, whose type names the interface below uses, has no bfloat16."""


Kind = Literal["pieces", "whole", "groups"]
"""Of a recording: without attention; with attention of rows alone; with attention of prefix groups."""


class Graph(Protocol):
    """Recorded launches."""

    def replay(self) -> None:
        """Launch them again, on the same memory."""


class Recorder(Protocol):
    """Records launches on a device into graphs that share their temporary memory: they may never run at once."""

    def preparing(self) -> AbstractContextManager[None]:
        """Wraps a recording, and the forward before it that loads what it launches."""

    def begin(self) -> None:
        """Record launches from now on instead of running them; memory that is allocated belongs to the graphs."""

    def end(self) -> Graph:
        """What was launched since `begin`."""

    def unowned(self, tensor: Tensor) -> Tensor:
        """A tensor of a graph at the same address, which lets later pieces use its memory once they need it."""


class CudaRecorder:
    """Records CUDA graphs: all graphs take their memory from one pool.

    Collects garbage once, when it is made, and what exists then is never visited again: memory that is freed while
    launches are recorded could not be used by them, and a collection with a model in memory takes tenths of a second.
    """

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        gc.freeze()
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """The default stream cannot be recorded; libraries choose their memory by stream, so that the forward before
        the recording must be on the same one. Ends a recording that an exception has left open."""
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                graph, self._graph = self._graph, None
                if graph is not None:
                    with suppress(RuntimeError):  # it says again what the exception says
                        graph.capture_end()
        torch.cuda.synchronize(self._device)

    def begin(self) -> None:
        assert self._graph is None, "one recording at a time"
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's, may call CUDA meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> torch.cuda.CUDAGraph:
        assert self._graph is not None, "begin comes first"
        graph, self._graph = self._graph, None
        graph.capture_end()
        return graph

    def unowned(self, tensor: Tensor) -> Tensor:
        as_integers = tensor.view(_INTEGERS[tensor.itemsize])
        return torch.as_tensor(_Memory(as_integers), device=self._device).view(tensor.dtype)


class _Memory:
    """Device memory, as torch and other libraries describe it to each other."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
            "typestr": f"{'|u' if tensor.itemsize == 1 else '<i'}{tensor.itemsize}",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


class Sampler(Protocol):
    """Samples and finishes rows without rules, masks and top log-probabilities."""

    def __call__(
        self, logits: Tensor, device_params: Tensor, noise_keys: Tensor, hidden: Tensor, slots: Tensor
    ) -> Finished:
        """logits: [S, V]. device_params, noise_keys: as in SamplingRows. hidden: [S, E]. slots: int64 [S]."""


class DecodeOutput(NamedTuple):
    """What a forward computed, in memory that the next one overwrites."""

    hidden: Tensor
    """[S, E]."""

    logits: Tensor | None
    """[S, V], or None if they are not part of the graphs, or not wanted of every token."""

    finished: Finished | None = None
    """All rows, sampled and finished; None if the graphs do not sample, or if rows want more than the graphs
    compute."""


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
class _Recording:
    pieces: Sequence[_Piece]
    """Empty if attention is included."""
    last: Graph
    """The launches after the last attention; if attention is included, the logits' launches too."""
    head: Graph | None
    """The launches of the logits, if they are not in `last`."""
    sampling: Graph | None
    output: DecodeOutput


def padded(step: ForwardInput, size: int) -> ForwardInput:
    """A decode step with rows of the padding slot after its own, `size` in all. Each of them advances that slot."""
    num_rows = size - len(step.slots)
    slots = np.concatenate((step.slots, np.zeros(num_rows, np.int32)))
    return replace(step, slots=slots, num_tokens=np.ones(size, np.int32), num_decode=size)


def padding_alone(size: int) -> ForwardInput:
    changes = SlotChanges(closed=_NOTHING, opened=None, block_slots=_NOTHING, block_ids=_NOTHING)
    return padded(ForwardInput(0, _NOTHING, _NOTHING, 0, _NOTHING, changes), size)


class StepGraphs:
    """The graphs of one model's steps. Recorded before use."""

    def __init__(
        self,
        model: Model,
        executor: LayerExecutor,
        recorder: Recorder,
        sizes: Sequence[int],
        chunk_sizes: Sequence[int],
        inputs: RecordedInputs,
        has_logits: bool,
        sampler: Sampler | None,
        plan_whole: Callable[[int], Attends] | None,
        backend: AttentionBackend | None,
        adapters: RowAdapters | None = None,
    ) -> None:
        """sizes: of decode steps, as from graph_sizes. chunk_sizes: further ones, larger than these, for steps of more
        tokens; without logits. has_logits: record the LM head too. sampler: recorded too. plan_whole: plans attention
        of padding alone, S rows, so that it can be recorded; None if the backend does not allow it. backend: stores
        keys and values by launches that can be recorded; None if the caller of `run` has to store them. adapters: of
        the model, if their kernels are recorded too."""
        self._model = model
        self._executor = executor
        self._recorder = recorder
        self._sizes = sorted(sizes)
        self._all_sizes = self._sizes + sorted(chunk_sizes)
        self._recordings: dict[tuple[int, Kind], _Recording] = {}
        self._with_adapters: dict[tuple[int, Kind], _Recording] = {}
        self._group_sizes: list[int] = []
        self.inputs = inputs
        """What the graphs read of a step: of the largest sizes."""
        largest = self._all_sizes[-1]
        self._entering = None if model.is_first_stage else model.new_hidden(largest, inputs.slots.device)
        self._has_logits = has_logits
        self._sampler = sampler
        self._plan_whole = plan_whole
        self._backend = backend
        self._adapters = adapters

    def record(self, progress: Callable[[Iterable[int]], Iterable[int]] = iter) -> None:
        """Record all sizes. progress: wraps the iteration over them."""
        for size in progress(self._all_sizes[::-1]):
            self._record_size(size, self._recordings)
            if self._adapters is not None:
                with self._adapters.recording():
                    self._record_size(size, self._with_adapters)

    def _record_size(self, size: int, recordings: dict[tuple[int, Kind], _Recording]) -> None:
        recordings[size, "pieces"] = self._record_around_attention(size)
        if self._plan_whole is not None and size <= self._sizes[-1]:
            recordings[size, "whole"] = self._record_whole(size, self._plan_whole(size))

    def record_groups(
        self,
        sizes: Sequence[int],
        plan_groups: Callable[[int], Attends],
        progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    ) -> None:
        """Record decode steps of these sizes with prefix groups. plan_groups: plans attention of padding alone, S rows
        in a group. progress: wraps the iteration over the sizes."""
        for size in progress(sorted(sizes, reverse=True)):
            self._recordings[size, "groups"] = self._record_whole(size, plan_groups(size))
        self._group_sizes = sorted(sizes)

    def drop_groups(self) -> None:
        """Free the recordings with prefix groups."""
        self._group_sizes = []
        self._recordings = {key: one for key, one in self._recordings.items() if key[1] != "groups"}

    @property
    def group_sizes(self) -> list[int]:
        """Sizes of the recordings with prefix groups in rows, smallest first."""
        return self._group_sizes

    @property
    def sizes(self) -> list[int]:
        """Sizes of the decode steps' graphs in rows, smallest first."""
        return self._sizes

    @property
    def all_sizes(self) -> list[int]:
        """Sizes of all graphs in tokens, smallest first."""
        return self._all_sizes

    def size_for(self, num_tokens: int) -> int | None:
        """The smallest size that a step of so many tokens fits in; None if it has more tokens than any size."""
        index = bisect.bisect_left(self._all_sizes, num_tokens)
        return self._all_sizes[index] if index < len(self._all_sizes) else None

    def is_decode(self, step: ForwardInput) -> bool:
        """Whether `step` only decodes, in rows for which logits and sampling are recorded."""
        return step.num_decode == len(step.slots) <= self._sizes[-1]

    def is_missed_by(self, step: ForwardInput) -> bool:
        """Whether `step` only decodes, but has more rows than logits and sampling are recorded for."""
        return step.num_decode == len(step.slots) > self._sizes[-1]

    def run(
        self,
        batch: DeviceBatch,
        attends: Attends | None,
        is_decode: bool,
        hidden: Tensor | None = None,
        has_adapters: bool = False,
    ) -> DecodeOutput:
        """Run a padded step in `inputs`, whose number of tokens is a recorded size. attends: None if recorded attention
        is planned, with prefix groups if the batch has some. is_decode: as from `is_decode`; for other steps, `inputs`
        has nothing that sampling reads. hidden: [n, E], as in Model.forward, of the tokens before the padding; None
        on the first stage. has_adapters: of any row; then attention with prefix groups is never recorded."""
        size = len(batch.token_ids)
        kind: Kind = "pieces" if attends is not None else "whole" if batch.layout.prefix is None else "groups"
        recording = (self._with_adapters if has_adapters else self._recordings)[size, kind]
        if self._entering is not None:
            assert hidden is not None, "an earlier stage sends it"
            self._entering[: len(hidden)].copy_(hidden)
            self._entering[len(hidden) : size] = 0
        for piece in recording.pieces:
            assert attends is not None
            piece.graph.replay()
            attends(piece.query, piece.key, piece.value, piece.layer_index, piece.output)
        recording.last.replay()
        output, rows = recording.output, batch.sampling
        if not is_decode:
            return DecodeOutput(output.hidden, None)
        if recording.head is not None:
            recording.head.replay()
        if recording.sampling is None or not _is_plain(rows):
            return output._replace(finished=None)
        recording.sampling.replay()
        return output

    def sample(self, hidden: Tensor, slots: Tensor, rows: SamplingRows) -> Finished | None:
        """Sample and finish R rows of a step that does not only decode, by what is recorded of a decode step. None if
        that is not recorded for so many, or if they want more.

        hidden: [R, E], in memory of its own. slots: int64 [R]. The result is as in DecodeOutput, with more rows."""
        index = bisect.bisect_left(self._sizes, len(hidden))
        if index == len(self._sizes) or not _is_plain(rows):
            return None
        recording = self._recordings[self._sizes[index], "pieces"]
        if recording.head is None or recording.sampling is None:
            return None
        num_rows, inputs = len(hidden), self.inputs
        inputs.slots[num_rows : self._sizes[index]] = 0
        for own, given in (
            (inputs.slots, slots),
            (inputs.noise_keys, rows.noise_keys),
            (inputs.device_params, rows.device_params),
            (recording.output.hidden, hidden),
        ):
            own[:num_rows].copy_(given)
        recording.head.replay()
        recording.sampling.replay()
        return recording.output.finished

    @property
    def stores_kv(self) -> bool:
        """Whether the pieces around attention store keys and values, so that `run` is given attention alone."""
        return self._backend is not None

    def _record_whole(self, size: int, attends: Attends) -> _Recording:
        """With the planned attention."""
        with self._recorder.preparing():
            self._forward(size, attends)
            self._recorder.begin()
            return self._end_recording(size, attends, [])

    def _record_around_attention(self, size: int) -> _Recording:
        recorder, pieces, backend = self._recorder, list[_Piece](), self._backend
        if backend is not None:
            backend.plan(PagedLayout(self.inputs.memory.kv_indices[:size], ()))

        def store_alone(
            query: Tensor, key: Tensor, value: Tensor, layer_index: int, output: Tensor | None = None
        ) -> Tensor:
            if backend is not None:
                backend.write(key, value, layer_index)
            return no_attention(query, key, value, layer_index, output)

        def leave_out(
            query: Tensor, key: Tensor, value: Tensor, layer_index: int, output: Tensor | None = None
        ) -> Tensor:
            output = torch.empty_like(query) if output is None else output
            if backend is not None:
                backend.write(key, value, layer_index)
            graph = recorder.end()
            fixed = recorder.unowned(query), recorder.unowned(key), recorder.unowned(value)
            pieces.append(_Piece(graph, *fixed, layer_index, recorder.unowned(output)))
            recorder.begin()
            return output

        with recorder.preparing():
            self._forward(size, store_alone)
            recorder.begin()
            return self._end_recording(size, leave_out, pieces)

    def _end_recording(self, size: int, attends: Attends, pieces: Sequence[_Piece]) -> _Recording:
        """The rest of a recording that has begun. pieces: filled by `attends`; empty if attention is included."""
        recorder = self._recorder
        hidden = self._hidden(size, attends)
        head, sampling, logits, finished = None, None, None, None
        if pieces:
            last = recorder.end()
            if self._has_logits_of(size):
                recorder.begin()
                logits = self._model.logits(hidden)
                head = recorder.end()
        else:
            logits = self._model.logits(hidden) if self._has_logits_of(size) else None
            last = recorder.end()
        if self._sampler is not None and logits is not None:
            recorder.begin()
            finished = self._sample(hidden, logits)
            sampling = recorder.end()
            finished = Finished(*map(recorder.unowned, finished))
        unowned_logits = None if logits is None else recorder.unowned(logits)
        output = DecodeOutput(recorder.unowned(hidden), unowned_logits, finished)
        return _Recording(pieces, last, head, sampling, output)

    def _has_logits_of(self, size: int) -> bool:
        return self._has_logits and size <= self._sizes[-1]

    def _forward(self, size: int, attends: Attends) -> None:
        """All that is recorded of this size."""
        hidden = self._hidden(size, attends)
        if self._has_logits_of(size):
            logits = self._model.logits(hidden)
            if self._sampler is not None:
                self._sample(hidden, logits)

    def _hidden(self, size: int, attends: Attends) -> Tensor:
        entering = None if self._entering is None else self._entering[:size]
        inputs = self.inputs.cut(size)
        return self._model.forward(inputs.token_ids, entering, inputs.positions, self._executor, attends)

    def _sample(self, hidden: Tensor, logits: Tensor) -> Finished:
        assert self._sampler is not None
        inputs = self.inputs.cut(len(logits))
        return self._sampler(logits, inputs.device_params, inputs.noise_keys, hidden, inputs.slots)


def _is_plain(rows: SamplingRows) -> bool:
    """Whether the graphs compute all that the rows want."""
    return all(part is None for part in (rows.rules, rows.masks, rows.top, rows.as_sampled))


def no_attention(
    query: Tensor,
    key: Tensor,  # noqa: ARG001
    value: Tensor,  # noqa: ARG001
    layer_index: int,  # noqa: ARG001
    output: Tensor | None = None,
) -> Tensor:
    """In the place of attention, as Attends, in a forward whose results nobody reads."""
    return torch.zeros_like(query) if output is None else output.zero_()
