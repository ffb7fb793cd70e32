"""How a stage's decoder layers are run: module by module, compiled, or all in one call of the CPU kernels."""

# T tokens in this forward, E hidden size, D head size

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokasaurus.model.attention.backend import AttentionBackend
from tokasaurus.model.attention.cpu import CpuBackend
from tokasaurus.model.attention.operation import Attends, attend, attending
from tokasaurus.model.cpu.gemm_choice import GemmChoice
from tokasaurus.model.cpu.layer_executor import PackedLayers
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.decoder.decoder import Decoder, DecoderLayer, LayerExecutor


class ModuleExecutor:
    """Calls the layers' torch modules, and attention between their two halves."""

    always_on_kernels = False

    def __init__(self, model: Decoder) -> None:
        self._model = model

    def run(self, hidden: Tensor, cos_sin: Tensor, attends: Attends) -> Tensor:
        for layer in self._model.decoder_layers():
            query, key, value, hidden = layer.before_attention(hidden, cos_sin)
            attended = attends(query, key, value, layer.attention.layer_index)
            hidden = layer.after_attention(attended, hidden)
        return hidden


def run_layers(layers: Sequence[DecoderLayer], hidden: Tensor, cos_sin: Tensor, caches: Sequence[Tensor]) -> Tensor:
    """As LayerExecutor.run, with attention as one operation of the compiler. caches: of the backend."""
    # The compiler does not relate the sizes of two arguments by itself.
    torch._check(hidden.shape[0] == cos_sin.shape[0])  # type: ignore[no-untyped-call]
    for layer in layers:
        query, key, value, hidden = layer.before_attention(hidden, cos_sin)
        attended = torch.empty_like(query)
        attend(query, key, value, attended, caches, layer.attention.layer_index)
        hidden = layer.after_attention(attended, hidden)
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
        self._plain = plain
        self._run = compiler.compile(run, options)

    def run(self, hidden: Tensor, cos_sin: Tensor, attends: Attends) -> Tensor:
        if self._compiler.has_failed:
            return self._plain.run(hidden, cos_sin, attends)
        with attending(attends):
            # Their storage changes. Views of one element have the same shape before and after the cache gets its size.
            caches = [cache.as_strided((1,), (1,)) for cache in self._backend.caches]
            return self._run(self._layers, hidden, cos_sin, caches)


class KernelExecutor:
    """Runs all layers in one call of the CPU kernels, or module by module for token counts where that is faster."""

    def __init__(self, layers: PackedLayers, backend: CpuBackend, choice: GemmChoice, modules: ModuleExecutor) -> None:
        self._layers = layers
        self._backend = backend
        self._choice = choice
        self._modules = modules

    @property
    def always_on_kernels(self) -> bool:
        return self._choice.always_kernels

    def run(self, hidden: Tensor, cos_sin: Tensor, attends: Attends) -> Tensor:
        if not self._choice.uses_kernels(hidden.shape[0]):
            return self._modules.run(hidden, cos_sin, attends)
        self._layers.run(hidden, cos_sin, self._backend.planned)
        return hidden


def choose_executor(model: Decoder, backend: AttentionBackend, compiler: Compiler | None = None) -> LayerExecutor:
    """The fastest executor for a loaded and packed model with this backend; the compiler's, if there is one."""
    modules = ModuleExecutor(model)
    if compiler is not None:
        return CompiledExecutor(model, backend, compiler, modules)
    if model.packed_layers is None or not isinstance(backend, CpuBackend):
        return modules
    return KernelExecutor(model.packed_layers, backend, model.gemm_choice, modules)
