"""Sampling parameters of rows on the device: one tensor, read by the names of SamplingParams."""

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.messages.generation import SAMPLING_DTYPE, SamplingParams

# R rows that sample, F fields of SAMPLING_DTYPE

_DTYPES = {name: {"f": torch.float32, "i": torch.int32}[SAMPLING_DTYPE[name].kind] for name in SamplingParams._fields}

ParamColumns: TypeAlias = dict[str, Tensor]
"""Each field of SAMPLING_DTYPE, by name: float32 or int32 [R]."""


def as_words(params: NDArray[np.void]) -> NDArray[np.int32]:
    """SAMPLING_DTYPE [R] -> int32 [R, F], which shares its memory."""
    return params.view(np.int32).reshape(len(params), len(_DTYPES))


def params_to_device(params: NDArray[np.void], device: torch.device) -> Tensor:
    """SAMPLING_DTYPE [R] -> int32 [R, F]: the same bytes in one copy, or the same memory if `device` is the CPU."""
    return torch.from_numpy(as_words(params)).to(device)


def columns_of(device_params: Tensor) -> ParamColumns:
    """device_params: int32 [R, F], from params_to_device. The columns share its memory."""
    columns = zip(_DTYPES.items(), device_params.unbind(1), strict=True)
    return {name: words.view(dtype) for (name, dtype), words in columns}
