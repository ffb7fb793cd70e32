"""Kernels of layers with states, of every instruction set, beside plain torch in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tokasaurus.checkpoint.spec import GatedDeltaSpec, Mamba2Spec, ShortConvSpec, StateSpec
from tokasaurus.model.cpu.layer_executor import LayerKernels
from tokasaurus.model.cpu.states import MAX_CONV_SIZE, PackedState
from tokasaurus.model.decoder.state_rows import ZEROS, Segments
from tokasaurus.model.decoder.states import StateLayer, make_state_layer
from tokasaurus.model.decoder.weights import allocate_parameters
from tokasaurus.model.parallel.mesh import Mesh

CPU = torch.device("cpu")
MAMBA = Mamba2Spec(num_heads=6, head_dim=24, state_size=20, num_groups=2, conv_size=4, eps=1e-5, min_step=0.3)
SPECS: list[StateSpec] = [
    GatedDeltaSpec(num_key_heads=2, num_value_heads=6, key_dim=16, value_dim=128, conv_size=4, eps=1e-6),
    GatedDeltaSpec(num_key_heads=1, num_value_heads=1, key_dim=128, value_dim=128, conv_size=2, eps=1e-6),
    GatedDeltaSpec(num_key_heads=3, num_value_heads=3, key_dim=5, value_dim=75, conv_size=MAX_CONV_SIZE, eps=1e-6),
    ShortConvSpec(width=70, conv_size=3),
    ShortConvSpec(width=640, conv_size=5, has_bias=True),
    MAMBA,
    replace(MAMBA, num_groups=1, head_dim=64, state_size=128, has_conv_bias=False, scales=(0.5, 2.0, 0.7, 1.5, 3.0)),
    replace(MAMBA, has_norm=False, scales=(0.5, 2.0, 0.7, 1.5, 3.0)),
    replace(MAMBA, norm_before_gate=True, head_dim=7),
]
NUM_ROWS = 9


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


DECODE = Segments(3, int32(0, 1, 2), int32(1, 1, 1), int32(4, ZEROS, 7), int32(4, 2, 5), int32(0, 1, 2, 3))
MIXED = Segments(
    2,
    int32(0, 1, 2, 15, 15, 16, 85),
    int32(1, 1, 13, 0, 1, 69, 2),
    int32(1, ZEROS, 3, 6, 5, ZEROS, 8),
    int32(1, 2, 6, 3, 5, 8, 4),
    int32(0, 1, 2, 4, 5, 7),
)
"""Decode rows; a prompt with a snapshot at its end; one token of a prompt; a prompt with a snapshot within."""


def random_layer(spec: StateSpec, dtype: torch.dtype) -> StateLayer:
    with torch.device("meta"):
        layer = make_state_layer(spec, 32, Mesh(), dtype)
    allocate_parameters(layer, CPU)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.normal_(1.0 if name.endswith(("norm", "D")) else 0.0, 0.5)
    return layer


def in_float64(layer: StateLayer, features: Tensor, memory: Tensor, segments: Segments) -> Tensor:
    """By plain torch, token by token; changes the memory."""
    features, whole = features.double(), layer.double()
    was, Tensor.float = Tensor.float, Tensor.double  # type: ignore[method-assign, assignment]
    try:
        out = torch.zeros(len(features), 0, dtype=torch.float64)
        rows: dict[int, Tensor] = {}
        for start, count, source, target in zip(*(array.tolist() for array in segments.arrays[:4]), strict=True):
            state = torch.zeros_like(memory[0]) if source == ZEROS else memory[source].clone()
            own = torch.stack((memory[0], state))
            for token in range(start, start + count):
                step = Segments(1, int32(0), int32(1), int32(1), int32(1), int32(0, 1))
                rows[token] = whole.mix_by_torch(features[token : token + 1], own, step)[0]
            memory[target] = own[1]
        width = len(next(iter(rows.values())))
        out = torch.zeros(len(features), width, dtype=torch.float64)
        for token, row in rows.items():
            out[token] = row
        return out
    finally:
        Tensor.float = was  # type: ignore[method-assign]
        layer.float()


@pytest.mark.parametrize("segments", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{type(spec).__name__}{SPECS.index(spec)}")
def test_kernels_equal_float64(spec: StateSpec, dtype: torch.dtype, segments: Segments, kernels: LayerKernels) -> None:
    layer = random_layer(spec, torch.float32)
    num_tokens = int((segments.starts + segments.num_tokens).max())
    features = torch.randn(num_tokens + 3, sum(spec.output_sizes.values())).to(dtype)  # 3 of padding
    memory = 0.3 * torch.randn(NUM_ROWS, spec.num_numbers(1))
    expected_memory = memory.double()
    expected = in_float64(layer, features, expected_memory, segments)
    layer.use_kernels(kernels.states)
    found = layer.mix(features, memory, segments)
    assert found.dtype == dtype
    scale = float(expected.abs().max())
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), expected, atol=tolerance * scale, rtol=tolerance)
    used = spec.num_recurrent(1) + (spec.conv_size - 1) * spec.num_channels(1)
    own, oracle = memory.double()[:, :used], expected_memory[:, :used]
    torch.testing.assert_close(own, oracle, atol=2e-5 * float(oracle.abs().max()), rtol=2e-5)


@pytest.mark.parametrize("bias", [-18.0, -12.0, -6.0, -2.5])
def test_small_steps_keep_their_digits(bias: float, kernels: LayerKernels) -> None:
    """Of many of them a state is made. The rate is as large as shows one."""
    spec = SPECS[0]
    layer = random_layer(spec, torch.float32)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("dt_bias"):
                parameter.fill_(bias)
            elif name.endswith("A_log"):
                parameter.fill_(-1.0 - bias)
    features = torch.zeros(3, sum(spec.output_sizes.values()))
    memory = 1 + torch.rand(NUM_ROWS, spec.num_numbers(1))
    expected = memory.double()
    in_float64(layer, features, expected, DECODE)
    layer.use_kernels(kernels.states)
    layer.mix(features, memory, DECODE)
    decayed = memory.double()[4, : spec.num_recurrent(1)], expected[4, : spec.num_recurrent(1)]
    torch.testing.assert_close(*decayed, atol=0, rtol=1e-5)


def test_what_the_kernels_do_not_compute_is_left_to_torch() -> None:
    assert not PackedState.computes(ShortConvSpec(32, MAX_CONV_SIZE + 1), 1)
    assert not PackedState.computes(replace(MAMBA, num_groups=1), 2)  # the norm is over the ranks' numbers together
    assert PackedState.computes(MAMBA, 2)


def test_new_weights_reach_the_kernels(kernels: LayerKernels) -> None:
    layer = random_layer(SPECS[0], torch.float32)
    layer.use_kernels(kernels.states)
    features, memory = torch.randn(3, layer.inputs.weight.shape[0]), torch.zeros(NUM_ROWS, SPECS[0].num_numbers(1))
    before = layer.mix(features, memory.clone(), DECODE)
    for shard in layer.weight_shards("state."):
        if shard.source == "state.A_log":
            assert shard.write is not None
            shard.write(torch.full(shard.shape, 1.5))
    after = layer.mix(features, memory.clone(), DECODE)
    assert torch.equal(before, after)  # a state of zeros does not decay
    memory += 1
    assert not torch.equal(layer.mix(features, memory.clone(), DECODE), before)
    torch.testing.assert_close(
        layer.mix(features, memory.clone(), DECODE), layer.mix_by_torch(features, memory, DECODE), atol=1e-4, rtol=1e-4
    )
