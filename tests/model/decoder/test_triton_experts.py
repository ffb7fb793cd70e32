"""The Triton kernels of experts without a GPU: interpreted against float64 and transformers, and compiled for GPUs."""

import pytest

from tests.helpers.installed_triton import compile_for_gpus, needs_interpreter, needs_ptxas, needs_triton, run_python

pytestmark = [pytest.mark.cuda_path, pytest.mark.long]

ROUTER = {"NUM_EXPERTS": 96, "EXPERTS": 128, "NUM_CHOSEN": 6, "CHOSEN": 8}
OF_ROUTER = dict.fromkeys(("logits", "choice_bias", "weights", "scale", "min_sum"), "*fp32") | {"chosen": "*i64"}
OF_ROUTER |= dict.fromkeys(("scale", "min_sum"), "fp32")
SIZES = {"NUM_EXPERTS": 96, "EXPERTS": 128, "NUM_INPUTS": 2048, "NUM_OUTPUTS": 1536, "COLUMNS": 128}
KERNELS: dict[str, tuple[str, dict[str, object], dict[str, str]]] = {
    f"{dtype}, tiles of {rows}": (
        "_multiply_tile",
        SIZES | {"ROWS": rows, "INPUTS": 32 if dtype == "fp32" else 64},
        dict.fromkeys(("x", "weight", "out"), f"*{dtype}") | {"ends": "*i32"},
    )
    for dtype in ("bf16", "fp16", "fp32")
    for rows in (16, 64)
}
KERNELS |= {
    scores: ("_choose_row", ROUTER | {"SCORES": scores, "HAS_BIAS": has_bias, "NORMALIZES": normalizes}, OF_ROUTER)
    for scores, has_bias, normalizes in (
        *(("softmax", False, True), ("sigmoid", True, True)),
        *(("softmax_of_chosen", False, False), ("sigmoid_of_chosen", False, False)),
    )
}
KERNELS["sort"] = (
    *("_sort_expert", {"NUM_EXPERTS": 128, "BLOCK": 1024}),
    dict.fromkeys(("experts", "order"), "*i64") | {"ends": "*i32"},
)


@needs_triton
@needs_interpreter
def test_interpreted_kernels_equal_float64_and_whole_models_transformers() -> None:
    printed = run_python("-W", "ignore", "-m", "tests.model.decoder.helpers.interpreted_experts")
    assert printed.endswith("all equal\n")


@needs_triton
@needs_ptxas
@pytest.mark.parametrize("kind", KERNELS)
def test_the_kernels_compile_for_each_architecture(kind: str) -> None:
    name, constants, types = KERNELS[kind]
    compile_for_gpus("tokasaurus.model.decoder.triton_experts", name, types, constants, num_warps=4)
