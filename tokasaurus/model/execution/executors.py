"""How a stage's decoder layers are run: module by module, with Triton kernels between gemms, compiled, or all in one
call of the CPU kernels."""

# T tokens in this forward, E hidden size, D head size

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from tokasaurus.checkpoint.spec import LayerSpec
from tokasaurus.model.attention.backend import AttentionBackend
from tokasaurus.model.attention.cpu import CpuBackend
from tokasaurus.model.attention.row_split import Attends, attended_by_operation, attending
from tokasaurus.model.cpu.gemm_choice import GemmChoice
from tokasaurus.model.cpu.packed_layers import PackedLayers
from tokasaurus.model.decoder.compile import MAX_COMPILED_TOKENS, Compiler, relate_sizes
from tokasaurus.model.decoder.decoder import Decoder, DecoderLayer
from tokasaurus.model.decoder.model import LayerExecutor, Model
from tokasaurus.model.decoder.state_rows import StateRows
from tokasaurus.model.triton_choice import uses_triton


class ModuleExecutor:
    """Calls the layers' torch modules, and attention between their two halves."""

    always_on_kernels = False

    def __init__(self, model: Decoder) -> None:
        self._model = model

    @property
    def states(self) -> StateRows | None:
        """Of the model."""
        return self._model.states

    @property
    def adapters_of_tokens(self) -> Tensor | None:
        """As PackedLayers.run wants them."""
        rows = self._model.row_adapters
        return None if rows is None else rows.numbers

    def run(self, hidden: Tensor, cos_sin: Tensor, attends: Attends) -> Tensor:
        for layer in self._model.decoder_layers():
            hidden = layer.run(hidden, cos_sin, attends)
        return hidden


class FusedExecutor:
    """Runs gemms, attention, and a Triton kernel for all that is between two of them: eight launches a layer beside
    attention."""

    always_on_kernels = False

    def __init__(self, model: Decoder) -> None:
        from tokasaurus.model.decoder import triton_layers

        self._layers = list(model.decoder_layers())
        self._num_tables = model.spec.num_rotary_tables
        self._kernels = triton_layers

    @staticmethod
    def computes(layer: LayerSpec) -> bool:
        """Whether there are kernels for such a layer."""
        return layer.is_plain

    def run(self, hidden: Tensor, cos_sin: Tensor, attends: Attends) -> Tensor:
        """Overwrites `hidden`."""
        kernels = self._kernels
        fed: Tensor | None = None
        if self._num_tables > 1:  # kernels read a table as one piece of memory
            by_table = cos_sin.transpose(0, 1).contiguous().unsqueeze(2)
        for layer in self._layers:
            attention, mlp = layer.own_attention, layer.dense_mlp
            assert layer.attention_norm is not None
            assert layer.mlp_norm is not None
            if self._num_tables > 1:
                cos_sin = by_table[layer.table_index]
            normed = kernels.add_norm(hidden, fed, layer.attention_norm.own_weight, layer.attention_norm.eps)
            query, key, value, poison = self._rotate(layer, attention.qkv(normed), cos_sin)
            attended = attention.out(attends(query, key, value, attention.layer_index).flatten(1))
            normed = kernels.add_norm(hidden, attended, layer.mlp_norm.own_weight, layer.mlp_norm.eps, poison)
            fed = mlp.down(kernels.silu_mul(mlp.gate_up.features(normed)))
        return hidden if fed is None else hidden.add_(fed)

    def _rotate(self, layer: DecoderLayer, features: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        attention = layer.own_attention
        query_norm, key_norm = attention.query_norm, attention.key_norm
        heads = attention.num_heads, attention.num_kv_heads
        if query_norm is None or key_norm is None:
            return self._kernels.rotate_heads(features, cos_sin, *heads)
        weights = query_norm.own_weight, key_norm.own_weight
        return self._kernels.rotate_heads(features, cos_sin, *heads, weights, query_norm.eps)


def run_layers(layers: Sequence[DecoderLayer], hidden: Tensor, cos_sin: Tensor, caches: Sequence[Tensor]) -> Tensor:
    """Run these layers, with attention as one operation of the compiler: `hidden` [T, E] -> [T, E].

    caches: tensors of the attention backend."""
    relate_sizes(hidden, cos_sin)
    for layer in layers:
        hidden = layer.run(hidden, cos_sin, partial(attended_by_operation, caches=caches))
    return hidden


class CompiledExecutor:
    """Runs all layers as one compiled function, which leaves attention whole; once the compiler has failed, runs
    `plain`."""

    always_on_kernels = False

    def __init__(
        self,
        model: Decoder,
        backend: AttentionBackend,
        compiler: Compiler,
        plain: LayerExecutor,
        run: Callable[..., Tensor] = run_layers,
        options: dict[str, Any] | None = None,
    ) -> None:
        """run, options: what to compile, with the arguments of run_layers, and how."""
        self._layers = list(model.decoder_layers())
        self._backend = backend
        self._compiler = compiler
        self.plain = plain
        self._run = compiler.compile(run, options)

    def run(self, hidden: Tensor, cos_sin: Tensor, attends: Attends) -> Tensor:
        if self._compiler.has_failed or len(cos_sin) > MAX_COMPILED_TOKENS:
            return self.plain.run(hidden, cos_sin, attends)
        with attending(attends):
            # Their storage changes. Views of one element have the same shape before and after the cache gets its size.
            caches = [cache.as_strided((1,), (1,)) for cache in self._backend.caches]
            return self._run(self._layers, hidden, cos_sin, caches)


class KernelExecutor:
    """Runs all layers in one call of the CPU kernels, or module by module for token counts where that is faster."""

    def __init__(self, layers: PackedLayers, backend: CpuBackend, choice: GemmChoice, modules: ModuleExecutor) -> None:
        self.layers = layers
        self.backend = backend
        self._choice = choice
        self._modules = modules
        self._states = modules.states
        self.always_on_kernels = choice.always_kernels

    def runs_on_kernels(self, num_tokens: int) -> bool:
        """Whether the kernels run all layers of a forward of this size."""
        return self._choice.always_kernels or self._choice.uses_kernels(num_tokens)

    def run(self, hidden: Tensor, cos_sin: Tensor, attends: Attends) -> Tensor:
        if not self.runs_on_kernels(hidden.shape[0]):
            return self._modules.run(hidden, cos_sin, attends)
        segments = None if self._states is None else self._states.place_in(self.layers)
        self.layers.run(hidden, cos_sin, self.backend.planned, self._modules.adapters_of_tokens, segments)
        return hidden


def has_fused_layers(layers: Sequence[LayerSpec]) -> bool:
    """Whether FusedExecutor computes all layers, where its kernels are in use. layers: of all stages, which check them
    together."""
    return all(map(FusedExecutor.computes, layers))


class OwnLayers:
    """In the place of an executor, for a model that runs its layers itself."""

    always_on_kernels = False

    def run(self, *_: Any) -> Tensor:
        raise AssertionError("the model runs its layers")


def choose_executor(model: Model, backend: AttentionBackend, compiler: Compiler | None = None) -> LayerExecutor:
    """The fastest executor for a loaded and packed model with this backend; the compiler's, if there is one.

    A start has checked the layers' Triton kernels by now, and switched them off on all ranks if they fail on one."""
    if not isinstance(model, Decoder):
        return OwnLayers()
    modules = ModuleExecutor(model)
    has_fused = uses_triton(model.device, "layers") and has_fused_layers(model.spec.layers)
    fused = FusedExecutor(model) if has_fused else None
    if compiler is not None:
        return CompiledExecutor(model, backend, compiler, fused or modules)
    if fused is not None:
        return fused
    if model.packed_layers is None or not isinstance(backend, CpuBackend):
        return modules
    return KernelExecutor(model.packed_layers, backend, model.gemm_choice, modules)
