"""Run one forward: apply the slot changes, compute, sample, store the last tokens."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.messages.forward import ForwardInput, PromptLogprobsOutput, TopOfRows
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
        """Whether the CPU kernels run all layers of every forward. They need no padding, and memory of known size."""
        return self._executor.always_on_kernels

    @torch.inference_mode()
    def run(self, step: ForwardInput) -> StepResult:
        """Run one step. On an asynchronous device, returns before the result is computed."""
        self._slots.apply(step.changes)
        batch = build_batch(step, self._slots, self._page_size, self._device, not self.always_on_kernels)
        self._backend.plan(batch.layout)
        hidden = self._model(batch.token_ids, None, batch.positions, self._executor, batch.layout)
        sampled = self._sample(hidden, batch)
        self._slots.last_tokens[batch.sampled_slots] = sampled.tokens
        host_tokens = _copy_to_host(sampled.tokens.int())
        host_logprobs = None if sampled.logprobs is None else _copy_to_host(sampled.logprobs)
        top = None
        if batch.sampling.top is not None and sampled.top_ids is not None and sampled.top_logprobs is not None:
            top = batch.sampling.top.rows, _copy_to_host(sampled.top_ids), _copy_to_host(sampled.top_logprobs)
        prompt_logprobs = None
        if batch.prompt_logprobs is not None:
            prompt_logprobs = TokenLogprobs(
                *map(
                    _copy_to_host,
                    compute_prompt_logprobs(hidden, batch.prompt_logprobs, self._model.logits, self._kernels),
                )
            )
        arrived = None
        if self._device.type == "cuda":
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return StepResult(
            step.step_id,
            host_tokens,
            host_logprobs,
            batch.want_logprobs,
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
