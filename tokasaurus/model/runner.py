"""Run one forward: apply the slots' changes, compute, sample, remember the last tokens."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.messages.forward import ForwardInput
from tokasaurus.model.architectures.decoder import Decoder
from tokasaurus.model.attention.backend import AttentionBackend
from tokasaurus.model.device_batch import build_batch
from tokasaurus.model.kernels.library import Kernels
from tokasaurus.model.sampling import sample
from tokasaurus.model.slot_table import SlotTable

# R rows that sample


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step sampled, possibly still being computed by the device.

    token_ids: int64 [R]. logprobs: float32 [R], or None where no row asked. want_logprobs: bool [R].
    """

    step_id: int
    token_ids: Tensor
    logprobs: Tensor | None
    want_logprobs: NDArray[np.bool_]

    def host_token_ids(self) -> NDArray[np.int32]:
        """Waits for the device."""
        return self.token_ids.to("cpu", torch.int32).numpy()

    def host_logprobs(self) -> NDArray[np.float32] | None:
        """NaN where not asked. Waits for the device."""
        if self.logprobs is None:
            return None
        return np.where(self.want_logprobs, self.logprobs.cpu().numpy(), np.float32(np.nan))


class ModelRunner:
    """This rank's model, KV cache and slots. Every step that the manager sends goes through `run`, in order."""

    def __init__(
        self,
        model: Decoder,
        backend: AttentionBackend,
        slots: SlotTable,
        page_size: int,
        device: torch.device,
        kernels: Kernels | None,
    ) -> None:
        self._model = model
        self._backend = backend
        self._slots = slots
        self._page_size = page_size
        self._device = device
        self._kernels = kernels

    @torch.inference_mode()
    def run(self, step: ForwardInput) -> StepResult:
        """Compute one step. On an asynchronous device it returns before the result is there."""
        self._slots.apply(step.changes)
        batch = build_batch(step, self._slots, self._page_size, self._device)
        self._backend.plan(batch.layout)
        logits = self._model(batch.token_ids, None, batch.positions, batch.logit_rows, self._backend, batch.layout)
        tokens, logprobs = sample(logits, batch.sampling, self._kernels)
        self._slots.last_tokens[batch.sampled_slots] = tokens
        return StepResult(step.step_id, tokens, logprobs, batch.want_logprobs)
