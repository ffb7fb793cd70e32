"""Which matrix products are faster on this processor: those of the kernels, or torch's. Found by timing both, once."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from tokasaurus.checkpoint import cache_directory
from tokasaurus.model.kernels.layer_kernels import LayerKernels, PackedWeights
from tokasaurus.model.kernels.library import Kernels

MANY_ROWS = 32
"""From how many rows on the second of the two choices counts."""

_FEW_TIMED, _MANY_TIMED = 1, 64
_NUM_MATRICES = 4
_MATRIX_BYTES = 16 << 20
"""Of each matrix at most. All of them together are more than most processors keep in their caches."""

_NUM_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class ProductChoice:
    """few_speedup, many_speedup: torch's time over the kernels', for few rows and for many."""

    few_speedup: float
    many_speedup: float

    def uses_kernels(self, num_rows: int) -> bool:
        return (self.few_speedup if num_rows < MANY_ROWS else self.many_speedup) >= 1

    @property
    def always_kernels(self) -> bool:
        return min(self.few_speedup, self.many_speedup) >= 1

    @property
    def always_torch(self) -> bool:
        return max(self.few_speedup, self.many_speedup) < 1

    def describe(self) -> str:
        """For the user."""
        return f"few rows by {_winner(self.few_speedup)}, from {MANY_ROWS} rows on by {_winner(self.many_speedup)}"


ALWAYS_KERNELS = ProductChoice(few_speedup=1.0, many_speedup=1.0)


def choose_products(kernels: Kernels, hidden_size: int, dtype: torch.dtype) -> ProductChoice:
    """The choice for weights of `dtype`, from the cache if this machine has made it before; takes half a second else.
    Torch must have the number of threads already that forwards will have."""
    key = f"{kernels.path.parent.name}-{torch.__version__}-{hidden_size}-{str(dtype)[6:]}-{torch.get_num_threads()}"
    file = cache_directory() / "products" / f"{key}.json"
    try:
        return ProductChoice(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        choice = _measure(kernels, hidden_size, dtype)
    _keep(file, choice)
    return choice


def torch_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x [T, in] -> [T, out] by the fastest way that torch has on a CPU; weight [out, in] of x's type. bfloat16 weights
    are copied into oneDNN's layout where that multiplies bfloat16; otherwise the weight is kept as it is."""
    if weight.dtype == torch.bfloat16 and _onednn_multiplies_bfloat16():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_OF_LAYOUT)

        def multiply(x: Tensor) -> Tensor:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
            return out

        return multiply
    return lambda x: torch.nn.functional.linear(x, weight, bias)


_ROWS_OF_LAYOUT = 64
"""Rows of x that oneDNN's layout is chosen for; measured as fast as any other for 1 to 512."""


def _onednn_multiplies_bfloat16() -> bool:
    """It refuses to pack where it does not."""
    return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _measure(kernels: Kernels, hidden_size: int, dtype: torch.dtype) -> ProductChoice:
    activation_dtype = kernels.activation_dtype(dtype)
    out_size = max(1, _MATRIX_BYTES // (hidden_size * 4))
    layer_kernels = LayerKernels(kernels)
    ours: list[Callable[[Tensor], Tensor]] = []
    theirs: list[Callable[[Tensor], Tensor]] = []
    for _ in range(_NUM_MATRICES):
        weight = torch.full((out_size, hidden_size), 0.01, dtype=dtype)
        ours.append(PackedWeights(layer_kernels, weight, None).multiply)
        theirs.append(torch_product(weight.to(activation_dtype), None))

    def speedup(num_rows: int) -> float:
        x = torch.ones((num_rows, hidden_size), dtype=activation_dtype)
        shortest = [float("inf"), float("inf")]
        for _ in range(_NUM_ROUNDS):
            for index, products in enumerate((ours, theirs)):
                started = time.perf_counter()
                for product in products:
                    product(x)
                shortest[index] = min(shortest[index], time.perf_counter() - started)
        return round(shortest[1] / shortest[0], 3)

    with torch.inference_mode():
        return ProductChoice(speedup(_FEW_TIMED), speedup(_MANY_TIMED))


def _keep(file: Path, choice: ProductChoice) -> None:
    """Without a place to write, the next start measures again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(asdict(choice)))
        unfinished.replace(file)
    except OSError:
        return


def _winner(speedup: float) -> str:
    return f"kernels ({speedup:.2f} x torch)" if speedup >= 1 else f"torch ({1 / speedup:.2f} x kernels)"
