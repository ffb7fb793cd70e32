"""Run one forward: apply the slot changes, compute, sample, store the last tokens."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.checkpoint.spec import ExpertsSpec, ModelSpec
from tokasaurus.messages.forward import (
    ForwardInput,
    ForwardOutput,
    NonfiniteTokens,
    PrefixGroups,
    PromptLogprobsOutput,
    RoutedExperts,
    SlotChanges,
    TopOfRows,
)
from tokasaurus.messages.stages import StageBoard
from tokasaurus.model.attention.backend import AttentionBackend, RecordableBackend, RecordedMemory, TensorCache
from tokasaurus.model.attention.row_split import Attends, attends_over
from tokasaurus.model.buffer_sizes import BufferSizes, max_graph_groups, padded_count
from tokasaurus.model.cpu.bindings import Kernels
from tokasaurus.model.decoder.adapters import ModelAdapters
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.decoder.model import LayerExecutor, Model
from tokasaurus.model.execution.device_batch import DeviceBatch, build_batch
from tokasaurus.model.execution.executors import CompiledExecutor, KernelExecutor, choose_executor
from tokasaurus.model.execution.graphs import DecodeOutput, Recorder, StepGraphs, padded, padding_alone
from tokasaurus.model.execution.kernel_decode import KernelDecode
from tokasaurus.model.execution.pooling import Pooler
from tokasaurus.model.execution.recorded_inputs import RecordedInputs
from tokasaurus.model.execution.slot_table import SlotTable
from tokasaurus.model.execution.stage_times import StageTimes
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.parallel.stage_links import StageLinks
from tokasaurus.model.sampling.finish import are_finite, unpacked
from tokasaurus.model.sampling.prompt_logprobs import TokenLogprobs, compute_prompt_logprobs, fill_token_logprobs
from tokasaurus.model.sampling.sample import Sampled, draw_and_finish, finish, sample
from tokasaurus.model.sampling.shards import VocabularyShard
from tokasaurus.model.staging.packed import Fetched, HostArrays, HostResults, PackedResults, PackedStaging, Results
from tokasaurus.model.staging.staging import CudaTransfers, DirectStaging, HostMark, Mark, Staging, Transfers
from tokasaurus.model.triton_choice import uses_triton
from tokasaurus.monitoring.trace import NO_TRACE, Trace

# T tokens in this forward, E hidden size, R rows that sample

CHECKED_LOGIT_ROWS = 16
"""Logits of more rows might not fit beside a KV cache that fills the device."""

_NOTHING = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The sampled tokens and logprobs of one step; the copy to the host may still be running."""

    step_id: int
    outputs: Fetched
    """Of rows that were finished together, `packed` of Finished; if the step has other tokens, is_finite too, of the
    hidden states alone. Otherwise token_ids int32 [R]; is_finite bool [T], whether a token's hidden state, and the
    logits computed from it, if any, are finite; logprobs float32 [R], if some row asked for them; the fields of
    PromptLogprobsOutput, each with "prompt_" before its name, likewise. Of both, top_ids and top_logprobs of
    Sampled; and experts, int32, expert_tokens and vectors of ForwardOutput."""

    want_logprobs: NDArray[np.bool_]
    """bool [R], rows that asked for logprobs."""

    top_rows: NDArray[np.int64] | None
    """int64 [A], rows that asked for top-k logprobs; None if no row asked."""

    sampled_tokens: NDArray[np.int64]
    """int64 [R], indices into T of the tokens after which one is sampled."""

    token_slots: NDArray[np.int32]
    """int32 [T]."""

    token_positions: NDArray[np.int64]
    """int64 [T]."""

    token_blocks: NDArray[np.int32]
    """int32 [T]."""

    num_recompiles: int = 0
    """Compilations after warm-up that this step waited for."""

    missed_graphs: bool = False
    """Whether this was a decode step, but larger than all graphs that were recorded."""

    phase_seconds: tuple[float, ...] = ()
    """Seconds in each phase, as in ForwardOutput."""

    experts_dtype: type[np.uint8 | np.uint16] | None = None
    """Of the experts; None if no row asked for them."""

    begun: Mark = field(default_factory=HostMark)
    """The step's arrays have arrived, and no work before it is left."""

    ended: Mark = field(default_factory=HostMark)
    """All its results are computed."""

    def wait(self) -> None:
        """Wait until this step has ended; not for later ones."""
        self.outputs.arrays()

    def output(self, seconds: float = 0.0, idle_seconds: float = 0.0) -> ForwardOutput:
        """The answer to the manager; waits as `wait`. seconds, idle_seconds: as in ForwardOutput."""
        arrays = self.outputs.arrays()
        if "packed" in arrays:
            of_rows = unpacked(arrays["packed"], bool(self.want_logprobs.any()))
            if "is_finite" in arrays:
                is_finite = arrays["is_finite"].copy()
                is_finite[self.sampled_tokens] &= of_rows["is_finite"]
                of_rows["is_finite"] = is_finite
            arrays = arrays | of_rows
        logprobs = arrays.get("logprobs")
        prompt_logprobs = None
        if "prompt_logprobs" in arrays:
            prompt_logprobs = PromptLogprobsOutput(*(arrays[f"prompt_{name}"] for name in TokenLogprobs._fields))
        return ForwardOutput(
            self.step_id,
            arrays["token_ids"],
            None if logprobs is None else np.where(self.want_logprobs, logprobs, np.float32(np.nan)),
            seconds,
            self.num_recompiles,
            self.phase_seconds,
            None if self.top_rows is None else TopOfRows(self.top_rows, arrays["top_ids"], arrays["top_logprobs"]),
            prompt_logprobs,
            self._nonfinite(self._is_finite(arrays)),
            self.missed_graphs,
            idle_seconds,
            self._experts(arrays),
            arrays.get("expert_tokens"),
            arrays.get("vectors"),
        )

    def _experts(self, arrays: Mapping[str, NDArray[Any]]) -> RoutedExperts | None:
        if "experts" not in arrays:
            return None
        experts = arrays["experts"]
        return experts.astype(np.uint8) if self.experts_dtype is np.uint8 else experts.astype(np.uint16)

    def _is_finite(self, arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
        """bool [T], whether all results of a token are finite, the wanted logprob of the one sampled after it too."""
        is_finite: NDArray[np.bool_] = arrays["is_finite"]
        if "logprobs" not in arrays:
            return is_finite
        is_good = np.isfinite(arrays["logprobs"]) | ~self.want_logprobs
        if is_good.all():
            return is_finite
        is_finite = is_finite.copy()
        is_finite[self.sampled_tokens] &= is_good
        return is_finite

    def _nonfinite(self, is_finite: NDArray[np.bool_]) -> NonfiniteTokens | None:
        """The first token that is not finite of each slot; None if all are finite."""
        if is_finite.all():
            return None
        tokens = np.flatnonzero(~is_finite)
        first = tokens[np.unique(self.token_slots[tokens], return_index=True)[1]]
        return NonfiniteTokens(self.token_positions[first].astype(np.int32), self.token_blocks[first].astype(np.int32))


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """What one step has computed, on the device."""

    hidden: Tensor
    """float32 [T, E]."""
    logits: Tensor | None
    """[n, v] of the first n = CHECKED_LOGIT_ROWS tokens, or of all; None before the last stage."""
    drawn: Tensor | None
    """int64 [T], tokens that the graphs drew; None if they drew none."""
    redrawn: Tensor | None
    """int64 [T], drawn again from the same logits, by launches; None if the graphs drew none."""


@dataclass(frozen=True, slots=True)
class RecordedExperts:
    """Which experts each layer has chosen in a step, once it has run."""

    chosen: Tensor
    """int32 [layers, >= T, K], on the device."""
    wanted: NDArray[np.bool_]
    """bool [T], the A tokens that are asked for."""
    totals: "ExpertTotals | None"
    """Gets the step's tokens, too; None: they are not counted."""

    def outputs(self) -> dict[str, Tensor]:
        """`experts` and `expert_tokens` of StepResult."""
        found = dict[str, Tensor]()
        if self.wanted.any():
            tokens = torch.from_numpy(np.flatnonzero(self.wanted)).to(self.chosen.device)
            found["experts"] = self.chosen[:, tokens].transpose(0, 1).contiguous()
        if self.totals is not None:
            found["expert_tokens"] = self.totals.after(self.chosen[:, : len(self.wanted)])
        return found


class ExpertTotals:
    """Tokens of each expert in each layer."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        has_experts = [[int(isinstance(layer.mlp, ExpertsSpec))] for layer in spec.layers]
        self._has_experts = torch.tensor(has_experts, device=device)
        self._totals = torch.zeros((len(has_experts), spec.num_experts), dtype=torch.int64, device=device)

    def after(self, chosen: Tensor) -> Tensor:
        """chosen: int32 [layers, T, K], of a step -> int64 [layers, experts], with this step's tokens."""
        experts = chosen.flatten(1).long()
        return self._totals.scatter_add_(1, experts, self._has_experts.expand_as(experts)).clone()


class ModelRunner:
    """This rank's model, KV cache and slots. `run` receives every step that the manager sends, in order."""

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        slots: SlotTable,
        page_size: int,
        device: torch.device,
        kernels: Kernels | None,
        compiler: Compiler | None = None,
        transfers: Transfers | None = None,
        buffer_sizes: BufferSizes = BufferSizes(),  # noqa: B008  (it is frozen)
        mesh: Mesh = Mesh(),  # noqa: B008  (it is frozen)
        async_tp_threshold: int | None = None,
        trace: Trace = NO_TRACE,
        links: StageLinks | None = None,
        adapters: ModelAdapters | None = None,
    ) -> None:
        """compiler: compiles parts of the model; None if nothing is compiled. transfers: how arrays
        reach the device and results return; None: as is best for `device`. buffer_sizes: of their buffers.
        async_tp_threshold: padded tokens from which a forward uses async tensor parallelism, which needs a compiler;
        None: never. links: with the other pipeline stages; None if there are none."""
        self.trace = trace
        self.adapters = adapters
        self._model = model
        self._backend = backend
        # Not at each step: Python takes as long to look for a protocol's methods as for several launches.
        self._recordable = backend if isinstance(backend, RecordableBackend) else None
        self._slots = slots
        self._page_size = page_size
        self.device = device
        """Where forwards run."""
        if transfers is None and device.type != "cpu":
            transfers = CudaTransfers(device)
        self._staging: Staging = DirectStaging(device)
        self._results: Results = HostResults()
        self._mark: Callable[[], Mark] = HostMark
        if transfers is not None:
            self._mark = transfers.mark
            self._staging = PackedStaging(transfers, buffer_sizes.inputs)
            self._results = PackedResults(transfers, buffer_sizes.results)
        self._kernels = kernels
        self._compiler = compiler
        self._executor: LayerExecutor = choose_executor(model, backend, compiler)
        self._token_multiple = 1
        if async_tp_threshold is not None:
            from tokasaurus.model.execution.async_tp_executor import AsyncTPExecutor  # torch's part is slow to import

            assert compiler is not None, "only compiled layers overlap gemms and collectives"
            assert isinstance(model, Decoder), "other models are not compiled"
            if all(AsyncTPExecutor.computes(layer.spec) for layer in model.decoder_layers()):
                self._executor = AsyncTPExecutor(model, backend, self._executor, mesh, compiler, async_tp_threshold)
                self._token_multiple = mesh.tp_size
        self._mesh = mesh
        self._shard = VocabularyShard.of(mesh, model.vocab_size)
        assert (links is not None) == (mesh.pp_size > 1)
        self._links = links
        self.times = StageTimes(None, mesh.pp_rank, self._mark)
        """Times of this stage's steps; whoever calls `run` marks where each begins and ends."""
        self._num_recompiles = 0
        self._pooler: Pooler | None = None
        if isinstance(model, Decoder) and model.pooling is not None and mesh.is_last_stage:
            self._pooler = Pooler(model, len(slots.block_tables))
        self._expert_totals: ExpertTotals | None = None
        self._graphs: StepGraphs | None = None
        self._prefixes: RecordedMemory | None = None
        """What recordings with prefix groups read of the prefixes; None if there are no such recordings."""
        self._kernel_decode: KernelDecode | None = None
        if kernels is not None and links is None and isinstance(self._executor, KernelExecutor):
            assert isinstance(model, Decoder), "which has such an executor"
            self._kernel_decode = KernelDecode.of(model, self._executor, slots, page_size, kernels)

    def allocate_states(self, num_snapshots: int) -> None:
        """Memory for the states of all slots, and for so many snapshots; nothing if no layer has a state."""
        if self._model.states is not None:
            self._model.states.allocate(self._slots.num_slots + num_snapshots, self.device)

    def count_experts(self) -> None:
        """Count the tokens of each expert, from now on."""
        self._expert_totals = ExpertTotals(self._model.spec, self.device)

    def count_for_stage(self, board: StageBoard) -> None:
        """This rank counts, from now on, what the pipeline stage does."""
        self.times = StageTimes(board, self._mesh.pp_rank, self._mark)

    @property
    def always_on_kernels(self) -> bool:
        """Whether the CPU kernels run all layers of every forward: no padding, and a known bound of its memory."""
        return self._executor.always_on_kernels

    @torch.inference_mode()
    def record_graphs(
        self,
        recorder: Recorder,
        sizes: Sequence[int],
        progress: Callable[[Iterable[int]], Iterable[int]] = iter,
        chunk_sizes: Sequence[int] = (),
    ) -> None:
        """Record steps of these sizes, in tokens; from now on, steps replay them. sizes: of decode steps. progress:
        wraps the iteration over all sizes. chunk_sizes: further ones, for steps of more tokens."""
        self._graphs = self._prefixes = None
        if self.adapters is not None:
            self.adapters.set_rows(None)  # the rows of the step before
        has_logits = self._mesh.is_last_stage
        can_sample = has_logits and self._shard.is_whole and uses_triton(self.device, "sampling")
        plan_whole, memory, backend = None, None, self._recordable
        if backend is not None:
            memory = backend.prepare_recording(max(sizes), self._slots.block_tables.shape[1])
        inputs = RecordedInputs.allocate(max(sizes), max(*sizes, *chunk_sizes, 0), memory, self.device)
        if backend is not None:
            plan_whole = partial(self._plan_padding, backend, inputs)
        places = self._model, self._executor, recorder, sizes, chunk_sizes, inputs
        sampler = partial(draw_and_finish, last_tokens=self._slots.last_tokens) if can_sample else None
        cache = self._backend if isinstance(self._backend, TensorCache) else None
        adapters = self.adapters.rows if self.adapters is not None and self.adapters.in_graphs else None
        graphs = StepGraphs(*places, has_logits, sampler, plan_whole, cache, adapters)
        graphs.record(progress)
        self._graphs = graphs

    @torch.inference_mode()
    def record_groups(self, sizes: Sequence[int], progress: Callable[[Iterable[int]], Iterable[int]] = iter) -> None:
        """Record decode steps of these sizes with prefix groups too, in one piece: some of the sizes of record_graphs,
        which comes first. From now on, decode steps with no more groups than these have room for replay them. progress:
        as there."""
        graphs, backend = self._graphs, self._recordable
        assert graphs is not None
        assert backend is not None, "attention can be recorded"
        self.drop_groups()
        if self.adapters is not None:
            self.adapters.set_rows(None)
        largest = graphs.sizes[-1]
        memory = backend.prepare_groups(max_graph_groups(largest, largest))

        def plan(size: int) -> Attends:
            return self._plan_padding(backend, graphs.inputs, size, memory.cut(max_graph_groups(size, largest)))

        graphs.record_groups(sizes, plan, progress)
        self._prefixes = memory

    def drop_groups(self) -> None:
        """Free what record_groups has recorded: decode steps with prefix groups replay pieces."""
        self._prefixes = None
        if self._graphs is not None:
            self._graphs.drop_groups()
            if self._recordable is not None:
                self._recordable.prepare_groups(0)

    @property
    def records_attention(self) -> bool:
        """Whether graphs may include the backend's attention."""
        return self._recordable is not None

    @property
    def max_recorded_groups(self) -> int:
        """Most prefix groups of a decode step that replays one graph; 0 if none does."""
        return 0 if self._prefixes is None else len(self._prefixes.last_lengths)

    @property
    def group_graph_sizes(self) -> list[int]:
        """Sizes of the recorded decode steps with prefix groups, in sequences, smallest first."""
        return [] if self._graphs is None or self._prefixes is None else self._graphs.group_sizes

    @contextmanager
    def groups_in_pieces(self) -> Iterator[None]:
        """Inside, decode steps with prefix groups replay pieces."""
        prefixes, self._prefixes = self._prefixes, None
        try:
            yield
        finally:
            self._prefixes = prefixes

    def _plan_padding(
        self, backend: RecordableBackend, inputs: RecordedInputs, size: int, prefixes: RecordedMemory | None = None
    ) -> Attends:
        """Plan the attention of a step of padding alone, so that it can be recorded. prefixes: of a recording with
        prefix groups, the first of which has all rows, and no tokens."""
        step = padding_alone(size)
        if prefixes is not None:
            step = replace(step, groups=PrefixGroups(np.array([size], np.int32), np.zeros(1, np.int32)))
        self._staging.begin()
        batch = self._build(step, is_padded=False, inputs=inputs.cut(size), prefixes=prefixes)
        backend.plan_recorded(batch.layout)
        self._staging.send()
        self._staging.finish()
        return attends_over(self._backend, batch.layout)

    def _build(
        self,
        step: ForwardInput,
        is_padded: bool,
        inputs: RecordedInputs | None = None,
        prefixes: RecordedMemory | None = None,
    ) -> DeviceBatch:
        places = self._slots, self._page_size, self._staging
        batch = build_batch(step, *places, is_padded, self._token_multiple, inputs, prefixes)
        if self._model.states is not None:
            self._model.states.segments = self._slots.take_segments(step)
        self._slots.positions[0] = 0  # rows of padding have moved on
        return batch

    def drop_graphs(self) -> None:
        """Free them: later steps launch each operation."""
        self._graphs = self._prefixes = None
        if self._recordable is not None:
            self._recordable.prepare_recording(0, 0)

    @property
    def decodes_in_one_call(self) -> bool:
        """Whether the CPU kernels compute the usual decode steps in one call."""
        return self._kernel_decode is not None

    @property
    def executor(self) -> LayerExecutor:
        """Runs the layers of every forward."""
        return self._executor

    @property
    def token_multiple(self) -> int:
        """Every forward has a multiple of this many tokens, padding included."""
        return self._token_multiple

    @property
    def graph_sizes(self) -> list[int]:
        """Sizes of the recorded decode steps, in sequences, smallest first; empty if there are none."""
        return [] if self._graphs is None else self._graphs.sizes

    @property
    def all_graph_sizes(self) -> list[int]:
        """Sizes of the recorded steps with prompts, in tokens, smallest first: those of decode steps, and larger
        ones."""
        return [] if self._graphs is None else self._graphs.all_sizes

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Inside, no step replays a graph or is one call of the CPU kernels."""
        graphs, self._graphs = self._graphs, None
        kernel_decode, self._kernel_decode = self._kernel_decode, None
        try:
            yield
        finally:
            self._graphs = graphs
            self._kernel_decode = kernel_decode
            if kernel_decode is not None:
                kernel_decode.forget()

    @torch.inference_mode()
    def compute_alone(self, step: ForwardInput, last_tokens: Tensor | None, entering: Tensor | None) -> ComputedStep:
        """Run a step that opens all its slots, close them, and keep the results on the device. Exchanges nothing with
        other stages.

        last_tokens: int64 [R], of the step's R decode rows, if it embeds them. entering: [T, E], what enters
        this stage; None for the embeddings of the step's tokens.
        """
        num_rows = int(step.num_tokens.sum())
        if last_tokens is not None:
            decode_slots = torch.from_numpy(step.slots[: step.num_decode]).long()
            self._slots.last_tokens[decode_slots.to(self.device)] = last_tokens
        self._staging.begin()
        self._apply(step.changes)
        batch, (hidden, logits, finished) = self._compute(step, entering)
        redrawn = None
        if finished is not None:
            redrawn = self._sample(hidden, logits, batch).tokens[:num_rows]
        if self._mesh.is_last_stage:
            some = slice(0, min(num_rows, CHECKED_LOGIT_ROWS))
            logits = self._model.logits(hidden[some]) if logits is None else logits[some]
            logits = logits.clone()
        self._staging.finish()
        tokens = None if finished is None else finished.tokens[:num_rows].clone()
        self._apply(SlotChanges(closed=step.slots, opened=None, block_slots=_NOTHING, block_ids=_NOTHING))
        return ComputedStep(hidden[:num_rows].float().clone(), logits, tokens, redrawn)

    @torch.inference_mode()
    def decode_alone(self, step: ForwardInput, last_tokens: Tensor, num_steps: int) -> NDArray[np.int32]:
        """Run a decode step of R rows that opens all its slots, then the next steps of the same rows, and close the
        slots -> int32 [num_steps, R], the tokens drawn. For a model without other stages.

        last_tokens: int64 [R], which the first step embeds."""
        self._slots.last_tokens[torch.from_numpy(step.slots).long().to(self.device)] = last_tokens
        tokens = []
        for _ in range(num_steps):
            result = self.run(step)
            assert result is not None, "other stages were excluded"
            tokens.append(result.output().token_ids)
            step = replace(step, changes=SlotChanges(_NOTHING, None, _NOTHING, _NOTHING))
        self._apply(SlotChanges(closed=step.slots, opened=None, block_slots=_NOTHING, block_ids=_NOTHING))
        return np.stack(tokens)

    @torch.inference_mode()
    def expect(self, step: ForwardInput) -> None:
        """Prepare for a step that will run after the steps expected before; may be left out."""
        if self._links is not None:
            self._links.expect_hidden(int(step.num_tokens.sum()))

    def finish(self) -> None:
        """Wait until the other stages have got what was sent to them. All have run the same steps."""
        if self._links is not None:
            self._links.finish()

    @torch.inference_mode()
    def run(self, step: ForwardInput) -> StepResult | None:
        """Run one step. On an asynchronous device, returns before the result is computed. None on all pipeline stages
        but the last."""
        begun = self._take(step)
        wants_experts = self._slots.want_experts[step.slots]
        if self._expert_totals is None and not wants_experts.any():
            return self._run(step, begun)
        assert isinstance(self._model, Decoder), "the server refuses requests for the experts of other models"
        wanted = np.repeat(wants_experts, step.num_tokens)
        with self._model.recording_experts(padded_count(len(wanted), self._token_multiple)) as chosen:
            return self._run(step, begun, RecordedExperts(chosen, wanted, self._expert_totals))

    def _run(self, step: ForwardInput, begun: list[Mark], recorded: RecordedExperts | None = None) -> StepResult | None:
        """begun: of _take. recorded: where the model's layers write the experts of tokens; None: they do not."""
        if self._kernel_decode is not None:
            result = self._by_kernels(self._kernel_decode, step, begun[0], recorded)
            if result is not None:
                return result
        batch, computed = self._compute(step, launches=recorded is not None or self._must_launch(step))
        num_tokens = int(step.num_tokens.sum())
        num_sampled = batch.num_sampled - (len(batch.token_slots) - num_tokens)  # without the rows that pad a graph
        if self._links is not None and not self._links.is_last:
            self._pass_on(self._links, batch, computed.hidden[:num_tokens], num_sampled)
            return None
        if self._pooler is not None:
            outputs = self._pool(self._pooler, batch, computed.hidden)
        else:
            outputs = self._sample_and_store(batch, computed, num_sampled)
        if recorded is not None:
            outputs |= recorded.outputs()
        if self._links is not None:
            self._links.end_step()
        self._staging.finish()
        ended = self._mark()
        top = batch.sampling.top
        return StepResult(
            step.step_id,
            self._results.fetch(outputs),
            batch.want_logprobs[:num_sampled],
            None if top is None or "top_ids" not in outputs else top.rows.on_host,
            batch.sampled_tokens[:num_sampled],
            batch.token_slots,
            batch.token_positions,
            batch.token_blocks,
            self._new_recompiles(),
            self._graphs is not None and self._graphs.is_missed_by(step),
            self._phase_seconds(),
            None if recorded is None else self._experts_dtype,
            *(begun[0], ended),
        )

    def _take(self, step: ForwardInput) -> list[Mark]:
        """Begin the step's transfers and apply its changes to the slots. The list gets a mark once they have arrived,
        and once the tokens that the first stage embeds are there."""
        if self._links is not None and self._links.is_first:
            with self.times.waiting():
                self._links.await_tokens(step.slots[: step.num_decode], self._slots.last_tokens)
        begun: list[Mark] = []
        self._staging.begin()
        self._staging.then(lambda: begun.append(self._mark()))
        self._apply(step.changes)
        return begun

    def _apply(self, changes: SlotChanges) -> None:
        for number, digest in changes.adapters:
            assert self.adapters is not None
            self.adapters.place(number, digest)
        if changes.windows is not None:
            self._backend.place_windows(changes.windows)
        self._slots.apply(changes, self._staging)
        if self._kernel_decode is not None:
            self._kernel_decode.note(changes)

    @property
    def _experts_dtype(self) -> type[np.uint8 | np.uint16]:
        return np.uint8 if self._model.spec.num_experts <= 1 << 8 else np.uint16

    def _by_kernels(
        self, kernel_decode: KernelDecode, step: ForwardInput, begun: Mark, recorded: RecordedExperts | None
    ) -> StepResult | None:
        """None if the kernels do not compute such a step in one call."""
        decoded = kernel_decode.run(step)
        if decoded is None:
            return None
        is_finite = decoded.tokens >= 0
        token_ids = np.maximum(decoded.tokens, 0).astype(np.int32)
        outputs: dict[str, NDArray[Any]] = {"token_ids": token_ids, "is_finite": is_finite}
        if recorded is not None:
            outputs |= {name: tensor.numpy() for name, tensor in recorded.outputs().items()}
        return StepResult(
            step.step_id,
            HostArrays(outputs),
            want_logprobs=np.zeros(len(token_ids), np.bool_),
            top_rows=None,
            sampled_tokens=np.arange(len(token_ids)),
            token_slots=step.slots,
            token_positions=decoded.positions,
            token_blocks=decoded.blocks,
            phase_seconds=self._phase_seconds(),
            experts_dtype=None if recorded is None else self._experts_dtype,
            begun=begun,
        )

    def _phase_seconds(self) -> tuple[float, ...]:
        return () if self._kernels is None else self._kernels.phase_seconds()

    def _pass_on(self, links: StageLinks, batch: DeviceBatch, hidden: Tensor, num_sampled: int) -> None:
        """Send hidden [n, E] to the next stage; the first stage also expects the tokens that the last one samples."""
        with self.times.waiting():  # until the next stage has received what was sent before
            links.send_hidden(hidden)
        if links.is_first:
            slots = batch.host_sampled_slots[:num_sampled], batch.sampled_slots[:num_sampled]
            links.expect_tokens(*slots, self._slots.last_tokens)
        links.end_step()
        self._staging.finish()

    def _pool(self, pooler: Pooler, batch: DeviceBatch, hidden: Tensor) -> dict[str, Tensor]:
        """In place of sampling -> `outputs` of StepResult, whose tokens have no meaning."""
        hidden = hidden[: len(batch.token_slots)]
        vectors, is_finite = pooler.pool(hidden, batch), are_finite(hidden)
        is_finite[batch.logit_rows[: batch.num_sampled]] &= are_finite(vectors)
        tokens = torch.zeros(batch.num_sampled, dtype=torch.int64, device=hidden.device)
        if self._links is not None:
            self._links.send_tokens(tokens)
        return {"token_ids": tokens.int(), "is_finite": is_finite, "vectors": vectors}

    def _sample_and_store(self, batch: DeviceBatch, computed: DecodeOutput, num_sampled: int) -> dict[str, Tensor]:
        """Sample, store the last tokens, and compute prompt logprobs -> `outputs` of StepResult, on the device."""
        hidden, logits, finished = computed
        hidden = hidden[: len(batch.token_slots)]
        outputs: dict[str, Tensor] = {}
        is_mixed = batch.num_sampled < len(hidden) and batch.prompt_logprobs is None
        if self._graphs is not None and is_mixed and num_sampled and not self._changes_ends(batch):
            outputs = {"is_finite": are_finite(hidden)}
            # A copy: the graphs may use the memory of what they have computed.
            rows = hidden.index_select(0, batch.logit_rows[:num_sampled])
            finished = self._graphs.sample(rows, batch.sampled_slots, batch.sampling)
        if finished is None:
            sampled = self._sample(hidden, logits, batch)
            of_top = ("top_ids", sampled.top_ids), ("top_logprobs", sampled.top_logprobs)
            outputs = {name: tensor for name, tensor in of_top if tensor is not None}
            if batch.num_sampled < len(hidden) or batch.prompt_logprobs is not None:
                return outputs | self._store_apart(batch, hidden, sampled)
            places = batch.sampled_slots, self._slots.last_tokens
            finished = finish(sampled.tokens, sampled.logprobs, hidden, *places)
        packed = finished.packed[:num_sampled]
        if self._links is not None:
            self._links.send_tokens(packed[:, 0].long())
        return outputs | {"packed": packed}

    def _store_apart(self, batch: DeviceBatch, hidden: Tensor, sampled: Sampled) -> dict[str, Tensor]:
        """What is left to do of a step in which not every token samples, or with prompt logprobs. hidden: [T, E],
        without padding. -> `outputs` of StepResult but for the top logprobs."""
        is_finite = are_finite(hidden)
        is_finite[batch.logit_rows[: batch.num_sampled]] &= sampled.tokens >= 0
        tokens = sampled.tokens.clamp(min=0)  # later steps may embed it before the manager ends the sequence
        self._slots.last_tokens[batch.sampled_slots] = tokens
        if self._links is not None:
            self._links.send_tokens(tokens)
        outputs = {"token_ids": tokens.int(), "is_finite": is_finite}
        if sampled.logprobs is not None:
            outputs["logprobs"] = sampled.logprobs
        if batch.prompt_logprobs is not None:
            head = partial(self._logits, hidden, batch)
            of_prompt = compute_prompt_logprobs(hidden, batch.prompt_logprobs, head, self._fill_prompt)
            is_finite[batch.prompt_logprobs.rows[: len(of_prompt.logprobs)]] &= torch.isfinite(of_prompt.logprobs)
            outputs |= {f"prompt_{name}": tensor for name, tensor in of_prompt._asdict().items()}
        return outputs

    def _compute(
        self, step: ForwardInput, entering: Tensor | None = None, launches: bool = False
    ) -> tuple[DeviceBatch, DecodeOutput]:
        """Build, send and run a forward; its slots are up to date. The batch is padded if a graph computes it.

        entering: hidden states that no other stage has to send. launches: without graphs and compiled layers.
        """
        graphs, backend, executor = None if launches else self._graphs, self._backend, self._executor
        if launches and isinstance(executor, CompiledExecutor):
            executor = executor.plain
        size = None if graphs is None else graphs.size_for(int(step.num_tokens.sum()))
        if graphs is None or size is None:
            batch = self._build(step, is_padded=not self.always_on_kernels)
            backend.plan(batch.layout)
            self._set_adapters(batch)
            self._staging.send()
            attends, hidden = attends_over(backend, batch.layout), self._receive(step, entering, len(batch.token_ids))
            hidden = self._model(batch.token_ids, hidden, batch.positions, executor, attends)
            return batch, DecodeOutput(hidden, logits=None)
        is_decode, prefixes = graphs.is_decode(step), None
        has_adapters = self.adapters is not None and bool(self._slots.adapters[step.slots].any())
        # Adapters are not recorded with prefix groups.
        groups = step.groups if is_decode and not has_adapters else None
        if groups is not None and (found := self._groups_for(graphs, groups, size)) is not None:
            size, prefixes = found
        inputs = graphs.inputs.cut(size)
        batch = self._build(padded(step, size) if is_decode else step, not is_decode, inputs, prefixes)
        self._set_adapters(batch)
        if is_decode and self._recordable is not None and (step.groups is None or prefixes is not None):
            self._recordable.plan_recorded(batch.layout)
            self._staging.send()
            return batch, graphs.run(batch, None, is_decode, self._receive(step, entering), has_adapters)
        backend.plan(batch.layout)
        self._staging.send()
        # Tokens of padding compute whatever was in memory: no other token reads it.
        attends = attends_over(backend, batch.layout, fills_padding=False, writes=not graphs.stores_kv)
        return batch, graphs.run(batch, attends, is_decode, self._receive(step, entering), has_adapters)

    def _groups_for(self, graphs: StepGraphs, groups: PrefixGroups, num_rows: int) -> tuple[int, RecordedMemory] | None:
        """The size of the recording with prefix groups that a decode step of num_rows rows replays, and its memory;
        None if none has room for it."""
        size = next((size for size in graphs.group_sizes if size >= num_rows), None)
        if size is None or self._prefixes is None:
            return None
        num_groups = max_graph_groups(size, graphs.sizes[-1])
        return (size, self._prefixes.cut(num_groups)) if len(groups.sizes) <= num_groups else None

    def _receive(self, step: ForwardInput, entering: Tensor | None, num_padded: int = 0) -> Tensor | None:
        """What the stage before this one has computed of the step, or `entering`: [n, E], padded to num_padded tokens
        if these are more; None on the first stage."""
        if entering is not None:
            num_padding = max(0, num_padded - len(entering))
            with torch.inference_mode(entering.is_inference()):  # compiled layers are made for one of both kinds
                return torch.nn.functional.pad(entering, (0, 0, 0, num_padding)) if num_padding else entering
        if self._links is None or self._links.is_first:
            return None
        num_tokens = int(step.num_tokens.sum())
        with self.times.waiting():
            return self._links.receive_hidden(num_tokens, max(num_tokens, num_padded))

    def _sample(self, hidden: Tensor, logits: Tensor | None, batch: DeviceBatch) -> Sampled:
        """hidden [T, E]; logits [T, v] of this rank, if they are known already. A separate method, so that logits are
        freed when it returns."""
        if logits is None:
            logits = self._logits(hidden, batch, batch.logit_rows)
        logits = logits[: batch.num_sampled]  # all rows of a graph sample
        return sample(logits, batch.sampling, self._kernels, self._shard)

    def _logits(self, hidden: Tensor, batch: DeviceBatch, rows: Tensor) -> Tensor:
        """As the model's, of these rows of hidden [T, E]."""
        if self.adapters is not None:
            numbers = None
            if not self.adapters.in_graphs or self._changes_ends(batch):
                numbers = self._adapters_of(batch, len(hidden))
            self.adapters.set_rows(None if numbers is None else numbers[rows.cpu().numpy()])
        return self._model.logits(hidden[rows])

    def _must_launch(self, step: ForwardInput) -> bool:
        """Whether the step has adapters that neither graphs nor compiled layers compute."""
        if self.adapters is None:
            return False
        numbers = self._slots.adapters[step.slots]
        return bool(numbers.any()) and not (self.adapters.in_graphs and not self.adapters.change_ends(numbers))

    def _changes_ends(self, batch: DeviceBatch) -> bool:
        """Whether the batch has adapters that change embeddings or logits."""
        return self.adapters is not None and self.adapters.change_ends(self._slots.adapters[batch.token_slots])

    def _set_adapters(self, batch: DeviceBatch) -> None:
        """For the next forward, whose arrays are not sent yet."""
        if self.adapters is not None:
            self.adapters.set_rows(self._adapters_of(batch, len(batch.token_ids)), self._staging)

    def _adapters_of(self, batch: DeviceBatch, num_tokens: int) -> NDArray[np.int32] | None:
        """int32 [num_tokens], the number of each token's adapter, or 0; None if no token has one. num_tokens: those of
        the batch, and padding."""
        numbers = self._slots.adapters[batch.token_slots]
        return np.pad(numbers, (0, num_tokens - len(numbers))) if numbers.any() else None

    def _fill_prompt(self, logits: Tensor, target_ids: Tensor, result: TokenLogprobs) -> None:
        fill_token_logprobs(logits, target_ids, result, self._kernels, self._shard)

    def _new_recompiles(self) -> int:
        if self._compiler is None:
            return 0
        before, self._num_recompiles = self._num_recompiles, self._compiler.num_recompiles
        return self._num_recompiles - before
