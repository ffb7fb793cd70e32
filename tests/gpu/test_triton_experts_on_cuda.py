"""The Triton kernels of experts on a CUDA device against float64 and plain torch, and recorded."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
CUDA = torch.device("cuda", 0)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Of float32 the order of sums; of the others one rounding of results up to 4."""
LARGE = {
    "few rows": ([2, 0, 1, 5] * 32, 2048, 1536, 0),
    "many rows": ([70, 0, 33, 129] * 32, 2048, 1536, 11),
}


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_kernel_equals_float64(dtype: torch.dtype) -> None:
    from tests.model.decoder.helpers.expert_cases import CASES, check

    for case in (*CASES.values(), *LARGE.values()):
        check(case, dtype, CUDA, TOLERANCES[dtype])


def test_choices_and_sorted_rows_equal_plain_torch() -> None:
    from tests.model.decoder.helpers.expert_cases import ROUTERS, check_choice, check_sort

    for spec in ROUTERS:
        check_choice(spec, CUDA)
    for num_rows, num_experts in ((0, 3), (1, 1), (2500, 5), (65_536, 128)):
        check_sort(num_rows, num_experts, CUDA)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_recorded_product_reads_which_rows_each_expert_has(dtype: torch.dtype) -> None:
    from tokasaurus.model.decoder.experts import grouped_product, product_by_masks

    x, weight = torch.randn(40, 64, device=CUDA).to(dtype), torch.randn(6, 32, 64, device=CUDA).to(dtype)
    ends = torch.tensor([0, 7, 7, 20, 39, 40], dtype=torch.int32, device=CUDA)
    grouped_product(x, weight, ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped_product(x, weight, ends)
    for others in ([0, 7, 7, 20, 39, 40], [40] * 6, [1, 2, 3, 4, 5, 40]):
        ends.copy_(torch.tensor(others, dtype=torch.int32))
        x.normal_()
        graph.replay()
        expected = product_by_masks(x, weight, ends)
        torch.testing.assert_close(out, expected, atol=8 * TOLERANCES[dtype], rtol=TOLERANCES[dtype])
