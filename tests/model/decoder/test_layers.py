"""Gemms with weights packed for the CPU or not, against the plain formula in double precision; and the embedding."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model
from tests.model.helpers.linear_layers import (
    DTYPES,
    activation_dtype,
    assert_close,
    fill,
    layer_kernels,
    make_norm,
    random_rows,
)
from tests.model.helpers.quantized_rows import random_block_rows
from tokasaurus.checkpoint import read_model_info
from tokasaurus.checkpoint.spec import Activation, MLPSpec
from tokasaurus.model.cpu.gemm_choice import ALWAYS_KERNELS, GemmChoice
from tokasaurus.model.decoder.layers import (
    ACTIVATIONS,
    ActivatedLinear,
    FusedColumnLinear,
    Linear,
    OutputShard,
    VocabShard,
)
from tokasaurus.model.parallel.mesh import Mesh


@pytest.mark.parametrize("num_rows", [0, 1, 2, 63, 200])
@pytest.mark.parametrize("keep_weight", [False, True])
def test_a_gemm_packed_for_onednn_equals_the_formula(num_rows: int, keep_weight: bool) -> None:
    linear = Linear(48, 80, bias=True, dtype=torch.bfloat16)
    fill(linear)
    weight = linear.weight.detach().clone()
    linear.pack(None, keep_weight=keep_weight)
    x = random_rows(num_rows, 48, torch.bfloat16)
    assert_close(linear(x), x.double() @ weight.double().T + linear.bias.double())
    assert not keep_weight or torch.equal(linear.weight, weight)


def test_onednn_packs_nothing_if_the_processor_has_no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("needs the cpu support")

    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    linear = Linear(48, 80, bias=True, dtype=torch.bfloat16)
    fill(linear)
    weight = linear.weight.detach().clone()
    linear.pack(None)
    x = random_rows(5, 48, torch.bfloat16)
    torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, weight, linear.bias))


@examples(80)
@given(
    dtype=st.sampled_from(DTYPES),
    num_rows=st.integers(0, 40) | st.sampled_from([100, 600]),
    half_in_size=st.integers(1, 60),
    out_size=st.integers(1, 140),
    bias=st.booleans(),
)
def test_a_gemm_by_the_kernels_equals_the_formula(
    dtype: torch.dtype, num_rows: int, half_in_size: int, out_size: int, bias: bool
) -> None:
    linear = Linear(2 * half_in_size, out_size, bias, dtype)
    fill(linear)
    x = random_rows(num_rows, 2 * half_in_size, activation_dtype(dtype))
    expected = x.double() @ linear.weight.double().T + (0 if linear.bias is None else linear.bias.double())
    linear.pack(layer_kernels())
    assert linear.weight.numel() == 0, "one copy is kept"
    assert_close(linear(x), expected)


def test_strided_rows_of_a_wider_tensor_are_multiplied() -> None:
    linear = Linear(32, 64, bias=False, dtype=torch.bfloat16)
    fill(linear)
    wide = random_rows(7, 100, activation_dtype(torch.bfloat16))
    expected = wide[:, 10:42].double() @ linear.weight.double().T
    linear.pack(layer_kernels())
    assert_close(linear(wide[:, 10:42]), expected)


def test_all_row_blocks_of_a_large_gemm_are_multiplied() -> None:
    linear = Linear(1024, 40, bias=False, dtype=torch.bfloat16)
    fill(linear)
    x = random_rows(
        2 * (4 << 20) // 2048 + 100, 1024, activation_dtype(torch.bfloat16)
    )  # more than two blocks of kRowBlockBytes
    expected = torch.nn.functional.linear(x.float(), linear.weight.float()).double()
    linear.pack(layer_kernels())
    assert_close(linear(x), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 4, 5, 70])
def test_a_gemm_with_a_fused_norm_equals_the_gemm_of_normed_rows(num_rows: int, dtype: torch.dtype) -> None:
    linear, norm = Linear(72, 48, bias=False, dtype=dtype), make_norm(72, dtype)
    fill(linear)
    x = random_rows(num_rows, 72, activation_dtype(dtype))
    expected = norm(x).double() @ linear.weight.double().T
    linear.pack(layer_kernels())
    before = x.clone()
    result = linear(x, norm)
    assert_close(result, expected)
    assert torch.equal(x, before)
    assert torch.equal(result[-1:], linear(x[-1:], norm)), "a row's result does not depend on the others"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "num_rows"), [(16, 1), (96, 30), (100, 1), (100, 30)])
@pytest.mark.parametrize(("is_gated", "has_bias"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_an_activated_gemm_equals_torch(
    activation: Activation, is_gated: bool, has_bias: bool, num_rows: int, size: int, dtype: torch.dtype
) -> None:
    spec = MLPSpec(size, activation, is_gated, has_bias)
    linear, norm = ActivatedLinear(64, spec, 0, size, dtype), make_norm(64, dtype)
    fill(linear)
    linear.weight.mul_(0.3)
    x = random_rows(num_rows, 64, activation_dtype(dtype))
    plain = linear(x, norm)
    features = norm(x).double() @ linear.weight.double().T
    if linear.bias is not None:
        features += linear.bias.double()
    gates = features[:, :size]
    expected = ACTIVATIONS[activation](gates)
    if is_gated:
        expected = expected * features[:, size:]
    assert float(gates.min()) < -3
    assert float(gates.max()) > 3
    linear.pack(layer_kernels())
    packed = linear(x, norm)
    if x.dtype == torch.float32:
        assert_close(packed, expected)
        assert_close(plain, expected)
    else:
        # Both round the gate, the up and the activated gate: where the sums round alike, the results are equal.
        assert (packed == plain).float().mean() > 0.9
        assert float((packed.double() - expected).abs().max()) < 3 * 2**-8 * float(expected.abs().max())


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_nan_and_large_numbers_are_activated_as_by_torch(activation: Activation) -> None:
    numbers = torch.tensor([torch.nan, 1e18, -1e18, 3e4, -3e4])
    linear = ActivatedLinear(2, MLPSpec(5, activation, is_gated=False), 0, 5, torch.float32)
    linear.weight.copy_(torch.stack((numbers, torch.ones(5)), dim=1))
    linear.pack(layer_kernels())
    torch.testing.assert_close(linear(torch.ones(1, 2))[0], ACTIVATIONS[activation](numbers + 1), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_and_capped_logits_equal_torch_and_stay_nan(dtype: torch.dtype, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    info = read_model_info(tmp_path)
    info = replace(info, spec=replace(info.spec, logit_scale=0.3, logit_softcap=2.0))
    hidden, norm = random_rows(3, 64, activation_dtype(dtype)), make_norm(64, dtype)
    hidden[1, 5] = torch.nan
    found = []
    for kernels in (layer_kernels(), None):
        shard = VocabShard(info, Mesh(), dtype)
        fill(shard)
        if kernels is not None:
            shard.pack(kernels)
        found.append(shard.logits(hidden, norm))
    assert found[0][1].isnan().all()
    assert float(found[0][0].max()) > 1.9
    torch.testing.assert_close(*found, atol=1e-5 if dtype == torch.float32 else 0.02, rtol=0.0, equal_nan=True)


def test_silu_of_the_largest_gates_is_finite_and_right() -> None:
    linear = ActivatedLinear(2, MLPSpec(16), 0, 16, torch.float32)
    gates = torch.tensor([-1e30, -3e4, -100, -88, -87, -20, -1, -0.0, 0, 1, 20, 87, 88, 100, 3e4, 1e30])
    linear.weight.copy_(torch.stack((torch.cat((gates, torch.ones(16))), torch.zeros(32)), dim=1))
    linear.pack(layer_kernels())
    expected = torch.nn.functional.silu(gates.double())
    torch.testing.assert_close(linear(torch.tensor([[1.0, 1.0]]))[0].double(), expected, atol=1e-34, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_of_a_row_does_not_depend_on_the_number_of_rows(dtype: torch.dtype) -> None:
    """Row counts around one tile, and around the count from which bfloat16 weights are widened once for all tiles."""
    linear = Linear(72, 40, bias=True, dtype=dtype)
    fill(linear)
    linear.pack(layer_kernels())
    x = random_rows(200, 72, activation_dtype(dtype))
    together = linear(x)
    for num_rows in (1, 2, 5, 6, 7, 12, 13, 66, 67, 68, 143, 144, 145):
        assert torch.equal(linear(x[:num_rows]), together[:num_rows])
        assert torch.equal(linear(x[-num_rows:]), together[-num_rows:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 500])
def test_a_packed_embedding_returns_rows_of_its_weight_and_computes_logits(
    num_tokens: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, "llama", tied=True)
    shard = VocabShard(read_model_info(tmp_path), Mesh(), dtype)
    fill(shard)
    weight = shard.weight.detach().clone()
    shard.pack(layer_kernels())
    token_ids = torch.randint(VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(0))
    token_ids[: min(num_tokens, 1)] = VOCAB_SIZE - 1
    assert torch.equal(shard.embed(token_ids), weight[token_ids].to(activation_dtype(dtype)))
    norm, hidden = make_norm(64, dtype), random_rows(3, 64, activation_dtype(dtype))
    expected = torch.nn.functional.linear(norm(hidden), weight.to(hidden.dtype))
    torch.testing.assert_close(shard.logits(hidden, norm), expected, atol=0.06, rtol=0.01)


@pytest.mark.parametrize("choice", [ALWAYS_KERNELS, GemmChoice(2.0, 0.5), GemmChoice(0.5, 0.5)])
@pytest.mark.parametrize("num_blocks", [2, 1])
def test_blocks_in_place_of_rows_give_the_gemm_of_the_dequantised_weight(num_blocks: int, choice: GemmChoice) -> None:
    """Of a fused layer whose parts come one by one. Where one part is plain, all of the layer is."""
    outputs = [OutputShard("q", 64, 0, 64), OutputShard("k", 32, 0, 32)]
    parts = [random_block_rows("Q4_1", 64, 2), random_block_rows("Q8_0", 32, 2)]
    plain = torch.cat([part.dequantized() for part in parts])
    layer = FusedColumnLinear(64, outputs, bias=True, dtype=torch.float32)
    fill(layer)
    layer.weight.copy_(plain)
    shards = [shard for shard in layer.weight_shards("") if shard.source.endswith("weight")]
    for shard, part in list(zip(shards, parts, strict=True))[:num_blocks]:
        assert shard.target is not None
        assert shard.take_blocks is not None
        shard.target.fill_(torch.nan)
        shard.take_blocks(part)
    layer.pack(layer_kernels(), choice)
    assert (layer.packed is None) == choice.always_torch
    assert layer.packed is None or layer.packed.has_blocks == (num_blocks == 2)
    are_kept = num_blocks == 2 and not choice.always_torch
    assert layer.dequantised_types == ([] if are_kept else [part.type for part in parts[:num_blocks]])
    for num_rows in (5, 64):
        x = random_rows(num_rows, 64, torch.float32)
        assert_close(layer(x), x.double() @ plain.double().T + layer.bias.double())
