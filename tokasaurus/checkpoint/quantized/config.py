"""Reads quantization_config of config.json, and the files of AutoAWQ and AutoGPTQ that came before it.

Which modules are quantised is decided by the stored tensors. Sources: the classes QuantizationConfig and
QuantizationArgs of compressed-tensors; AwqConfig, GPTQConfig, TorchAoConfig and Mxfp4Config of transformers;
QuantizeConfig of gptqmodel; config_to_dict, Int8WeightOnlyConfig and Int8DynamicActivationInt8WeightConfig of torchao.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from tokasaurus.checkpoint.json_files import CheckpointError, Fields, flag, json_object, read_json

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""Two names of one key of config.json; the first one that is there counts."""

SETTINGS_FILES = {
    "quant_config.json": ("awq", ("w_bit", "q_group_size", "zero_point", "version")),
    "quantize_config.json": ("gptq", ("bits", "group_size", "desc_act", "sym")),
}
"""Files that old versions of AutoAWQ and AutoGPTQ wrote beside a config.json that says nothing: the quant_method, and
the fields without which such a file does not say how the weights are stored."""

_GROUP_SIZES = (32, 64, 128)
_STORED_ORDERS = (True, "group", "dynamic")
_ACTIVATION_ORDERS = (None, False, "weight", "static", *_STORED_ORDERS)
"""Values of compressed-tensors' actorder. Its version 0.20 and later no longer write the stored ones."""


class Layout(Enum):
    """How codes, the integers in place of weights, lie in the files. Words are int32, lowest bits first."""

    INT8 = "int-quantized"
    """int8 [out, in]."""
    PACKED = "pack-quantized"
    """Words [out, in / codes of a word], of adjacent inputs."""
    AWQ = "awq"
    """Words [in, out / 8], of outputs in the order of AWQ_ORDER."""
    GPTQ = "gptq"
    """Words [in / codes of a word, out], of adjacent inputs."""
    TORCHAO = "torchao"
    """int8 [out, in], of its Int8Tensor."""
    MXFP4 = "mxfp4"
    """Of all experts together, uint8 [experts, out, in / 32, 16]: bytes of two adjacent inputs, low bits first."""

    @property
    def has_int8(self) -> bool:
        """Whether codes and zeros are stored as int8, from -128 on."""
        return self in (Layout.INT8, Layout.TORCHAO)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the quantised weights of a checkpoint are stored: weight = (code - zero) * scale."""

    layout: Layout
    num_bits: int
    """Bits of a code: 4 or 8."""
    group_size: int | None
    """Adjacent inputs with one scale and zero, unless the checkpoint orders them otherwise; None: all inputs."""
    is_per_tensor: bool = False
    """One scale for the whole weight. group_size is None."""
    has_zeros: bool = False
    """Zeros are always stored. Where they are not, the zero is the middle of the codes."""
    stored_zero_offset: int = 0
    """What is added to stored zeros: 1 in GPTQ's first format."""
    has_order: bool = False
    """The group of each input is always stored. Where it is not, groups are of adjacent inputs."""
    quantizes_activations: bool = False
    """The model was made for activations of 8 bits, with a scale for each token."""
    ignored: frozenset[str] = frozenset()
    """Names of modules that are not quantised; patterns in the configuration are left out."""


def parse_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """None if config.json says nothing of quantised weights. Raises CheckpointError, naming what is not supported."""
    for key in QUANTIZATION_KEYS:
        if not config.get(key):
            continue
        fields = config[key]
        if not isinstance(fields, dict):
            raise CheckpointError(f"{key} must be an object, not {fields!r}")
        method = fields.get("quant_method", "compressed-tensors" if "config_groups" in fields else None)
        if not isinstance(method, str) or method not in _PARSERS:
            supported = ", ".join(_PARSERS)
            raise CheckpointError(f"{key}: quant_method {method!r} is not supported; supported are {supported}")
        try:
            return _PARSERS[method](fields)
        except CheckpointError as error:
            raise CheckpointError(f"{key} ({method}): {error}") from None
    return None


def quantization_beside(directory: Path) -> Quantization | None:
    """What one of SETTINGS_FILES in the model's directory says; None if it has none. Of two, the first one counts.

    Raises CheckpointError, naming the file and what it lacks or what is not supported."""
    for name, (method, needed) in SETTINGS_FILES.items():
        path = directory / name
        if not path.is_file():
            continue
        fields = read_json(path)
        try:
            _only({"quant_method": method, **fields}, "quant_method", method)
            for each in needed:
                if fields.get(each) is None:
                    raise CheckpointError(f"{each} is missing")
            return _PARSERS[method](fields)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
    return None


def _parse_compressed(fields: Fields) -> Quantization:
    _only(fields, "quantization_status", None, "compressed")
    for name in ("kv_cache_scheme", "transform_config"):
        _off(fields, name)
    if json_object(fields, "sparsity_config").get("format", "dense") != "dense":
        raise CheckpointError(f"sparsity_config {fields['sparsity_config']!r} is not supported")
    groups = json_object(fields, "config_groups")
    found = set()
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise CheckpointError(f"config_groups: {name} must be an object, not {group!r}")
        found.add(_parse_scheme(group, fields.get("format") if group.get("format") is None else group["format"]))
    if len(found) != 1:
        raise CheckpointError(f"config_groups describes {len(found)} schemes of quantised weights; supported is one")
    (scheme,) = found
    return _with_ignored(scheme, fields, "ignore")


def _parse_scheme(group: Fields, layout_name: object) -> Quantization:
    layouts = {layout.value: layout for layout in (Layout.INT8, Layout.PACKED)}
    if not isinstance(layout_name, str) or layout_name not in layouts:
        raise CheckpointError(f"format {layout_name!r} is not supported; supported are {', '.join(layouts)}")
    layout = layouts[layout_name]
    _off(group, "output_activations")
    weights = json_object(group, "weights")
    _only(weights, "type", "int")
    _only(weights, "num_bits", *((8,) if layout is Layout.INT8 else (4, 8)))
    _only(weights, "dynamic", None, False)
    _only(weights, "actorder", *_ACTIVATION_ORDERS)
    strategy = _only(weights, "strategy", "channel", "tensor", "group")
    return Quantization(
        layout=layout,
        num_bits=weights["num_bits"],
        group_size=_only(weights, "group_size", *_GROUP_SIZES) if strategy == "group" else None,
        is_per_tensor=strategy == "tensor",
        has_zeros=not flag(weights, "symmetric", default=True),
        has_order=strategy == "group" and weights.get("actorder") in _STORED_ORDERS,
        quantizes_activations=_quantizes_activations(group, layout),
    )


def _quantizes_activations(group: Fields, layout: Layout) -> bool:
    activations = json_object(group, "input_activations")
    if not activations:
        return False
    if layout is not Layout.INT8:
        raise CheckpointError(f"input_activations are not supported with format {layout.value}")
    try:
        _only(activations, "type", "int")
        _only(activations, "num_bits", 8)
        _only(activations, "dynamic", True)
        _only(activations, "strategy", "token")
        _only(activations, "symmetric", None, True)
    except CheckpointError as error:
        raise CheckpointError(f"input_activations: {error}") from None
    return True


def _parse_awq(fields: Fields) -> Quantization:
    version = fields.get("version", fields.get("format", "gemm"))
    if not isinstance(version, str) or version.lower() != "gemm":
        raise CheckpointError(f"version {version!r} is not supported, only 'gemm'")
    _only(fields, "w_bit" if "w_bit" in fields else "bits", 4)
    group_size = _only(fields, "q_group_size" if "q_group_size" in fields else "group_size", *_GROUP_SIZES)
    flag(fields, "zero_point")  # zeros are stored in any case
    scheme = Quantization(Layout.AWQ, num_bits=4, group_size=group_size, has_zeros=True)
    return _with_ignored(scheme, fields, "modules_to_not_convert")


def _parse_gptq(fields: Fields) -> Quantization:
    name = "checkpoint_format" if fields.get("checkpoint_format") is not None else "format"
    version = _only(fields, name, None, "gptq", "gptq_v2")
    for unsupported in ("is_marlin_format", "dynamic", "adapter", "rotation"):
        _off(fields, unsupported)
    _only(fields, "pack_dtype", None, "int32")
    flag(fields, "sym")  # zeros are stored in any case
    group_size = _only(fields, "group_size", -1, *_GROUP_SIZES)
    return Quantization(
        layout=Layout.GPTQ,
        num_bits=_only(fields, "bits", 4, 8),
        group_size=None if group_size == -1 else group_size,
        has_zeros=True,
        stored_zero_offset=0 if version == "gptq_v2" else 1,
        has_order=flag(fields, "desc_act") and group_size != -1,
    )


def _parse_torchao(fields: Fields) -> Quantization:
    _off(fields, "include_input_output_embeddings")
    types = json_object(fields, "quant_type")
    if types.keys() != {"default"}:
        raise CheckpointError(f"quant_type {dict(types)!r} is not supported, only one with 'default'")
    default = json_object(types, "default")
    name = _only(default, "_type", "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig")
    try:
        _only(default, "_version", 2)
        data = json_object(default, "_data")
        scheme = _parse_int8_tensor(data, quantizes_activations=name != "Int8WeightOnlyConfig")
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    return _with_ignored(scheme, fields, "modules_to_not_convert")


def _parse_int8_tensor(data: Fields, *, quantizes_activations: bool) -> Quantization:
    _only(data, "group_size", None)
    for unsupported in ("weight_only_decode", "reduce_range"):
        _off(data, unsupported)
    if quantizes_activations:
        _only(json_object(data, "act_mapping_type"), "_data", "SYMMETRIC")
    granularity = json_object(data, "granularity")
    allowed = ("PerRow",) if quantizes_activations else ("PerRow", "PerTensor", "PerGroup")
    kind = _only(granularity, "_type", *allowed)
    details = json_object(granularity, "_data")
    if kind == "PerRow":
        _only(details, "dim", None, -1)
    return Quantization(
        Layout.TORCHAO,
        num_bits=8,
        group_size=_only(details, "group_size", *_GROUP_SIZES) if kind == "PerGroup" else None,
        is_per_tensor=kind == "PerTensor",
        quantizes_activations=quantizes_activations,
    )


def _parse_mxfp4(fields: Fields) -> Quantization:
    return _with_ignored(Quantization(Layout.MXFP4, num_bits=4, group_size=32), fields, "modules_to_not_convert")


_PARSERS = {
    "compressed-tensors": _parse_compressed,
    "awq": _parse_awq,
    "gptq": _parse_gptq,
    "torchao": _parse_torchao,
    "mxfp4": _parse_mxfp4,
}


def _with_ignored(scheme: Quantization, fields: Fields, name: str) -> Quantization:
    ignored = fields.get(name)
    if ignored is not None and not (isinstance(ignored, list) and all(isinstance(each, str) for each in ignored)):
        raise CheckpointError(f"{name} must be a list of names, not {ignored!r}")
    return replace(scheme, ignored=frozenset(each for each in ignored or () if not each.startswith("re:")))


def _only(fields: Fields, name: str, *allowed: Any) -> Any:
    """The value, of the same type as one of these. An absent field is None."""
    value = fields.get(name)
    if not any(type(value) is type(each) and value == each for each in allowed):
        shown = ", ".join(repr(each) for each in allowed if each is not None)
        raise CheckpointError(f"{name} {value!r} is not supported; supported are {shown}")
    return value


def _off(fields: Fields, name: str) -> None:
    if fields.get(name):
        raise CheckpointError(f"{name} = {fields[name]!r} is not supported")
