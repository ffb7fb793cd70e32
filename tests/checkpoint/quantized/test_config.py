"""What config.json says of quantised weights: each supported form, and one line that names every other one."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.helpers.configs import BASE, write
from tokasaurus.checkpoint import CheckpointError, read_model_info
from tokasaurus.checkpoint.info import read_config
from tokasaurus.checkpoint.quantized.config import Layout, Quantization

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed(
    weights: dict[str, Any] | None = None, group: dict[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {**WEIGHTS, **(weights or {})}, "input_activations": None}
    shared = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"]}
    return {**shared, "config_groups": {"group_0": {**scheme, **(group or {})}}, **fields}


W8A8 = "Int8DynamicActivationInt8WeightConfig"


def per(kind: str, **fields: Any) -> dict[str, Any]:
    """A granularity of torchao."""
    return {"_type": kind, "_version": 1, "_data": {"dim": -1, **fields} if kind == "PerRow" else fields}


def torchao(kind: object, data: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    of_activations = {"act_mapping_type": {"_data": "SYMMETRIC", "_type": "MappingType"}, "reduce_range": False}
    known = {"granularity": per("PerRow"), **(of_activations if kind == W8A8 else {"group_size": None})}
    default = {"_type": kind, "_version": 2, "_data": {**known, **(data or {})}, **fields}
    return {"quant_method": "torchao", "quant_type": {"default": default}, "modules_to_not_convert": None}


GROUPED = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (AWQ, Quantization(Layout.AWQ, 4, 128, has_zeros=True)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, Quantization(Layout.AWQ, 4, 64, has_zeros=True)),
        (
            {**AWQ, "version": "GEMM", "modules_to_not_convert": ["lm_head"]},
            Quantization(Layout.AWQ, 4, 128, has_zeros=True, ignored=frozenset({"lm_head"})),
        ),
        (GPTQ, Quantization(Layout.GPTQ, 4, 128, has_zeros=True, stored_zero_offset=1)),
        (
            {**GPTQ, "checkpoint_format": "gptq_v2", "bits": 8, "group_size": -1, "dynamic": None},
            Quantization(Layout.GPTQ, 8, None, has_zeros=True),
        ),
        (
            {**GPTQ, "format": "gptq_v2", "desc_act": True},
            Quantization(Layout.GPTQ, 4, 128, has_zeros=True, has_order=True),
        ),
        ({"quant_method": "mxfp4", "modules_to_not_convert": None}, Quantization(Layout.MXFP4, 4, 32)),
        (torchao("Int8WeightOnlyConfig"), Quantization(Layout.TORCHAO, 8, None)),
        (
            torchao("Int8WeightOnlyConfig", {"granularity": per("PerTensor")}),
            Quantization(Layout.TORCHAO, 8, None, is_per_tensor=True),
        ),
        (
            {**torchao("Int8WeightOnlyConfig", {"granularity": per("PerGroup", group_size=64)})},
            Quantization(Layout.TORCHAO, 8, 64),
        ),
        (
            {**torchao(W8A8), "modules_to_not_convert": ["lm_head"]},
            Quantization(Layout.TORCHAO, 8, None, quantizes_activations=True, ignored=frozenset({"lm_head"})),
        ),
        (
            compressed(group={"input_activations": ACTIVATIONS}),
            Quantization(Layout.INT8, 8, None, quantizes_activations=True, ignored=frozenset({"lm_head"})),
        ),
        (
            compressed({"strategy": "tensor"}, ignore=["lm_head", "re:.*router"], kv_cache_scheme=None),
            Quantization(Layout.INT8, 8, None, is_per_tensor=True, ignored=frozenset({"lm_head"})),
        ),
        (
            compressed(GROUPED, format="pack-quantized", ignore=[], quantization_status="compressed"),
            Quantization(Layout.PACKED, 4, 32, has_zeros=True),
        ),
        *(
            (
                compressed({**GROUPED, "actorder": order}, format="pack-quantized", ignore=None),
                Quantization(Layout.PACKED, 4, 32, has_zeros=True, has_order=order not in ("weight", "static")),
            )
            for order in ("group", "dynamic", True, "weight", "static")
        ),
        (
            compressed(group={"format": "int-quantized"}, format="mixed-precision", ignore=None),
            Quantization(Layout.INT8, 8, None),
        ),
    ],
)
def test_each_supported_form_is_read(fields: dict[str, Any], expected: Quantization, tmp_path: Path) -> None:
    for key in ("quantization_config", "compression_config"):
        info = read_model_info(write(tmp_path, {"model_type": "llama", **BASE, key: fields}))
        assert info.quantization == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("awq", "must be an object"),
        ([1], "must be an object"),
        ({}, None),
        ({"bits": 4}, "quant_method None"),
        *(
            ({"quant_method": method}, f"quant_method '{method}' is not supported; supported are compressed-tensors")
            for method in ("fp8", "bitsandbytes", "hqq", "quark", "modelopt", "marlin", "eetq", "fbgemm_fp8")
        ),
        ({"quant_method": ["awq"]}, "quant_method"),
        ({**AWQ, "version": "gemv"}, "version 'gemv'"),
        ({**AWQ, "version": 3}, "version 3"),
        ({**AWQ, "bits": 3}, "bits 3"),
        ({**AWQ, "bits": True}, "bits True"),
        ({**AWQ, "bits": 4.0}, "bits 4.0"),
        ({**AWQ, "group_size": 1 << 70}, "group_size"),
        ({**AWQ, "group_size": -1}, "group_size -1"),
        ({**AWQ, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({**AWQ, "modules_to_not_convert": [[]]}, "modules_to_not_convert"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({**GPTQ, "bits": 2}, "bits 2"),
        ({**GPTQ, "bits": None}, "bits None"),
        ({**GPTQ, "group_size": 48}, "group_size 48"),
        ({**GPTQ, "group_size": [128]}, "group_size"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({**GPTQ, "format": "bitblas"}, "format 'bitblas'"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format"),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic"),
        ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype 'int16'"),
        (
            torchao("Int4WeightOnlyConfig"),
            "_type 'Int4WeightOnlyConfig' is not supported; supported are 'Int8WeightOnly",
        ),
        (torchao(["Int8WeightOnlyConfig"]), "_type ["),
        (torchao("Int8WeightOnlyConfig", _version=1), "_version 1"),
        (torchao("Int8WeightOnlyConfig", {"group_size": 32}), "group_size 32"),
        (torchao("Int8WeightOnlyConfig", {"granularity": per("PerBlock")}), "Int8WeightOnlyConfig: _type 'PerBlock'"),
        (torchao("Int8WeightOnlyConfig", {"granularity": per("PerRow", dim=0)}), "dim 0"),
        (torchao("Int8WeightOnlyConfig", {"granularity": per("PerGroup", group_size=16)}), "group_size 16"),
        (torchao("Int8WeightOnlyConfig", {"granularity": [per("PerRow")] * 2}), "granularity must be an object"),
        (torchao(W8A8, {"granularity": per("PerTensor")}), f"{W8A8}: _type 'PerTensor'"),
        (torchao(W8A8, {"act_mapping_type": {"_data": "ASYMMETRIC"}}), "_data 'ASYMMETRIC'"),
        (torchao(W8A8, {"reduce_range": True}), "reduce_range"),
        ({**torchao(W8A8), "include_input_output_embeddings": True}, "include_input_output_embeddings"),
        ({**torchao(W8A8), "quant_type": "int8_weight_only"}, "quant_type must be an object"),
        ({**torchao(W8A8), "quant_type": {"default": {}, "a": {}}}, "only one with 'default'"),
        (compressed(format="float-quantized"), "format 'float-quantized'"),
        (compressed(format="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized'"),
        (compressed(format="marlin-24"), "format 'marlin-24'"),
        (compressed(format=None), "format None"),
        (compressed(quantization_status="frozen"), "quantization_status 'frozen'"),
        (compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed(transform_config={"config_groups": {}}), "transform_config"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (compressed(config_groups={}), "0 schemes"),
        (compressed(config_groups=3), "config_groups must be an object"),
        (compressed(config_groups={"group_0": 3}), "group_0 must be an object"),
        (
            compressed(config_groups={"a": {"weights": WEIGHTS}, "b": {"weights": {**WEIGHTS, "strategy": "tensor"}}}),
            "2 schemes",
        ),
        (compressed(group={"weights": None}), "type None"),
        (compressed({"type": "float"}), "type 'float'"),
        (compressed({"num_bits": 4}), "num_bits 4"),
        (compressed({"num_bits": 3}, format="pack-quantized"), "num_bits 3"),
        (compressed({"strategy": "block"}), "strategy 'block'"),
        (compressed({"strategy": "group", "group_size": 16}), "group_size 16"),
        (compressed({"strategy": "group"}), "group_size None"),
        (compressed({"dynamic": True}), "dynamic True"),
        (compressed({"symmetric": "yes"}), "symmetric"),
        (compressed({"actorder": "other"}), "actorder 'other'"),
        (compressed(group={"output_activations": ACTIVATIONS}), "output_activations"),
        (
            compressed(group={"input_activations": {**ACTIVATIONS, "dynamic": False}}),
            "input_activations: dynamic False",
        ),
        (
            compressed(group={"input_activations": {**ACTIVATIONS, "strategy": "tensor"}}),
            "input_activations: strategy 'tensor'",
        ),
        (compressed(group={"input_activations": {**ACTIVATIONS, "symmetric": False}}), "symmetric False"),
        (
            compressed(GROUPED, {"input_activations": ACTIVATIONS}, format="pack-quantized"),
            "input_activations are not supported with format pack-quantized",
        ),
    ],
)
def test_every_other_form_is_named_in_one_line(fields: object, message: str | None, tmp_path: Path) -> None:
    directory = write(tmp_path, {"model_type": "qwen2", **BASE, "quantization_config": fields})
    if message is None:
        assert read_model_info(directory).quantization is None
        return
    with pytest.raises(CheckpointError, match="quantization_config") as raised:
        read_model_info(directory)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


OLD_AWQ = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
OLD_GPTQ = {"bits": 8, "group_size": 32, "damp_percent": 0.1, "desc_act": True, "sym": False}


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("quant_config.json", OLD_AWQ, Quantization(Layout.AWQ, 4, 64, has_zeros=True)),
        ("quant_config.json", {**OLD_AWQ, "quant_method": "awq"}, Quantization(Layout.AWQ, 4, 64, has_zeros=True)),
        (
            "quantize_config.json",
            OLD_GPTQ,
            Quantization(Layout.GPTQ, 8, 32, has_zeros=True, stored_zero_offset=1, has_order=True),
        ),
    ],
)
def test_a_file_of_settings_beside_config_json_is_read_where_that_says_nothing(
    name: str, fields: dict[str, Any], expected: Quantization, tmp_path: Path
) -> None:
    write(tmp_path, {"model_type": "llama", **BASE})
    (tmp_path / name).write_text(json.dumps(fields))
    assert read_model_info(tmp_path).quantization == expected
    assert read_config(tmp_path / "config.json").quantization == expected
    write(tmp_path, {"model_type": "llama", **BASE, "quantization_config": AWQ})
    assert read_model_info(tmp_path).quantization == Quantization(Layout.AWQ, 4, 128, has_zeros=True)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        *(
            (name, {key: fields[key] for key in fields if key != lacking}, f"{lacking} is missing")
            for name, fields, needed in (
                ("quant_config.json", OLD_AWQ, OLD_AWQ),
                ("quantize_config.json", OLD_GPTQ, ("bits", "group_size", "desc_act", "sym")),
            )
            for lacking in needed
        ),
        ("quant_config.json", {**OLD_AWQ, "version": "GEMV"}, "version 'GEMV' is not supported"),
        ("quant_config.json", {**OLD_AWQ, "w_bit": 3}, "w_bit 3 is not supported"),
        ("quant_config.json", {"quant_method": "hqq"}, "quant_method 'hqq' is not supported; supported are 'awq'"),
        ("quantize_config.json", {**OLD_GPTQ, "bits": 2}, "bits 2 is not supported"),
        ("quantize_config.json", {**OLD_GPTQ, "is_marlin_format": True}, "is_marlin_format = True is not supported"),
    ],
)
def test_a_file_of_settings_that_lacks_one_or_has_another_is_refused_by_name(
    name: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, {"model_type": "llama", **BASE})
    (tmp_path / name).write_text(json.dumps(fields))
    with pytest.raises(CheckpointError) as raised:
        read_model_info(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path / name}: {message}")
