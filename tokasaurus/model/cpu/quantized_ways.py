"""The two ways to multiply by quantised weights, compared on a model's own weights when they are loaded."""

import copy
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokasaurus.model.cpu.bindings import ELEMENT_CODES, PackedWeightsStruct
from tokasaurus.model.cpu.layer_executor import PackedWeights

FEW_ROWS, MANY_ROWS = 1, 64
_NUM_ROUNDS = 3
_MAX_BYTES = 32 << 20
"""Of the weights that one row is multiplied by: so that they come from memory, as in a step."""
_MAX_FIRST_BYTES = 64 << 20
"""Of a single weight: MANY_ROWS of an LM head would take seconds."""
_NUM_OUTPUTS = 256
"""Outputs whose error is measured."""
_INT8_UNIT = 32
"""Products in integers need a multiple of so many inputs: kInputBlock of int8_tile.h."""


@dataclass(frozen=True, slots=True)
class Ways:
    """Errors are root mean squares over those of the exact outputs, which are summed in float64."""

    exact_error: float
    int8_error: float
    few_time: float
    """Time of products in integers of 8 bits over that of exact ones, with FEW_ROWS."""
    many_time: float
    """The same with MANY_ROWS."""

    def describe(self, block_type: str) -> str:
        """As text for the user."""
        times = f"{self.few_time:.2f} of the time with {FEW_ROWS} row, {self.many_time:.2f} with {MANY_ROWS}"
        return f"{block_type}, {times}, error {self.int8_error:.0e} (exact: {self.exact_error:.0e})"


def ways_by_type(weights: Iterable[PackedWeights]) -> dict[str, Ways]:
    """weights: of a model. Types that only mixed, gated, activated or very large weights have are left out."""
    by_type = defaultdict[str, list[PackedWeights]](list)
    for packed in sorted(weights, key=lambda each: each.num_bytes):
        block_types, is_plain_product = packed.block_types, not packed.struct.is_gated and not packed.struct.activation
        is_small = packed.num_bytes <= _MAX_FIRST_BYTES
        if len(block_types) == 1 and is_plain_product and is_small and packed.in_size % _INT8_UNIT == 0:
            own = by_type[next(iter(block_types))]
            if not own or (packed.in_size == own[0].in_size and sum(each.num_bytes for each in own) < _MAX_BYTES):
                own.append(packed)
    return {block_type: _compare(own) for block_type, own in sorted(by_type.items())}


@torch.inference_mode()
def _compare(weights: Sequence[PackedWeights]) -> Ways:
    """weights: of one type and number of inputs."""
    by_way = {is_int8: [_changed(packed, is_int8=is_int8) for packed in weights] for is_int8 in (False, True)}
    first, generator = weights[0], torch.Generator().manual_seed(0)
    x = torch.randn((MANY_ROWS, first.in_size), generator=generator).to(first.activation_dtype)
    indices = torch.arange(min(_NUM_OUTPUTS, first.out_size))
    unrounded = _changed(first, weight_type=ELEMENT_CODES[torch.float32])
    unrounded.activation_dtype = torch.float32
    expected = x[:FEW_ROWS].double() @ unrounded.rows(indices).double().T
    errors, times = list[float](), list[float]()
    for ways in by_way.values():
        bias = ways[0].multiply(torch.zeros_like(x[:FEW_ROWS]))
        found = (ways[0].multiply(x[:FEW_ROWS]).double() - bias.double())[:, : len(indices)]
        errors.append(float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt()))
    for num_rows, num_weights in ((FEW_ROWS, len(weights)), (MANY_ROWS, 1)):
        exact, int8 = (
            min(_seconds(ways[:num_weights], x[:num_rows]) for _ in range(_NUM_ROUNDS)) for ways in by_way.values()
        )
        times.append(int8 / exact)
    return Ways(errors[0], errors[1], times[0], times[1])


def _changed(packed: PackedWeights, **fields: int) -> PackedWeights:
    """The same weights, with other fields of what the kernels read."""
    changed = copy.copy(packed)
    changed.struct = PackedWeightsStruct.from_buffer_copy(packed.struct)
    for name, value in fields.items():
        setattr(changed.struct, name, value)
    return changed


def _seconds(weights: Sequence[PackedWeights], x: Tensor) -> float:
    started = time.perf_counter()
    for packed in weights:
        packed.multiply(x)
    return time.perf_counter() - started
