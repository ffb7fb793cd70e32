"""FlashInfer's kernels on a CUDA device against float64 on the CPU."""

import math
from dataclasses import replace

import pytest
import torch

from tests.model.helpers.float64_attention import attention_beside_float64
from tests.model.helpers.paged_problems import Segment, make_part, scattered_tables
from tokasaurus.checkpoint.spec import AttentionSpec
from tokasaurus.model.attention.backend import KVShape, PagedLayout
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.attention.flashinfer_backend import FlashInferBackend, has_fa3
from tokasaurus.model.attention.row_split import attend_rows
from tokasaurus.model.worker.self_check import measure_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _installed() -> None:
    pytest.importorskip("flashinfer", reason="pip install flashinfer-python")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", range(1, 9))
def test_decode_and_prefill_equal_float64(group: int, head_dim: int) -> None:
    shape = KVShape(1, 2 * group, 2, head_dim, 16, torch.bfloat16, CUDA)
    decode = [Segment(1, length) for length in (1, 16, 17, 600, 8192)]
    for segments in (decode, [Segment(1, 1), Segment(40, 200), Segment(16, 16), Segment(5, 3000)]):
        (output, lse), (expected, expected_lse) = attention_beside_float64("flashinfer", shape, segments)
        torch.testing.assert_close(lse.double(), expected_lse / math.log(2), atol=2e-3, rtol=0)
        torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=0)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_prompts_by_fa3_equal_plain_torch(head_dim: int) -> None:
    if not has_fa3(CUDA):
        pytest.skip("FlashInfer has fa3 for Hopper alone")
    shape = KVShape(1, 8, 2, head_dim, 16, torch.bfloat16, CUDA)
    backend = make_backend("flashinfer", shape, None)
    assert isinstance(backend, FlashInferBackend)
    backend.prepare_fa3()
    for measured in measure_attention(backend, shape):
        assert measured.is_right, measured


@pytest.mark.parametrize("group", [2, 4])
def test_layers_with_windows_caps_and_sinks_equal_plain_torch(group: int) -> None:
    """Decode by CUDA cores and by tensor cores; the plans of recordings too; then all without the wrappers."""
    usual = AttentionSpec(2 * group, 2, 64, 0.125)
    limited = replace(usual, scale=0.2, window=300, softcap=20.0)
    sinks = torch.linspace(-2, 3, 2 * group, device=CUDA)
    shape = KVShape(2, 2 * group, 2, 64, 16, torch.bfloat16, CUDA, layers=(limited, usual), sinks=(sinks, None))
    backend = make_backend("flashinfer", shape, None, max_graph_rows=4)
    assert isinstance(backend, FlashInferBackend)
    for prepare in (lambda: None, backend.prepare_calls):
        prepare()
        for measured in measure_attention(backend, shape):
            assert measured.is_right, measured


@pytest.mark.parametrize("sizes", [[1], [2, 1, 7], [64, 3], [512]])
def test_rows_in_prefix_groups_have_the_attention_of_the_torch_backend(sizes: list[int]) -> None:
    """Group g shares a prefix of 16 * (20 + g) tokens; each row has 1 to 40 tokens of its own."""
    shape = KVShape(2, 8, 2, 64, 16, torch.bfloat16, CUDA)
    prefixes = [Segment(size, 16 * (20 + group)) for group, size in enumerate(sizes)]
    suffixes = [Segment(1, 1 + 7 * row % 40) for row in range(sum(sizes))]
    tables, num_blocks = scattered_tables([*prefixes, *suffixes], 16, seed=2)
    layout = PagedLayout(
        torch.zeros(0, dtype=torch.int64, device=CUDA),
        (make_part(suffixes, tables[len(prefixes) :], 0, causal=True, is_partial=True),),
        make_part(prefixes, tables[: len(prefixes)], 0, causal=False, is_partial=True),
    )
    torch.manual_seed(0)
    query = torch.randn(sum(sizes), 8, 64).to(CUDA, torch.bfloat16)
    key, value = (torch.randn(num_blocks * 16, 2, 64).to(CUDA, torch.bfloat16) for _ in range(2))
    results = []
    for name in ("torch", "flashinfer"):
        backend = make_backend(name, shape, None)
        backend.allocate(num_blocks)
        backend.plan(PagedLayout(torch.arange(num_blocks * 16, device=CUDA), ()))
        for layer in range(2):
            backend.write(key, value, layer)
        backend.plan(layout)
        results.append(attend_rows(backend, query, 1, layout))
    torch.testing.assert_close(*results, atol=2e-2, rtol=0)
