"""Each Triton kernel against plain torch, at the sizes of models, as `toka check` compares them."""

from pathlib import Path

import pytest
import torch

from tests.helpers.tiny_model import save_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("dtype", "page_size"), [(torch.bfloat16, 16), (torch.bfloat16, 256), (torch.float16, 1), (torch.float32, 16)]
)
@pytest.mark.parametrize("heads", [(32, 8, 64), (32, 8, 128), (9, 3, 80)])
def test_kernels_of_attention_and_steps(heads: tuple[int, int, int], dtype: torch.dtype, page_size: int) -> None:
    from tokasaurus.model.attention.backend import KVShape
    from tokasaurus.model.worker.kernel_checks import compare_attention, compare_inputs

    shape = KVShape(2, *heads, page_size, dtype, CUDA)
    for measured in (*compare_attention(shape), *compare_inputs(shape)):
        assert measured.is_right, measured


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab_size", [2500, 128_256, 151_936])
def test_kernels_of_sampling(vocab_size: int, dtype: torch.dtype) -> None:
    from tokasaurus.model.worker.kernel_checks import compare_sampler

    for measured in compare_sampler(vocab_size, dtype, CUDA):
        assert measured.is_right, measured


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_kernels_of_layers(family: str, tmp_path: Path) -> None:
    from tests.model.helpers.greedy_decoding import load
    from tokasaurus.model.worker.kernel_checks import compare_layers

    save_tiny_model(tmp_path, family)
    model, _ = load(tmp_path, device=CUDA)
    for measured in compare_layers(model):
        assert measured.is_right, measured
