"""Sampling in Triton without a GPU: interpreted against torch and the C++ kernels, and compiled for a GPU."""

import pytest

from tests.helpers.installed_triton import compile_for_gpus, needs_interpreter, needs_triton, run_python
from tokasaurus.messages.sampling import LIMITS, PENALTIES, SamplingParams
from tokasaurus.model.buffer_sizes import parts_of_rows

pytestmark = [needs_triton, pytest.mark.cuda_path]

ROWS = {
    **{"logits": "*bf16", "row_params": "*i32", "changed_index": "*i32", "changed_logits": "*fp32"},
    **{"mask_index": "*i32", "mask_bits": "*i32", "least_of_row": "*fp32"},
}
DRAW = {**ROWS, "noise_keys": "*i64", "parts": "*i32"}
MERGE = {"parts": "*i32", "logits": "*bf16", "tokens": "*i64", "chosen": "*fp32", "normalizers": "*fp32"}
FINISH = {"parts": "*i32", "logits": "*bf16", "hidden": "*bf16", "slots": "*i64", "last_tokens": "*i64"}
FINISH |= {"tokens": "*i64", "packed": "*i32", "logprobs": "*fp32"}
OF_PARTS = {"NO_TOKEN": 2**31 - 1, "PARTS": 64}
OF_HIDDEN = {**OF_PARTS, "HIDDEN_SIZE": 4096, "HIDDEN_BLOCK": 1024, "HAS_LOGPROBS": True}
DRAW_CONSTANTS = {"TEMPERATURE": 0, "NO_TOKEN": 2**31 - 1, "LARGEST_NOISE": 22.88, "BLOCK": 2048}
COLUMN = {name: index for index, name in enumerate(SamplingParams._fields)}
LIMIT_CONSTANTS = {**{name.upper(): COLUMN[name] for name in ("temperature", *LIMITS)}, "BLOCK": 2048}
CHANGE_CONSTANTS = {**{name.partition("_")[0].upper(): COLUMN[name] for name in PENALTIES}, "BLOCK": 2048}
COUNT = {"counts": "*i32", "tokens": "*i32", "tables": "*i32", "lengths": "*i32", "num_request_tokens": "*i32"}
BIAS = {"changed": "*fp32", "starts": "*i64", "bias_ids": "*i32", "bias_values": "*fp32"}
CHANGE = {"logits": "*bf16", "rows": "*i64", "row_params": "*i32", "counts": "*i32", "changed": "*fp32"}
PARTS = {"logits": "*bf16", "rows": "*i64", "candidates": "*i64"}
CANDIDATES = {"candidates": "*i64", "token_ids": "*i32", "values": "*fp32"}


KERNELS: list[tuple[str, str, dict[str, str], dict[str, object], int]] = [
    ("triton_limits", "_find_least", ROWS, {**LIMIT_CONSTANTS, "HAS_CHANGED": False, "HAS_MASKS": False}, 16),
    ("triton_limits", "_find_least", ROWS, {**LIMIT_CONSTANTS, "HAS_CHANGED": True, "HAS_MASKS": True}, 16),
    ("triton_sample", "_draw_part", DRAW, {**DRAW_CONSTANTS, "HAS_CHANGED": False, "HAS_MASKS": False}, 8),
    ("triton_sample", "_draw_part", DRAW, {**DRAW_CONSTANTS, "HAS_CHANGED": True, "HAS_MASKS": True}, 8),
    ("triton_sample", "_merge_row", MERGE, OF_PARTS, 4),
    ("triton_sample", "_finish_row", FINISH, {**OF_HIDDEN, "HAS_PARTS": True}, 4),
    ("triton_sample", "_finish_row", {**FINISH, "parts": "*i64"}, {**OF_HIDDEN, "HAS_PARTS": False}, 4),
    ("triton_rows", "_count_tokens", COUNT, {"BLOCK": 1024}, 4),
    ("triton_rows", "_add_biases", BIAS, {"BLOCK": 128}, 4),
    ("triton_rows", "_change_rows", CHANGE, CHANGE_CONSTANTS, 4),
    ("triton_sample", "_largest_of_parts", PARTS, {"PART": 8192, "LARGEST_ID": 2**31 - 1}, 8),
    ("triton_sample", "_largest_of_candidates", CANDIDATES, {"NUM": 512, "LARGEST_ID": 2**31 - 1}, 8),
]


@pytest.mark.parametrize("num_processors", [1, 20, 132])
@pytest.mark.parametrize("num_blocks", [1, 2, 16, 63, 128])
def test_parts_of_rows_fill_the_device_and_have_every_block(num_blocks: int, num_processors: int) -> None:
    most = 4 * num_processors
    for num_rows in range(1, 700):
        num_parts, blocks_per_part = parts_of_rows(num_rows, num_blocks, num_processors)
        assert (num_parts - 1) * blocks_per_part < num_blocks <= num_parts * blocks_per_part
        assert num_parts == 1 or num_parts * num_rows <= most, "what runs at once"
        if blocks_per_part > 1:
            fewer = -(-num_blocks // (blocks_per_part - 1))
            assert fewer * num_rows > most, "shorter parts would not all run at once"


@needs_interpreter
@pytest.mark.long
def test_interpreted_draws_equal_torch_and_the_kernels() -> None:
    assert run_python("-m", "tests.model.helpers.interpreted_sampling") == "all equal\n"


@needs_interpreter
@pytest.mark.long
def test_thresholds_equal_those_of_a_sort_in_few_passes() -> None:
    assert run_python("-W", "ignore", "-m", "tests.model.sampling.helpers.interpreted_limits") == "all as expected\n"


@pytest.mark.long
@pytest.mark.parametrize(("module", "kernel", "pointers", "constants", "num_warps"), KERNELS)
def test_the_kernels_compile_for_each_architecture(
    module: str, kernel: str, pointers: dict[str, str], constants: dict[str, object], num_warps: int
) -> None:
    compile_for_gpus(f"tokasaurus.model.sampling.{module}", kernel, pointers, constants, num_warps)
