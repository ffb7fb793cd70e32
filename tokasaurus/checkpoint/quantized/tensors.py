"""Joins the stored tensors of each quantised weight into one logical tensor, and checks them by the files' headers.

Source of names and shapes: the compressors of compressed-tensors; WQLinear_GEMM of autoawq; QuantLinear of AutoGPTQ and
gptqmodel; flatten_tensor_state_dict of torchao, by which transformers names the parts of a tensor; OpenAI's gpt-oss.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tokasaurus.checkpoint.json_files import CheckpointError, unreadable
from tokasaurus.checkpoint.quantized.config import Layout, Quantization
from tokasaurus.checkpoint.stored_tensors import StoredTensor

_EMBEDDING = "model.embed_tokens"
_SCALE_DTYPES = ("F32", "F16", "BF16")
_WORD_BITS = 32
_MXFP4_BYTES = 16
"""Bytes of a block's codes."""


@dataclass(frozen=True, slots=True)
class _Suffixes:
    """Last parts of the names of a weight's stored tensors, after the module's name."""

    codes: str
    scales: str
    zeros: str | None
    group_indices: str | None
    """The number of the group that each input is in, where groups are not of adjacent inputs."""
    shape: str | None = None
    """The weight's shape, which padding hides."""
    separator: str = "."
    """What comes before them."""


_SUFFIXES = {
    Layout.INT8: _Suffixes("weight", "weight_scale", "weight_zero_point", None),
    Layout.PACKED: _Suffixes("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
    Layout.AWQ: _Suffixes("qweight", "scales", "qzeros", None),
    Layout.GPTQ: _Suffixes("qweight", "scales", "qzeros", "g_idx"),
    Layout.TORCHAO: _Suffixes("_weight_qdata", "_weight_scale", "_weight_zero_point", None),
    Layout.MXFP4: _Suffixes("blocks", "scales", None, None, separator="_"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensor(StoredTensor):
    """A quantised weight [out, in], or a stack of them, [experts, in, out] as transformers has it. `file`, `begin` and
    `end` tell where its codes lie; `dtype` names the type of its blocks: "I4_128" has codes of 4 bits and a scale for
    128 adjacent inputs, "I8" codes of 8 bits and one for all."""

    quantization: Quantization
    codes: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None
    group_indices: StoredTensor | None
    num_groups: int
    """Groups of inputs in a row, each with its own scale."""

    @property
    def num_bytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros, self.group_indices)
        return sum(part.end - part.begin for part in parts if part is not None)

    @property
    def is_stack(self) -> bool:
        return len(self.shape) == 3

    def matrix(self, index: int) -> "QuantizedTensor":
        """One weight of a stack, [out, in]."""
        count, num_inputs, num_outputs = self.shape

        def part(tensor: StoredTensor) -> StoredTensor:
            num_bytes = (tensor.end - tensor.begin) // count
            begin = tensor.begin + index * num_bytes
            return replace(tensor, shape=(num_outputs, num_bytes // num_outputs), begin=begin, end=begin + num_bytes)

        return replace(self, shape=(num_outputs, num_inputs), codes=part(self.codes), scales=part(self.scales))


def join_tensors(tensors: Mapping[str, StoredTensor], quantization: Quantization) -> dict[str, StoredTensor]:
    """The tensors by name, where each quantised weight is one, named as a plain one would be.

    Raises CheckpointError if a part of a weight is missing or has a wrong shape or dtype."""
    suffixes = _SUFFIXES[quantization.layout]
    joined: dict[str, StoredTensor] = {}
    parts = set[str]()
    for name, tensor in tensors.items():
        module, separator, suffix = name.rpartition(suffixes.separator)
        is_codes = suffix == suffixes.codes and (quantization.layout is not Layout.INT8 or tensor.dtype == "I8")
        if not is_codes:
            continue
        named = {part: f"{module}{separator}{part}" for part in _parts(suffixes)}
        found = {part: tensors[full] for part, full in named.items() if full in tensors}
        parts.update(named.values())
        weight = module if quantization.layout is Layout.MXFP4 else f"{module}.weight"
        if module == _EMBEDDING or module in quantization.ignored:
            why = (
                "a quantised embedding is not supported" if module == _EMBEDDING else "config.json says that it is not"
            )
            raise CheckpointError(f"tensor {weight} is quantised: {why}")
        if suffix != "weight" and weight in tensors:
            raise CheckpointError(f"the checkpoint has both {weight} and {name}")
        try:
            joined[weight] = _join(quantization, suffixes, found)
        except CheckpointError as error:
            raise CheckpointError(f"tensor {weight} is quantised: {error}") from None
    for name, tensor in tensors.items():
        if name in parts:
            continue
        if name.endswith(".weight") and tensor.dtype not in _SCALE_DTYPES:
            raise CheckpointError(
                f"tensor {name} has dtype {tensor.dtype}, which is not of {quantization.layout.value}"
            )
        joined[name] = tensor
    return joined


def _parts(suffixes: _Suffixes) -> list[str]:
    parts = (suffixes.codes, suffixes.scales, suffixes.zeros, suffixes.group_indices, suffixes.shape)
    return [part for part in parts if part is not None]


def _join(quantization: Quantization, suffixes: _Suffixes, found: Mapping[str, StoredTensor]) -> QuantizedTensor:
    """found: by suffix."""
    codes = found[suffixes.codes]
    for suffix in _parts(suffixes):
        is_stored = {suffixes.group_indices: quantization.has_order, suffixes.zeros: quantization.has_zeros}
        if suffix not in found and is_stored.get(suffix, True):
            raise CheckpointError(f"its {suffix} is missing")
    if quantization.layout is Layout.MXFP4:
        return _join_stack(quantization, codes, found[suffixes.scales])
    if codes.dtype != ("I8" if quantization.layout.has_int8 else "I32") or len(codes.shape) != 2:
        raise CheckpointError(f"its {suffixes.codes} is {codes.dtype} {list(codes.shape)}")
    num_outputs, num_inputs = _shape(quantization, codes, None if suffixes.shape is None else found[suffixes.shape])
    if not num_outputs or not num_inputs:
        raise CheckpointError(f"its {suffixes.codes} has shape {list(codes.shape)}")
    group_size = num_inputs if quantization.group_size is None else quantization.group_size
    if num_inputs % group_size:
        raise CheckpointError(f"its {num_inputs} inputs are not a multiple of the group size {group_size}")
    num_groups = num_inputs // group_size
    scales, zeros = found[suffixes.scales], None if suffixes.zeros is None else found.get(suffixes.zeros)
    group_indices = None if suffixes.group_indices is None else found.get(suffixes.group_indices)
    _check(suffixes.scales, scales, _SCALE_DTYPES, _scale_shapes(quantization, num_outputs, num_groups))
    if zeros is not None and suffixes.zeros is not None:
        _check(suffixes.zeros, zeros, (codes.dtype,), _zero_shapes(quantization, num_outputs, num_groups))
    if group_indices is not None:
        _check("group indices", group_indices, ("I32", "I64"), ((num_inputs,),))
    kind = f"I{quantization.num_bits}" + ("" if quantization.group_size is None else f"_{group_size}")
    return QuantizedTensor(
        *(codes.file, kind, (num_outputs, num_inputs), codes.begin, codes.end),
        quantization=quantization,
        codes=codes,
        scales=scales,
        zeros=zeros,
        group_indices=group_indices,
        num_groups=num_groups,
    )


def _join_stack(quantization: Quantization, codes: StoredTensor, scales: StoredTensor) -> QuantizedTensor:
    if codes.dtype != "U8" or len(codes.shape) != 4 or codes.shape[3] != _MXFP4_BYTES or 0 in codes.shape:
        raise CheckpointError(f"its blocks is {codes.dtype} {list(codes.shape)}")
    count, num_outputs, num_groups, _ = codes.shape
    _check("scales", scales, ("U8",), (codes.shape[:3],))
    return QuantizedTensor(
        *(codes.file, "MXFP4", (count, 2 * _MXFP4_BYTES * num_groups, num_outputs), codes.begin, codes.end),
        quantization=quantization,
        codes=codes,
        scales=scales,
        zeros=None,
        group_indices=None,
        num_groups=num_groups,
    )


def _check(what: str, tensor: StoredTensor, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> None:
    if tensor.dtype not in dtypes or tensor.shape not in shapes:
        expected = f"{' or '.join(dtypes)} {' or '.join(str(list(shape)) for shape in shapes)}"
        raise CheckpointError(f"its {what} is {tensor.dtype} {list(tensor.shape)}, not {expected}")


def _shape(quantization: Quantization, codes: StoredTensor, shape: StoredTensor | None) -> tuple[int, int]:
    """[out, in] of the weight."""
    in_word = _WORD_BITS // quantization.num_bits
    first, second = codes.shape
    if quantization.layout.has_int8:
        return first, second
    if quantization.layout is Layout.AWQ:
        return second * in_word, first
    if quantization.layout is Layout.GPTQ:
        return second, first * in_word
    assert shape is not None
    num_outputs, num_inputs = _read_shape(shape)
    if num_outputs != first or -(-num_inputs // in_word) != second:
        raise CheckpointError(
            f"its weight_shape is {[num_outputs, num_inputs]}, its weight_packed has {[first, second]}"
        )
    return num_outputs, num_inputs


def _read_shape(tensor: StoredTensor) -> tuple[int, int]:
    item = {"I64": 8, "I32": 4}.get(tensor.dtype)
    if item is None or tensor.shape != (2,):
        raise CheckpointError(f"its weight_shape is {tensor.dtype} {list(tensor.shape)}, not I64 [2]")
    try:
        with tensor.file.open("rb") as file:
            file.seek(tensor.begin)
            content = file.read(2 * item)
    except OSError as error:
        raise unreadable(tensor.file, "safetensors", error) from None
    return int.from_bytes(content[:item], "little"), int.from_bytes(content[item:], "little")


def _scale_shapes(quantization: Quantization, num_outputs: int, num_groups: int) -> tuple[tuple[int, ...], ...]:
    if quantization.layout in (Layout.AWQ, Layout.GPTQ):
        return ((num_groups, num_outputs),)
    return ((1,), (), (1, 1)) if quantization.is_per_tensor else ((num_outputs, num_groups),)


def _zero_shapes(quantization: Quantization, num_outputs: int, num_groups: int) -> tuple[tuple[int, ...], ...]:
    num_words = -(-num_outputs * quantization.num_bits // _WORD_BITS)
    if quantization.layout in (Layout.AWQ, Layout.GPTQ):
        return ((num_groups, num_words),)
    if quantization.layout.has_int8:
        return _scale_shapes(quantization, num_outputs, num_groups)
    return ((num_words, num_groups),)
