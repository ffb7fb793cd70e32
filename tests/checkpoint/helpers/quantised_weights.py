"""Quantised weights as checkpoints store them, written from the formats' descriptions, by rounding.

Each code is put into its word by itself. Sources: WQLinear_GEMM of autoawq, QuantLinear of AutoGPTQ,
PackedQuantizationCompressor of compressed-tensors, which unpacks the last format itself where it is installed.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of 8, whose code is in the lowest 4 bits of a word, in the next 4, and so on."""


@dataclass(frozen=True)
class Format:
    """How weights are quantised and stored."""

    name: str
    """ "awq", "gptq", "gptq_v2", "int-quantized", "pack-quantized" or "torchao"."""
    num_bits: int = 4
    group_size: int | None = 32
    """None: one scale for each output."""
    is_symmetric: bool = False
    has_order: bool = False
    """Inputs are in groups in a random order, which is stored."""
    is_per_tensor: bool = False
    quantizes_activations: bool = False
    scale_dtype: torch.dtype = torch.float16

    @property
    def config(self) -> dict[str, Any]:
        """quantization_config."""
        if self.name == "awq":
            of_awq = {"zero_point": not self.is_symmetric, "version": "gemm", "modules_to_not_convert": None}
            return {"quant_method": "awq", "bits": self.num_bits, "group_size": self.group_size, **of_awq}
        if self.name.startswith("gptq"):
            group_size = -1 if self.group_size is None else self.group_size
            of_gptq = {"sym": self.is_symmetric, "desc_act": self.has_order, "checkpoint_format": self.name}
            return {"quant_method": "gptq", "bits": self.num_bits, "group_size": group_size, **of_gptq}
        if self.name == "torchao":
            kind = "PerTensor" if self.is_per_tensor else "PerRow" if self.group_size is None else "PerGroup"
            details = {"PerTensor": {}, "PerRow": {"dim": -1}, "PerGroup": {"group_size": self.group_size}}[kind]
            data = {"granularity": {"_type": kind, "_data": details}, "act_mapping_type": {"_data": "SYMMETRIC"}}
            name = "Int8DynamicActivationInt8WeightConfig" if self.quantizes_activations else "Int8WeightOnlyConfig"
            default = {"_type": name, "_version": 2, "_data": data}
            return {"quant_method": "torchao", "quant_type": {"default": default}, "modules_to_not_convert": None}
        shared = {"quant_method": "compressed-tensors", "format": self.name, "quantization_status": "compressed"}
        return {**shared, "ignore": ["lm_head", "re:visual.*"], "config_groups": {"group_0": self.scheme}}

    @property
    def scheme(self) -> dict[str, Any]:
        """Of compressed-tensors."""
        strategy = "tensor" if self.is_per_tensor else "channel" if self.group_size is None else "group"
        weights = {"num_bits": self.num_bits, "type": "int", "symmetric": self.is_symmetric, "strategy": strategy}
        weights |= {"group_size": self.group_size, "dynamic": False, "actorder": "group" if self.has_order else None}
        activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        inputs = activations if self.quantizes_activations else None
        return {"targets": ["Linear"], "weights": weights, "input_activations": inputs}


def quantise(weight: Tensor, how: Format, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """weight float32 [O, I] -> the stored tensors by the last part of their names, and the weight that they mean."""
    num_outputs, num_inputs = weight.shape
    group_size = num_inputs if how.group_size is None else how.group_size
    order = np.random.default_rng(seed).permutation(num_inputs) if how.has_order else np.arange(num_inputs)
    groups = torch.from_numpy(order // group_size)
    num_groups = num_inputs // group_size
    top, middle = (1 << how.num_bits) - 1, 1 << (how.num_bits - 1)
    scales, zeros = torch.empty(num_outputs, num_groups), torch.empty(num_outputs, num_groups)
    for group in range(num_groups):
        members = torch.cat((weight[:, groups == group], torch.zeros(num_outputs, 1)), dim=1)
        low, high = members.amin(1), members.amax(1)
        if how.is_per_tensor:
            low, high = low.amin().expand_as(low), high.amax().expand_as(high)
        if how.is_symmetric:
            scale = torch.maximum(-low, high) / (middle - 1)
            zero = torch.full_like(scale, middle)
        else:
            scale = (high - low) / (top - 1)
            zero = (1 - low / scale).round()  # 0 has no stored form in GPTQ's first format
        scales[:, group], zeros[:, group] = scale.to(how.scale_dtype).float(), zero
    codes = ((weight / scales[:, groups]).round() + zeros[:, groups]).clamp(0, top)
    meant = (codes - zeros[:, groups]) * scales[:, groups]
    stored = _store(how, codes.int(), zeros.int(), scales.to(how.scale_dtype))
    if how.has_order or how.name.startswith("gptq"):
        stored["weight_g_idx" if "quantized" in how.name else "g_idx"] = groups.int()
    return stored, meant


def random_mxfp4(count: int, num_outputs: int, num_inputs: int, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Experts of MXFP4 as gpt-oss has them -> the stored tensors by the last part of their names, and the weights that
    they mean, float32 [experts, in, out]. Source: OCP Microscaling Formats 1.0."""
    generator = torch.Generator().manual_seed(seed)
    num_groups = num_inputs // 32
    blocks = torch.randint(256, (count, num_outputs, num_groups, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(119, 124, (count, num_outputs, num_groups), generator=generator, dtype=torch.uint8)
    meant = torch.empty(count, num_inputs, num_outputs)
    for expert, output, at in np.ndindex(count, num_outputs, num_inputs):
        code = int(blocks[expert, output, at // 32, at % 32 // 2]) >> 4 * (at % 2) & 15
        is_negative, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        number = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        scale = 2.0 ** (int(scales[expert, output, at // 32]) - 127)
        meant[expert, at, output] = -number * scale if is_negative else number * scale
    return {"blocks": blocks, "scales": scales}, meant


def by_compressed_tensors(stored: dict[str, Tensor], how: Format) -> Tensor:
    """The weight that the library makes of its stored tensors, in float32. It reads no order of inputs."""
    import pytest

    pytest.importorskip("compressed_tensors", reason="needs Python 3.11")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    in_float = {**stored, "weight_scale": stored["weight_scale"].float()}  # whose dtype it computes in
    compressor = BaseCompressor.get_value_from_registry(how.name)
    weight: Tensor = compressor.decompress(in_float, QuantizationScheme(**how.scheme))["weight"]
    return weight


def _store(how: Format, codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """codes int32 [O, I], zeros int32 and scales [O, G]."""
    middle = 1 << (how.num_bits - 1)
    if how.name == "torchao":  # in which zeros are also stored where they are 0
        if how.is_per_tensor:
            scales, zeros = scales[:1, :1], zeros[:1, :1]
        parts = {
            "qdata": (codes - middle).to(torch.int8),
            "scale": scales,
            "zero_point": (zeros - middle).to(torch.int8),
        }
        return {f"_weight_{part}": tensor for part, tensor in parts.items()}
    if how.name == "int-quantized":
        if how.is_per_tensor:
            scales, zeros = scales[:1, 0], zeros[:1, 0]
        stored = {"weight": (codes - middle).to(torch.int8), "weight_scale": scales}
        return stored if how.is_symmetric else {**stored, "weight_zero_point": (zeros - middle).to(torch.int8)}
    in_order = tuple(range(32 // how.num_bits))
    if how.name == "pack-quantized":
        packed = torch.from_numpy(_words(codes, in_order, how.num_bits).view(np.int32))
        stored = {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor(codes.shape)}
        if not how.is_symmetric:
            words = np.ascontiguousarray(_words(zeros.T, in_order, how.num_bits).T)
            stored["weight_zero_point"] = torch.from_numpy(words.view(np.int32))
        return stored
    if how.name == "awq":
        words, zero_words = (_words(each.T, AWQ_NIBBLES, 4) for each in (codes, zeros))
    else:
        words = np.ascontiguousarray(_words(codes, in_order, how.num_bits).T)
        zero_words = _words(zeros.T - int(how.name == "gptq"), in_order, how.num_bits)
    qweight, qzeros = torch.from_numpy(words.view(np.int32)), torch.from_numpy(zero_words.view(np.int32))
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales.T.contiguous()}


def _words(codes: Tensor, order: tuple[int, ...], num_bits: int) -> NDArray[np.uint32]:
    """[R, C] -> [R, C / codes of a word], the last one padded. order: of a word's codes, from the lowest bits on."""
    numbers = np.pad(codes.numpy().astype(np.uint32), ((0, 0), (0, -codes.shape[1] % len(order))))
    words = np.zeros((len(numbers), numbers.shape[1] // len(order)), np.uint32)
    for index, code in enumerate(order):
        words |= numbers[:, code :: len(order)] << np.uint32(num_bits * index)
    return words
