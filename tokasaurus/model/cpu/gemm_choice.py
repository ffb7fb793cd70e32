"""Choose between the gemms of the kernels and of torch on this processor, by timing both once."""

import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from tokasaurus.checkpoint import CheckpointError, ModelInfo, cache_directory
from tokasaurus.checkpoint.cache import build_once, cache_key
from tokasaurus.checkpoint.spec import MLPSpec
from tokasaurus.model.cpu.bindings import Kernels
from tokasaurus.model.cpu.build import LibraryUnavailable, processor_features
from tokasaurus.model.cpu.layer_executor import LayerKernels, PackedWeights

MANY_ROWS = 32
"""Number of rows from which the choice for many rows applies; below, the choice for few rows."""

_FILE_NAME = "choice.json"

_FEW_TIMED, _MANY_TIMED = 1, 64
"""Rows of the timed gemms."""

_MATRIX_BYTES = 16 << 20
"""Largest size of a timed matrix, counted in float32."""

_ALL_BYTES = 64 << 20
"""Least total size of the timed matrices, counted in float32: larger than most processors' caches."""

_NUM_ROUNDS = 5

_MIN_TORCH_SPEEDUP = 1.15
"""Least speedup for which torch's gemms are used. A smaller one may be noise: server and manager start meanwhile."""

_TORCH_SETTINGS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")
"""Environment variables that restrict torch to an instruction set."""


@dataclass(frozen=True, slots=True)
class GemmChoice:
    """Whether the kernels or torch compute gemms, for few rows and for many rows."""

    few_speedup: float
    """Torch's time divided by the kernels' time, for few rows."""

    many_speedup: float
    """Torch's time divided by the kernels' time, for many rows."""

    may_mix: bool = True
    """Weights may be kept in both layouts, so that the two choices may differ."""

    def uses_kernels(self, num_rows: int) -> bool:
        return self._few_by_kernels if num_rows < MANY_ROWS else self._many_by_kernels

    @property
    def always_kernels(self) -> bool:
        return self._few_by_kernels and self._many_by_kernels

    @property
    def always_torch(self) -> bool:
        return not self._few_by_kernels and not self._many_by_kernels

    def describe(self) -> str:
        """The choice as text for the user."""
        few, many = _winner(self._few_by_kernels, self.few_speedup), _winner(self._many_by_kernels, self.many_speedup)
        return f"few rows by {few}, from {MANY_ROWS} rows on by {many}"

    @property
    def _few_by_kernels(self) -> bool:
        return self._is_by_kernels(self.few_speedup, self.many_speedup)

    @property
    def _many_by_kernels(self) -> bool:
        return self._is_by_kernels(self.many_speedup, self.few_speedup)

    def _is_by_kernels(self, speedup: float, other: float) -> bool:
        """Without mixing, torch must be faster for both few and many rows."""
        return (speedup if self.may_mix else max(speedup, other)) * _MIN_TORCH_SPEEDUP > 1


ALWAYS_KERNELS = GemmChoice(few_speedup=1.0, many_speedup=1.0)


def choose_gemm(kernels: Kernels, info: ModelInfo, dtype: torch.dtype) -> GemmChoice:
    """The choice for weights of `dtype`, from the cache if this machine has measured it before; else it takes a second.

    Precondition: torch already has the number of threads that forwards will use.
    """
    shapes = _layer_shapes(info)

    def measure(directory: Path) -> None:
        (directory / _FILE_NAME).write_text(json.dumps(asdict(_measure(kernels, shapes, dtype))))

    try:
        directory = build_once(cache_directory() / "gemm" / _key(kernels, info, dtype), measure)
        return GemmChoice(**json.loads((directory / _FILE_NAME).read_text()))
    # There is no cache key, the cache cannot be written, or it has another version's fields.
    except (LibraryUnavailable, CheckpointError, OSError, ValueError, TypeError):
        return _measure(kernels, shapes, dtype)


class TorchGemm:
    """x [T, in] -> [T, out], the fastest that torch has on a CPU; weight [out, in] has x's dtype.

    The weight is copied into oneDNN's layout if oneDNN multiplies its dtype; otherwise it is kept as it is. With AVX2
    and float32, oneDNN's layout was measured twice as fast as `linear` at 8 rows, 1.2 times as fast at 64.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._has_own_layout = _onednn_multiplies(weight.dtype)
        self._weight = self._reordered(weight) if self._has_own_layout else weight
        self._bias = bias
        self._size = weight.shape, weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        if not self._has_own_layout:
            return torch.nn.functional.linear(x, self._weight, self._bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out

    def write(self, first_row: int, rows: Tensor) -> None:
        """Replace the weight's rows from `first_row` on. rows [n, in]. For a moment the weight exists twice."""
        plain = self._weight.to_dense() if self._has_own_layout else self._weight
        plain[first_row : first_row + len(rows)] = rows
        if self._has_own_layout:
            self._weight = self._reordered(plain)

    def write_bias(self, first: int, values: Tensor) -> None:
        """Replace the bias from output `first` on. values [n]."""
        assert self._bias is not None
        self._bias[first : first + len(values)] = values

    def give_back(self) -> None:
        """Return the weight's memory to the system, until `take_again`."""
        self._weight = torch.empty(0, dtype=self._weight.dtype)

    def take_again(self) -> None:
        """The weight is zero."""
        shape, dtype = self._size
        weight = torch.zeros(shape, dtype=dtype)
        self._weight = self._reordered(weight) if self._has_own_layout else weight

    @staticmethod
    def _reordered(weight: Tensor) -> Tensor:
        reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_OF_LAYOUT)
        return reordered


_ROWS_OF_LAYOUT = 64
"""Number of rows of x for which oneDNN chooses its layout; measured to be as fast as any other for 1 to 512 rows."""


def _onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this dtype; packing bfloat16 fails where it does not."""
    if not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _key(kernels: Kernels, info: ModelInfo, dtype: torch.dtype) -> str:
    """A cache key of all that the choice depends on: library, processor, torch and its settings, gemm shapes, dtype."""
    settings = [os.environ.get(name, "") for name in _TORCH_SETTINGS]
    parts = (*kernels.path.parts[-2:], *processor_features(), torch.__version__, *settings, str(_layer_shapes(info)))
    return f"{str(dtype)[6:]}-{torch.get_num_threads()}-{cache_key(*parts)}"


def _layer_shapes(info: ModelInfo) -> list[tuple[int, int]]:
    """(in, out) of the gemms of one layer, but for experts: those are always the kernels'."""
    query_size, kv_size = info.num_heads * info.head_dim, info.num_kv_heads * info.head_dim
    shapes = [(info.hidden_size, query_size + 2 * kv_size), (query_size, info.hidden_size)]
    widths = [layer.mlp.width for layer in info.spec.layers if isinstance(layer.mlp, MLPSpec)]
    if widths:
        shapes += [(info.hidden_size, 2 * max(widths)), (max(widths), info.hidden_size)]
    return shapes


def _measure(kernels: Kernels, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> GemmChoice:
    """Time both on gemms of these shapes, (in, out) each."""
    activation_dtype = kernels.activation_dtype(dtype)
    layer_kernels = LayerKernels(kernels)
    in_sizes: list[int] = []
    kernel_gemms: list[Callable[[Tensor], Tensor]] = []
    torch_gemms: list[Callable[[Tensor], Tensor]] = []
    num_bytes = 0
    for in_size, out_size in itertools.cycle(shapes):
        out_size = min(out_size, max(1, _MATRIX_BYTES // (in_size * 4)))
        weight = torch.full((out_size, in_size), 0.01, dtype=dtype)
        in_sizes.append(in_size)
        kernel_gemms.append(PackedWeights(layer_kernels, weight, None).multiply)
        torch_gemms.append(TorchGemm(weight.to(activation_dtype), None))
        num_bytes += weight.numel() * 4
        if num_bytes >= _ALL_BYTES:
            break

    def speedup(num_rows: int) -> float:
        rows = [torch.ones((num_rows, in_size), dtype=activation_dtype) for in_size in in_sizes]
        shortest = [float("inf"), float("inf")]
        for _ in range(_NUM_ROUNDS):
            for index, gemms in enumerate((kernel_gemms, torch_gemms)):
                started = time.perf_counter()
                for gemm, x in zip(gemms, rows, strict=True):
                    gemm(x)
                shortest[index] = min(shortest[index], time.perf_counter() - started)
        return round(shortest[1] / shortest[0], 3)

    with torch.inference_mode():
        # No mixing where the kernels widen weights: torch would need a second copy of the weights, twice as large.
        return GemmChoice(speedup(_FEW_TIMED), speedup(_MANY_TIMED), may_mix=activation_dtype == dtype)


def _winner(is_by_kernels: bool, speedup: float) -> str:
    return f"kernels ({speedup:.2f} x torch)" if is_by_kernels else f"torch ({1 / speedup:.2f} x kernels)"
