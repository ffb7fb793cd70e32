"""Run one forward: apply the slots' changes, compute, sample, remember the last tokens."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.messages.forward import ForwardInput, TokenScores, TopOfRows
from tokasaurus.model.attention.backend import AttentionBackend
from tokasaurus.model.cpu.bindings import Kernels
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.execution.device_batch import DeviceBatch, build_batch
from tokasaurus.model.execution.slot_table import SlotTable
from tokasaurus.model.sampling.prompt_logprobs import Scores, score
from tokasaurus.model.sampling.sample import Sampled, sample

# R rows that sample


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step sampled and scored, on its way to the host.

    token_ids: int32 [R]. logprobs: float32 [R], or None where no row asked. want_logprobs: bool [R].
    top: the rows that asked for their likeliest tokens, int64 [A], with top_ids and top_logprobs of Sampled; or None.
    scores: None where no row was scored.
    arrived: recorded behind the copies on a device that computes on its own; None where they are there already.
    num_recompiles: compilations after warm-up that the step waited for.
    phase_seconds: as in ForwardOutput.
    """

    step_id: int
    token_ids: Tensor
    logprobs: Tensor | None
    want_logprobs: NDArray[np.bool_]
    arrived: torch.cuda.Event | None
    num_recompiles: int = 0
    phase_seconds: tuple[float, ...] = ()
    top: tuple[NDArray[np.int64], Tensor, Tensor] | None = None
    scores: Scores | None = None

    def host_token_ids(self) -> NDArray[np.int32]:
        """Waits for this step, not for those behind it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.token_ids.numpy()

    def host_logprobs(self) -> NDArray[np.float32] | None:
        """NaN where not asked. Waits likewise."""
        if self.logprobs is None:
            return None
        if self.arrived is not None:
            self.arrived.synchronize()
        return np.where(self.want_logprobs, self.logprobs.numpy(), np.float32(np.nan))

    def host_top(self) -> TopOfRows | None:
        """Waits likewise."""
        if self.top is None:
            return None
        if self.arrived is not None:
            self.arrived.synchronize()
        rows, token_ids, logprobs = self.top
        return TopOfRows(rows, token_ids.numpy(), logprobs.numpy())

    def host_scores(self) -> TokenScores | None:
        """Waits likewise."""
        if self.scores is None:
            return None
        if self.arrived is not None:
            self.arrived.synchronize()
        return TokenScores(*(tensor.numpy() for tensor in self.scores))


def _copy_to_host(tensor: Tensor) -> Tensor:
    """Without waiting, which takes pinned memory."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


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
        compiler: Compiler | None = None,
    ) -> None:
        """compiler: the one that compiles parts of the model, if any."""
        self._model = model
        self._backend = backend
        self._slots = slots
        self._page_size = page_size
        self._device = device
        self._kernels = kernels
        self._compiler = compiler
        self._is_padded = not model.runs_on_kernels(backend)  # they take any count alike
        self._num_recompiles = 0

    @torch.inference_mode()
    def run(self, step: ForwardInput) -> StepResult:
        """Compute one step. On an asynchronous device it returns before the result is there."""
        self._slots.apply(step.changes)
        batch = build_batch(step, self._slots, self._page_size, self._device, self._is_padded)
        self._backend.plan(batch.layout)
        hidden = self._model(batch.token_ids, None, batch.positions, self._backend, batch.layout)
        sampled = self._sample(hidden, batch)
        self._slots.last_tokens[batch.sampled_slots] = sampled.tokens
        host_tokens = _copy_to_host(sampled.tokens.int())
        host_logprobs = None if sampled.logprobs is None else _copy_to_host(sampled.logprobs)
        top = None
        if batch.sampling.top is not None and sampled.top_ids is not None and sampled.top_logprobs is not None:
            top = batch.sampling.top.rows, _copy_to_host(sampled.top_ids), _copy_to_host(sampled.top_logprobs)
        scores = None
        if batch.scored is not None:
            scores = Scores(*map(_copy_to_host, score(hidden, batch.scored, self._model.logits, self._kernels)))
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
            scores,
        )

    def _sample(self, hidden: Tensor, batch: DeviceBatch) -> Sampled:
        """hidden [T, E]. The logits are gone when it returns."""
        logits = self._model.logits(hidden[batch.logit_rows])[: batch.num_sampled]
        return sample(logits, batch.sampling, self._kernels)

    def _new_recompiles(self) -> int:
        if self._compiler is None:
            return 0
        before, self._num_recompiles = self._num_recompiles, self._compiler.num_recompiles
        return self._num_recompiles - before
