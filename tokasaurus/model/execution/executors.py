"""How a stage's decoder layers are run: module by module, or all in one call of the CPU kernels."""

# T tokens in this forward, E hidden size, D head size

from torch import Tensor

from tokasaurus.model.attention.backend import AttentionBackend, PagedLayout
from tokasaurus.model.attention.cpu import CpuBackend
from tokasaurus.model.cpu.gemm_choice import GemmChoice
from tokasaurus.model.cpu.layer_executor import PackedLayers
from tokasaurus.model.decoder.decoder import Decoder, LayerExecutor


class ModuleExecutor:
    """Calls the layers' torch modules, compiled or not, and the attention backend between their two halves."""

    always_on_kernels = False

    def __init__(self, model: Decoder, backend: AttentionBackend) -> None:
        self._model = model
        self._backend = backend

    def run(self, hidden: Tensor, cos_sin: Tensor, layout: PagedLayout) -> Tensor:
        model = self._model
        for layer in model.decoder_layers():
            query, key, value, hidden = model.before_attention(layer, hidden, cos_sin)
            attended = layer.attention.attend(query, key, value, self._backend, layout)
            hidden = model.after_attention(layer, attended, hidden)
        return hidden


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

    def run(self, hidden: Tensor, cos_sin: Tensor, layout: PagedLayout) -> Tensor:
        if not self._choice.uses_kernels(hidden.shape[0]):
            return self._modules.run(hidden, cos_sin, layout)
        self._layers.run(hidden, cos_sin, self._backend.planned)
        return hidden


def choose_executor(model: Decoder, backend: AttentionBackend) -> LayerExecutor:
    """The fastest executor for a loaded and packed model with this backend."""
    modules = ModuleExecutor(model, backend)
    if model.packed_layers is None or not isinstance(backend, CpuBackend):
        return modules
    return KernelExecutor(model.packed_layers, backend, model.gemm_choice, modules)
