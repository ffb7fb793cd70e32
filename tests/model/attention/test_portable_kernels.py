"""The kernels as other processors get them: built without this machine's instructions, they still agree with the
reference, in attention by itself and in whole layers."""

import dataclasses
import platform
import shutil
from pathlib import Path

import pytest
import torch

from tests.model.attention.paged_problems import CPU, Segment, attend_all
from tests.model.attention.test_row_split import NAMED_CASES, Case
from tests.model.kernels import test_forward_kernels
from tests.model.kernels.test_forward_kernels import check_stage
from tokasaurus.model.architectures import decoder
from tokasaurus.model.architectures.decoder import DecoderOptions
from tokasaurus.model.attention.backend import KVShape
from tokasaurus.model.kernels import library
from tokasaurus.model.kernels.library import Kernels

SEGMENTS = [Segment(1, 600), Segment(1, 33), Segment(70, 200), Segment(1, 1)]


@pytest.fixture(scope="module", params=["x86-64", "x86-64-v3"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """Vectors of four lanes, and of eight with AVX2."""
    if platform.machine() != "x86_64" or shutil.which("g++") is None:
        pytest.skip("names of x86 processors, as g++ has them")
    directory: Path = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        flags = [f"-march={request.param}" if flag == "-march=native" else flag for flag in library._FLAGS]
        patch.setattr(library, "_FLAGS", tuple(flags))
        library._build(["g++"], directory)
    return Kernels(directory / "kernels.so")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "causal"),
    [
        (torch.float32, 64, True),
        (torch.float32, 80, False),
        (torch.bfloat16, 16, True),
        (torch.bfloat16, 64, False),
        (torch.bfloat16, 80, True),
    ],
)
def test_kernels_for_other_processors_equal_the_reference(
    kernels: Kernels, dtype: torch.dtype, head_dim: int, causal: bool
) -> None:
    shape = KVShape(1, 9, 3, head_dim, 16, dtype, CPU)
    output, lse = attend_all("cpu", shape, SEGMENTS, causal, layer=0, seed=6, kernels=kernels)
    expected, expected_lse = attend_all("reference", shape, SEGMENTS, causal, layer=0, seed=6)
    # Without dot products of bfloat16, all is computed in float32: only the output is rounded.
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-5, "rtol": 2**-7}
    torch.testing.assert_close(output, expected, **tolerance)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", NAMED_CASES[2:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_for_other_processors_equal_those_of_torch(
    kernels: Kernels, dtype: torch.dtype, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "load_kernels", lambda: kernels)
    monkeypatch.setattr(test_forward_kernels, "load_kernels", lambda: kernels)
    check_stage(dataclasses.replace(case, dtype=dtype), DecoderOptions(qk_norm=True))
