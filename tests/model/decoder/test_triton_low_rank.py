"""The Triton kernels of adapters without a GPU: interpreted against float64, in whole steps, and compiled for GPUs."""

import pytest

from tests.helpers.installed_triton import compile_for_gpus, needs_interpreter, needs_ptxas, needs_triton, run_python

pytestmark = pytest.mark.cuda_path
LONG = pytest.mark.long

SHRINK = dict.fromkeys(("order", "tiles", "ranks"), "*i32") | {"inner": "*fp32"}
EXPAND = SHRINK | {"blocks": "*i32"}
OF_FEW = {"ROWS": 16, "SPLITS": 8, "NUM_PARTS": 3}
OF_MANY = {"ROWS": 64, "SPLITS": 1, "NUM_PARTS": 2}
INPUTS, OUTPUTS = {"NUM_INPUTS": 4096, "INPUTS": 128}, {"NUM_OUTPUTS": 6144, "COLUMNS": 128}
KERNELS: dict[str, tuple[str, dict[str, object], dict[str, str]]] = {
    f"{name}, {dtype}, rank {rank}, tiles of {sizes['ROWS']}": (
        name,
        {**sizes, "MAX_RANK": rank, "RANKS": min(64, rank), **of_kernel},
        types | dict.fromkeys(("x", "down", "up", "out"), f"*{dtype}"),
    )
    for dtype, precision in (("bf16", "tf32"), ("fp16", "tf32"), ("fp32", "ieee"))
    for sizes, rank in ((OF_FEW, 16), (OF_FEW, 256), (OF_MANY, 64))
    for name, of_kernel, types in (
        ("_shrink_tile", INPUTS | {"INPUTS": 64 if dtype == "fp32" else 128}, SHRINK),
        ("_expand_tile", OUTPUTS | {"PRECISION": precision}, EXPAND),
    )
}


@needs_triton
@needs_interpreter
@LONG
def test_interpreted_kernels_equal_float64() -> None:
    assert run_python("-W", "ignore", "-m", "tests.model.decoder.helpers.interpreted_low_rank") == "all equal\n"


@needs_triton
@needs_interpreter
@pytest.mark.parametrize(
    "check",
    ["changes", pytest.param("texts", marks=pytest.mark.long), pytest.param("compiled", marks=pytest.mark.long)],
)
def test_steps_with_adapters_have_the_texts_of_merged_models(check: str) -> None:
    module = "tests.model.execution.helpers.interpreted_adapters"
    assert run_python("-W", "ignore", "-m", module, check).endswith("all equal\n")


@needs_triton
@needs_ptxas
@LONG
@pytest.mark.parametrize("kind", KERNELS)
def test_the_kernels_compile_for_each_architecture(kind: str) -> None:
    name, constants, types = KERNELS[kind]
    compile_for_gpus("tokasaurus.model.decoder.triton_low_rank", name, types, constants, num_warps=4)
