"""Damaged and hostile files of quantised weights: one line that names the tensor, before or while weights are read."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint.helpers.quantised_models import MXFP4, change_quantization, save_gpt_oss, save_quantised_model
from tests.checkpoint.helpers.quantised_weights import Format, quantise, random_mxfp4
from tests.model.helpers.greedy_decoding import load
from tokasaurus.checkpoint import CheckpointError
from tokasaurus.checkpoint.quantized.config import parse_quantization
from tokasaurus.model.decoder.tensor_files import open_files, read_shard

Tensors = dict[str, Tensor]
AWQ, GPTQ, ORDERED = Format("awq"), Format("gptq"), Format("gptq", has_order=True)
INT8 = Format("int-quantized", num_bits=8, group_size=None, is_symmetric=True)
TORCHAO = Format("torchao", num_bits=8, group_size=None, is_symmetric=True, scale_dtype=torch.float32)
PACKED, CHANNEL = Format("pack-quantized"), Format("pack-quantized", group_size=None)


def read(directory: Path, how: Format, tensors: Tensors) -> Tensor:
    """The weight `a.weight`."""
    path = directory / "model.safetensors"
    save_file({f"a.{part}": tensor.contiguous() for part, tensor in tensors.items()}, path)
    for file in open_files([path], parse_quantization({"quantization_config": how.config})):
        return read_shard(file, "a.weight", (slice(None), slice(None)))
    raise AssertionError("there is one file")


def put(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: value(tensors[name])}


def filled(value: float) -> Callable[[Tensor], Tensor]:
    """One number is replaced."""

    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed.view(-1)[-1] = value
        return changed

    return change


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {each: tensor for each, tensor in tensors.items() if each != name}


@pytest.mark.parametrize(
    ("how", "damage", "message"),
    [
        *((how, without("scales"), "its scales is missing") for how in (AWQ, GPTQ)),
        *((how, without("qzeros"), "its qzeros is missing") for how in (AWQ, GPTQ)),
        (INT8, without("weight_scale"), "its weight_scale is missing"),
        (TORCHAO, without("_weight_scale"), "its _weight_scale is missing"),
        (TORCHAO, put("_weight_qdata", lambda codes: codes.int()), "its _weight_qdata is I32"),
        (TORCHAO, put("_weight_scale", lambda scales: scales[:, 0]), "its _weight_scale is F32 [64], not"),
        (TORCHAO, put("_weight_scale", filled(torch.nan)), "scales that are not finite"),
        *(
            (PACKED, without(f"weight_{part}"), f"its weight_{part} is missing")
            for part in ("scale", "zero_point", "shape")
        ),
        (AWQ, put("qweight", lambda words: words.float()), "its qweight is F32"),
        (AWQ, put("qweight", lambda words: words[:0]), "its qweight has shape [0, 8]"),
        (GPTQ, put("qweight", lambda words: words[None]), "its qweight is I32 [1, 16, 64]"),
        (GPTQ, put("qweight", lambda words: words[:3]), "its 24 inputs are not a multiple of the group size 32"),
        (GPTQ, put("qweight", lambda words: words[:8]), "not F32 or F16 or BF16 [2, 64]"),
        (AWQ, put("scales", lambda scales: scales.T), "its scales is F16 [64, 4], not F32 or F16 or BF16 [4, 64]"),
        (AWQ, put("scales", lambda scales: scales.double()), "its scales is F64"),
        (AWQ, put("qzeros", lambda zeros: zeros[:, :-1]), "its qzeros is I32 [4, 7], not I32 [4, 8]"),
        (GPTQ, put("g_idx", lambda groups: groups[:-1]), "its group indices is I32 [127], not I32 or I64 [128]"),
        (PACKED, put("weight_zero_point", lambda zeros: zeros.short()), "its weight_zero_point is I16"),
        (PACKED, put("weight_shape", lambda shape: shape + 8), "its weight_shape is [72, 136]"),
        (PACKED, put("weight_shape", lambda shape: shape - (1 << 62)), "its weight_shape is"),
        (PACKED, put("weight_shape", lambda shape: shape[:1]), "its weight_shape is I64 [1]"),
        (PACKED, put("weight_shape", lambda shape: shape.float()), "its weight_shape is F32 [2]"),
        (CHANNEL, put("weight_shape", lambda shape: shape - torch.tensor([0, 8])), "its weight_shape is [64, 120]"),
        (INT8, put("weight_scale", lambda scales: scales[0]), "its weight_scale is F16 [1], not"),
        *((how, put("scales", filled(value)), "scales that are not finite") for how in (AWQ, GPTQ)
          for value in (torch.inf, torch.nan)),
        (INT8, put("weight_scale", filled(-torch.inf)), "scales that are not finite"),
        (
            PACKED,
            put("weight_scale", lambda scales: torch.full_like(scales, 3e38, dtype=torch.float32)),
            "numbers that are not finite",
        ),
        *((ORDERED, put("g_idx", filled(value)), "groups below 0 or from 4 on") for value in (-1, 4, 2**31 - 1)),
        (ORDERED, without("g_idx"), "its g_idx is missing"),
        (AWQ, lambda tensors: {**tensors, "weight": torch.zeros(64, 128)}, "both a.weight and a.qweight"),
    ],
)  # fmt: skip
def test_damage_of_a_weight_is_one_line(
    how: Format, damage: Callable[[Tensors], Tensors], message: str, tmp_path: Path
) -> None:
    stored, meant = quantise(torch.randn(64, 128), how)
    assert torch.equal(read(tmp_path, how, stored), meant)
    with pytest.raises(CheckpointError, match=r"a\.weight") as raised:
        read(tmp_path, how, damage(stored))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("scales"), "its scales is missing"),
        (put("blocks", lambda blocks: blocks.int()), "its blocks is I32 [2, 8, 2, 16]"),
        (put("blocks", lambda blocks: blocks[:, :, :, :8]), "its blocks is U8 [2, 8, 2, 8]"),
        (put("blocks", lambda blocks: blocks.flatten(2)), "its blocks is U8 [2, 8, 32]"),
        (put("blocks", lambda blocks: blocks[:0]), "its blocks is U8 [0, 8, 2, 16]"),
        (put("scales", lambda scales: scales[:, 1:]), "its scales is U8 [2, 7, 2], not U8 [2, 8, 2]"),
        (put("scales", lambda scales: scales.bfloat16()), "its scales is BF16"),
        *((put("scales", filled(exponent)), "scales that are not finite") for exponent in (253, 254, 255)),
        (lambda tensors: {**tensors, "": torch.zeros(2, 64, 8)}, "both a and a_blocks"),
    ],
)
def test_damage_of_experts_is_one_line(damage: Callable[[Tensors], Tensors], message: str, tmp_path: Path) -> None:
    stored, meant = random_mxfp4(2, 8, 64)

    def read_both(tensors: Tensors) -> tuple[Tensor, Tensor]:
        """As numbers, and as blocks."""
        path = tmp_path / "model.safetensors"
        save_file({f"a_{part}".removesuffix("_"): tensor.contiguous() for part, tensor in tensors.items()}, path)
        every = slice(None)
        for file in open_files([path], parse_quantization({"quantization_config": MXFP4})):
            parts = [file.shard_blocks("a", (slice(expert, expert + 1), every, every)) for expert in range(2)]
            blocks = [part.dequantized().T for part in parts if part is not None]
            return read_shard(file, "a", (every, every, every)), torch.stack(blocks)
        raise AssertionError("there is one file")

    for found in (read_both(stored), read_both(put("scales", filled(252))(stored))):
        assert torch.equal(*found)
    assert torch.equal(read_both(stored)[0], meant)
    with pytest.raises(CheckpointError) as raised:
        read_both(damage(stored))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_experts_that_do_not_fit_the_model_are_named(tmp_path: Path) -> None:
    save_gpt_oss(tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.experts.down_proj"
    tensors = load_file(path)
    for changed, config, message in (
        ({f"{name}_blocks": None}, MXFP4, f"has tensor {name}_scales, which this model has no place for"),
        ({f"{name}_{part}": None for part in ("blocks", "scales")}, MXFP4, f"the checkpoint lacks tensor {name}"),
        ({f"{name}_scales": None}, MXFP4, f"tensor {name} is quantised: its scales is missing"),
        ({}, {"quant_method": "fp4"}, "quant_method 'fp4' is not supported"),
        ({}, Format("awq").config, "lacks tensor model.layers.0.mlp.experts"),
        (
            {f"{name}_{part}": tensors[f"{name}_{part}"][:, :-32] for part in ("blocks", "scales")},
            MXFP4,
            f"tensor {name} has shape (4, 64, 64), but config.json makes it (4, 64, 96)",
        ),
    ):
        both: dict[str, Tensor | None] = {**tensors, **changed}
        save_file({each: tensor.contiguous() for each, tensor in both.items() if tensor is not None}, path)
        change_quantization(tmp_path, config)
        with pytest.raises(CheckpointError) as raised:
            load(tmp_path)
        assert message in str(raised.value)


def test_tensors_that_do_not_fit_the_configuration_are_named(tmp_path: Path) -> None:
    save_quantised_model(tmp_path, "llama", GPTQ)
    for config, message in (
        (None, "the checkpoint lacks tensor model.layers.0.self_attn.q_proj.weight"),
        (AWQ.config, "is quantised: its scales is"),
        (PACKED.config, "the checkpoint lacks tensor model.layers.0.self_attn.q_proj.weight"),
        (Format("gptq", group_size=64).config, "is quantised: its scales is"),
        (Format("gptq", num_bits=8).config, "is quantised: its"),
    ):
        change_quantization(tmp_path, config)
        with pytest.raises(CheckpointError) as raised:
            load(tmp_path)
        assert message in str(raised.value)


def test_quantised_tensors_where_they_may_not_be_are_refused(tmp_path: Path) -> None:
    quantization = parse_quantization({"quantization_config": INT8.config})
    path = tmp_path / "model.safetensors"
    codes, scale = torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, 1)
    for module, message in (
        ("model.embed_tokens", "model.embed_tokens.weight is quantised: a quantised embedding is not supported"),
        ("lm_head", "lm_head.weight is quantised: config.json says that it is not"),
    ):
        save_file({f"{module}.weight": codes, f"{module}.weight_scale": scale}, path)
        with pytest.raises(CheckpointError, match=message):
            next(iter(open_files([path], quantization)))
    save_file({"a.weight": codes.short(), "a.weight_scale": scale}, path)
    with pytest.raises(CheckpointError, match=r"a\.weight has dtype I16, which is not of int-quantized"):
        next(iter(open_files([path], quantization)))


def test_a_scale_of_the_activations_is_a_surplus_tensor(tmp_path: Path) -> None:
    save_quantised_model(tmp_path, "llama", INT8)
    extra = tmp_path / "model-00001-of-00002.safetensors"
    save_file({**load_file(extra), "model.layers.0.mlp.up_proj.input_scale": torch.ones(1)}, extra)
    with pytest.raises(CheckpointError, match=r"has tensor model\.layers\.0\.mlp\.up_proj\.input_scale, which"):
        load(tmp_path)
