"""The Triton kernels of attention, and the one of recorded steps' inputs, on a CUDA device, against slow oracles."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.float32),
    ],
)
def test_keys_and_values_are_written_where_they_belong(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    from tests.model.attention.helpers.kernel_checks import check_write

    for seed, size in enumerate([(300, 8, 128), (1, 1, 64), (77, 9, 80)]):
        check_write(seed, CUDA, size, dtype, cache_dtype)


def test_merged_parts_equal_attention_over_both() -> None:
    from tests.model.attention.helpers.kernel_checks import check_merge

    for seed, size in enumerate([(1, 1, 16), (70, 9, 80), (1024, 32, 128)]):
        for offset in (0.0, 40.0, -300.0):
            check_merge(seed, CUDA, size, offset)


def test_sinks_count_as_a_token_more() -> None:
    from tests.model.attention.helpers.kernel_checks import check_sinks

    for seed, size in enumerate([(1, 1, 16), (70, 9, 80), (1024, 32, 128)]):
        for dtype in (torch.float32, torch.bfloat16):
            check_sinks(seed, CUDA, size, dtype)


def test_block_lists_have_the_blocks_of_each_segment() -> None:
    from tests.model.attention.helpers.kernel_checks import check_lists

    for num_segments, page_size, max_blocks in ((0, 16, 4), (1, 16, 4), (300, 1, 9), (2500, 16, 40), (3, 16, 6000)):
        check_lists(num_segments, CUDA, num_segments, page_size, max_blocks)


def test_block_lists_do_not_wait_for_the_device() -> None:
    from tests.model.attention.helpers.kernel_checks import unfilled_lists
    from tokasaurus.model.attention.block_lists import fill_lists

    tables = torch.arange(24, dtype=torch.int32, device=CUDA).view(3, 8)
    first_entries = torch.tensor([9, 0], device=CUDA)
    lists = unfilled_lists(torch.tensor([0, 2, 3]), torch.tensor([20, 16], dtype=torch.int32), CUDA)
    fill_lists(tables, first_entries, 16, lists)  # the first call compiles the kernel
    torch.cuda.set_sync_debug_mode("error")
    try:
        fill_lists(tables, first_entries, 16, lists)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert lists.blocks.tolist() == [9, 10, 0]
    assert lists.last_lengths.tolist() == [4, 16]


def test_inputs_of_recorded_steps_are_those_of_their_slots() -> None:
    from tests.model.execution.helpers.input_checks import check_inputs
    from tokasaurus.model.execution.triton_inputs import fill_inputs

    for seed, (num_rows, page_size, max_blocks) in enumerate([(1, 16, 5), (40, 1, 5), (1024, 16, 40), (3, 16, 3000)]):
        check_inputs(seed, CUDA, num_rows, page_size, fill_inputs, max_blocks)
