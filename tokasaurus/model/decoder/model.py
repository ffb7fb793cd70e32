"""What runner, loading and weight updates use of a model, whatever computes it, and how its weights are packed."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.checkpoint.spec import ModelSpec
from tokasaurus.model.attention.row_split import Attends
from tokasaurus.model.cpu.bindings import ACTIVATION_DTYPES, Kernels
from tokasaurus.model.cpu.experts import ExpertWeights
from tokasaurus.model.cpu.gemm_choice import ALWAYS_KERNELS, GemmChoice
from tokasaurus.model.cpu.layer_executor import LayerKernels, PackedWeights
from tokasaurus.model.cpu.packed_layers import PackedLayers
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.decoder.layers import PLAIN, Linear
from tokasaurus.model.decoder.quantize import Packing
from tokasaurus.model.decoder.state_rows import StateRows
from tokasaurus.model.decoder.weights import WeightShard
from tokasaurus.model.parallel.mesh import Mesh

# T tokens in this forward, R rows whose logits are wanted, E hidden size


class LayerExecutor(Protocol):
    """Runs a stage's layers with one attention backend (see execution/executors)."""

    @property
    def always_on_kernels(self) -> bool:
        """Whether one call of the CPU kernels runs all layers in every forward, whatever its number of tokens."""

    def run(self, hidden: Tensor, cos_sin: Tensor, attends: Attends) -> Tensor:
        """hidden [T, E], which may be overwritten -> [T, E]. cos_sin: float32 [T, 1, D]."""


class Model(nn.Module, ABC):
    """This rank's part of a model.

    Parameters are created on the meta device: call `materialize`, fill `weight_shards`, then call `pack`.
    """

    def __init__(self, info: ModelInfo, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self._info = info
        self._mesh = mesh
        self._dtype = dtype
        self.activation_dtype = dtype
        self.packed_layers: PackedLayers | None = None
        """All layers as the CPU kernels read them; None unless they are all packed."""
        self.gemm_choice = ALWAYS_KERNELS
        self.states: StateRows | None = None
        """Of this stage's layers; None if none has a state."""

    @abstractmethod
    def materialize(self, device: torch.device, num_positions: int) -> None:
        """Allocate uninitialised parameters on `device`, and tables for num_positions positions."""

    def pack(
        self,
        kernels: Kernels | None,
        choice: GemmChoice = ALWAYS_KERNELS,
        compiler: Compiler | None = None,
        packing: Packing = PLAIN,
    ) -> None:
        """Convert the loaded weights to the layouts of the device's gemms.

        Equivalent to begin_packing, pack_module for each module, then end_packing.
        """
        self.begin_packing(kernels, choice, compiler, packing)
        for module in self.modules():
            self.pack_module(module)
        self.end_packing()

    def begin_packing(
        self,
        kernels: Kernels | None,
        choice: GemmChoice = ALWAYS_KERNELS,
        compiler: Compiler | None = None,
        packing: Packing = PLAIN,
    ) -> None:
        """Set how pack_module packs.

        kernels: the CPU kernels, or None. choice: whether gemms run on the kernels or on torch. compiler: compiles the
        layers (see execution/executors), which then stay unpacked, because inductor reads plain weights.
        """
        if kernels is not None and self._dtype in ACTIVATION_DTYPES:
            activation_dtype = kernels.activation_dtype(self._dtype)
            if compiler is not None and activation_dtype != self._dtype:
                kernels = None  # compiled layers compute in the weights' dtype
            else:
                self.activation_dtype = activation_dtype
        self._layer_kernels = None if kernels is None else LayerKernels(kernels)
        self.gemm_choice = choice
        self._compiler = compiler
        self._packing = packing

    @abstractmethod
    def pack_module(self, module: nn.Module) -> None:
        """Pack one module, once its own weights are loaded. Frees plain weights that have been packed.

        Raises CannotQuantize."""

    @abstractmethod
    def end_packing(self) -> None:
        """What is left to do once every module is packed."""

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> what enters the layers of the first stage, [T, E]."""

    @abstractmethod
    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor | None,
        positions: Tensor,
        executor: LayerExecutor,
        attends: Attends,
    ) -> Tensor:
        """Run one stage of a forward -> hidden [T, E] for the next stage or, from the last stage, for `logits`.

        token_ids: int64 [T], read by the first stage. hidden: [T, E], which later stages need, and which takes the
        place of embeddings in the first; may be overwritten.
        positions: int64 [T].
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E], rows of the last stage's `forward` output -> logits of this rank's token ids, [R, v], in its
        dtype. The next call may overwrite them."""

    @property
    @abstractmethod
    def sinks(self) -> tuple[Tensor | None, ...]:
        """Of each of this stage's layers, which attention backends read: float32 [H], or None."""

    @abstractmethod
    def weight_shards(self) -> list[WeightShard]:
        """Every tensor of the checkpoint, with a target if this stage has it."""

    @abstractmethod
    def ignores(self, source: str) -> bool:
        """Whether to skip this checkpoint tensor, which the model does not use."""

    @property
    def copies(self) -> dict[str, str]:
        """Ignored tensors by name, and the tensor that each must equal in new weights. UpdateChecks compares those of
        our own layers."""
        return {}

    def reserve(self, num_tokens: int, num_logit_rows: int) -> None:
        """Allocate the memory that the kernels keep between forwards, for up to num_tokens and num_logit_rows."""

    def reserve_experts(self, num_tokens: int) -> None:
        """Allocate the memory that experts on the kernels keep between forwards of up to num_tokens. What a forward
        needs depends on which are chosen, so that none shows the most."""

    @property
    def spec(self) -> ModelSpec:
        """Of the whole model."""
        return self._info.spec

    @property
    def vocab_size(self) -> int:
        return self._info.vocab_size

    @property
    def weight_dtype(self) -> torch.dtype:
        """dtype of the loaded weights, packed ones included."""
        return self._dtype

    @property
    def hidden_size(self) -> int:
        return self._info.hidden_size

    @property
    def head_dim(self) -> int:
        return self._info.head_dim

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def is_first_stage(self) -> bool:
        return self._mesh.is_first_stage

    @property
    def is_last_stage(self) -> bool:
        return self._mesh.is_last_stage

    def new_hidden(self, num_tokens: int, device: torch.device) -> Tensor:
        """Memory for hidden states, [T, E]."""
        return torch.zeros((num_tokens, self._info.hidden_size), dtype=self.activation_dtype, device=device)

    @property
    def saved_bytes(self) -> int:
        """What this rank's quantised weights take less than weights of their dtype."""
        return sum(linear.saved_bytes for linear in self._linears())

    @property
    def bytes_outside_linears(self) -> int:
        """Of this rank's matrices that are neither embeddings nor those of a linear layer: they are never quantised."""
        owners = (module for module in self.modules() if not isinstance(module, Linear | nn.Embedding))
        return sum(each.nbytes for owner in owners for each in owner.parameters(recurse=False) if each.dim() > 1)

    @property
    def block_types(self) -> list[str]:
        """Types of this rank's quantised weights."""
        return sorted({block_type for weights in self.packed_weights for block_type in weights.block_types})

    @property
    def packed_weights(self) -> list[PackedWeights]:
        """This rank's linear layers that the kernels compute, those of each expert by itself."""
        packed = [linear.packed for linear in self._linears() if linear.packed is not None]
        return [each for one in packed for each in (one.packed if isinstance(one, ExpertWeights) else [one])]

    @property
    def is_int8(self) -> bool:
        """Whether activations are quantised, once the model is packed."""
        return self._packing.is_int8

    @property
    def dequantised(self) -> Counter[str]:
        """How many weights of each type came as blocks, but could not be packed."""
        return Counter(block_type for linear in self._linears() for block_type in linear.dequantised_types)

    @property
    def takes_blocks(self) -> bool:
        """Whether quantised weights may come as blocks, once packing has begun."""
        return self._layer_kernels is not None and self._compiler is None and not self.gemm_choice.always_torch

    def give_back(self) -> None:
        """Free the memory of all large weights, until `take_again`. Raises OSError."""
        for matrix in self._matrices():
            matrix.untyped_storage().resize_(0)
        for linear in self._linears():
            linear.give_back()

    def take_again(self) -> None:
        """All weights can be written again. Raises RuntimeError if memory does not suffice."""
        for matrix in self._matrices():
            matrix.untyped_storage().resize_(matrix.nbytes)
        for linear in self._linears():
            linear.take_again()

    def _linears(self) -> Iterator[Linear]:
        return (module for module in self.modules() if isinstance(module, Linear))

    def _matrices(self) -> Iterator[nn.Parameter]:
        """Plain ones: a packed weight has no numbers left."""
        return (parameter for parameter in self.parameters() if parameter.dim() > 1)
