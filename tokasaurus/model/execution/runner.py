"""Run one forward: apply the slot changes, compute, sample, store the last tokens."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.messages.forward import ForwardInput, NonfiniteTokens, PromptLogprobsOutput, TopOfRows
from tokasaurus.model.attention.backend import AttentionBackend
from tokasaurus.model.cpu.bindings import Kernels
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.execution.device_batch import DeviceBatch, build_batch
from tokasaurus.model.execution.executors import choose_executor
from tokasaurus.model.execution.slot_table import SlotTable
from tokasaurus.model.sampling.prompt_logprobs import TokenLogprobs, compute_prompt_logprobs
from tokasaurus.model.sampling.sample import Sampled, sample

# T tokens in this forward, E hidden size, R rows that sample


@dataclass(frozen=True, slots=True)
class StepResult:
    """The sampled tokens and logprobs of one step; the copies to the host may still be running."""

    step_id: int
    token_ids: Tensor
    """int32 [R]."""

    logprobs: Tensor | None
    """float32 [R], or None if no row asked."""

    want_logprobs: NDArray[np.bool_]
    """bool [R], rows that asked for logprobs."""

    is_finite: Tensor
    """bool [T], whether a token's hidden state, and the logits computed from it, if any, are finite."""

    token_slots: NDArray[np.int32]
    """int32 [T]."""

    token_positions: NDArray[np.int64]
    """int64 [T]."""

    token_blocks: NDArray[np.int32]
    """int32 [T]."""

    arrived: torch.cuda.Event | None
    """Recorded after the copies on an asynchronous device; None if the tensors are already on the host."""

    num_recompiles: int = 0
    """Compilations after warm-up that this step waited for."""

    phase_seconds: tuple[float, ...] = ()
    """As in ForwardOutput."""

    top: tuple[NDArray[np.int64], Tensor, Tensor] | None = None
    """Rows that asked for top-k logprobs, int64 [A], with top_ids and top_logprobs of Sampled; None if no row asked."""

    prompt_logprobs: TokenLogprobs | None = None
    """Prompt logprobs; None if no row asked."""

    def host_token_ids(self) -> NDArray[np.int32]:
        """int32 [R]. Waits for this step, not for later ones."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.token_ids.numpy()

    def host_nonfinite(self) -> NonfiniteTokens | None:
        """Tokens that are not finite; None if all are. Waits for this step."""
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens = np.flatnonzero(~self.is_finite.numpy())
        if not len(tokens):
            return None
        first = tokens[np.unique(self.token_slots[tokens], return_index=True)[1]]
        return NonfiniteTokens(self.token_positions[first].astype(np.int32), self.token_blocks[first].astype(np.int32))

    def host_logprobs(self) -> NDArray[np.float32] | None:
        """float32 [R], NaN for rows that did not ask; None if no row asked. Waits for this step."""
        if self.logprobs is None:
            return None
        if self.arrived is not None:
            self.arrived.synchronize()
        return np.where(self.want_logprobs, self.logprobs.numpy(), np.float32(np.nan))

    def host_top(self) -> TopOfRows | None:
        """Top-k logprobs of sampled tokens; None if no row asked. Waits for this step."""
        if self.top is None:
            return None
        if self.arrived is not None:
            self.arrived.synchronize()
        rows, token_ids, logprobs = self.top
        return TopOfRows(rows, token_ids.numpy(), logprobs.numpy())

    def host_prompt_logprobs(self) -> PromptLogprobsOutput | None:
        """Prompt logprobs; None if no row asked. Waits for this step."""
        if self.prompt_logprobs is None:
            return None
        if self.arrived is not None:
            self.arrived.synchronize()
        return PromptLogprobsOutput(*(tensor.numpy() for tensor in self.prompt_logprobs))


def _copy_to_host(tensor: Tensor) -> Tensor:
    """Start a copy without waiting for it, which requires pinned memory. A CPU tensor is returned as it is."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class ModelRunner:
    """This rank's model, KV cache and slots. `run` receives every step that the manager sends, in order."""

    def __init__(
        self,
        model: Decoder,
        backend: AttentionBackend,
        slots: SlotTable,
        page_size: int,
        device: torch.device,
        kernels: Kernels | None,
        compiler: Compiler | None = None,
    ) -> None:
        """compiler: compiles parts of the model; None if nothing is compiled."""
        self._model = model
        self._backend = backend
        self._slots = slots
        self._page_size = page_size
        self._device = device
        self._kernels = kernels
        self._compiler = compiler
        self._executor = choose_executor(model, backend)
        self._num_recompiles = 0

    @property
    def always_on_kernels(self) -> bool:
        """Whether the CPU kernels run all layers of every forward: no padding, and a known bound of its memory."""
        return self._executor.always_on_kernels

    @torch.inference_mode()
    def run(self, step: ForwardInput) -> StepResult:
        """Run one step. On an asynchronous device, returns before the result is computed."""
        self._slots.apply(step.changes)
        batch = build_batch(step, self._slots, self._page_size, self._device, not self.always_on_kernels)
        self._backend.plan(batch.layout)
        hidden = self._model(batch.token_ids, None, batch.positions, self._executor, batch.layout)
        is_finite = torch.linalg.vector_norm(hidden[: len(batch.token_slots)], torch.inf, dim=-1) < torch.inf
        sampled = self._sample(hidden, batch)
        is_finite[batch.logit_rows[: batch.num_sampled]] &= sampled.tokens >= 0
        tokens = sampled.tokens.clamp(min=0)  # later steps may embed it before the manager ends the sequence
        self._slots.last_tokens[batch.sampled_slots] = tokens
        host_tokens = _copy_to_host(tokens.int())
        host_logprobs = None if sampled.logprobs is None else _copy_to_host(sampled.logprobs)
        top = None
        if batch.sampling.top is not None and sampled.top_ids is not None and sampled.top_logprobs is not None:
            top = batch.sampling.top.rows, _copy_to_host(sampled.top_ids), _copy_to_host(sampled.top_logprobs)
        prompt_logprobs = None
        if batch.prompt_logprobs is not None:
            computed = compute_prompt_logprobs(hidden, batch.prompt_logprobs, self._model.logits, self._kernels)
            is_finite[batch.prompt_logprobs.rows[: len(computed.logprobs)]] &= torch.isfinite(computed.logprobs)
            prompt_logprobs = TokenLogprobs(*map(_copy_to_host, computed))
        arrived = None
        if self._device.type == "cuda":
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return StepResult(
            step.step_id,
            host_tokens,
            host_logprobs,
            batch.want_logprobs,
            _copy_to_host(is_finite),
            batch.token_slots,
            batch.token_positions,
            batch.token_blocks,
            arrived,
            self._new_recompiles(),
            () if self._kernels is None else self._kernels.phase_seconds(),
            top,
            prompt_logprobs,
        )

    def _sample(self, hidden: Tensor, batch: DeviceBatch) -> Sampled:
        """hidden [T, E]. A separate method, so that the logits are freed when it returns."""
        logits = self._model.logits(hidden[batch.logit_rows])[: batch.num_sampled]
        return sample(logits, batch.sampling, self._kernels)

    def _new_recompiles(self) -> int:
        if self._compiler is None:
            return 0
        before, self._num_recompiles = self._num_recompiles, self._compiler.num_recompiles
        return self._num_recompiles - before
