"""What is recorded of FlashInfer's calls against the packages in .venv-flashinfer, and our backend over their Python
wrappers and their planner: `make test-flashinfer`."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.model.attention.helpers.flashinfer_real import HEADS, KIND_HEADS, PROMPT_ROWS, ROWS, WINDOW
from tests.model.attention.helpers.flashinfer_source import RECORD, read_package
from tokasaurus.messages.status import DEFAULT_HYDRAGEN, HydragenCosts
from tokasaurus.model.buffer_sizes import plan_bytes

PACKAGES = Path(__file__).resolve().parents[1] / ".venv-flashinfer"
RECORDED = json.loads(RECORD.read_text())


@pytest.mark.parametrize("version", RECORDED)
def test_the_record_is_what_the_package_has(version: str) -> None:
    found = read_package(PACKAGES / version)
    assert json.loads(json.dumps(found)) == RECORDED[version]


@pytest.mark.parametrize("version", RECORDED)
def test_the_decode_wrapper_hands_every_keyword_of_plan_on(version: str) -> None:
    """Its `plan` takes any keyword; those of its table of deprecated arguments are parameters of `_plan_impl`."""
    tree = ast.parse((PACKAGES / version / "flashinfer/decode.py").read_text())
    (table,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_BATCH_DECODE_PLAN_LEGACY_POS_ARGS"
    )
    parameters = {name for name, _, _ in RECORDED[version]["wrappers"]["BatchDecodeWithPagedKVCacheWrapper"]["plan"]}
    assert set(ast.literal_eval(table)) <= parameters
    assert {"sm_scale", "q_data_type", "kv_data_type", "o_data_type"} <= set(ast.literal_eval(table))


def test_both_wrappers_are_at_the_top_of_the_package() -> None:
    for version, found in RECORDED.items():
        names = {
            alias.name
            for node in ast.parse((PACKAGES / version / "flashinfer/__init__.py").read_text()).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        assert set(found["wrappers"]) <= names


@pytest.mark.parametrize("version", RECORDED)
def test_the_planner_does_not_read_the_lengths(version: str) -> None:
    """Our backend gives one length for all segments."""
    source = (PACKAGES / version / "flashinfer/data/csrc/batch_prefill.cu").read_text()
    (function,) = re.findall(r"^Array<int64_t> BatchPrefillWithKVCachePlan\(.*?^}", source, re.MULTILINE | re.DOTALL)
    assert "kv_indptr.data_ptr()" in function
    assert function.count("kv_len_arr") == 1, "the parameter"


@pytest.fixture(scope="module", params=RECORDED)
def over_real_wrappers(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What our backend and the wrappers of one version did, by heads and rows. In a process of its own, since both
    packages have the same name."""
    words = ["tests.model.attention.helpers.flashinfer_real", str(PACKAGES / request.param), str(PACKAGES / "needs")]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("heads", HEADS)
def test_eager_and_recorded_steps_run_over_the_real_wrappers(
    heads: tuple[int, int, int], num_rows: int, over_real_wrappers: dict[str, Any]
) -> None:
    """Partial parts and whole ones. Plans of 40 different contexts of one size are the same, so that recordings stay
    valid; the planner took no more memory than there is. With 3 query heads a KV head, decode runs on CUDA cores: its
    planner splits contexts unless the rows fill the device, for whatever number of blocks a multiprocessor takes."""
    found = over_real_wrappers["/".join(map(str, heads)) + f" {num_rows}"]
    assert found["dtypes"] == ["torch.bfloat16"]
    assert found["lse"] == ["torch.float32"] * 2, "of the two partial parts"
    assert found["same_plans"]
    is_split = heads != (9, 3, 64) or num_rows < 1024
    assert (found["asked"][0] > 0) is is_split
    assert found["asked"][0] <= found["workspace"]
    assert 0 < found["asked"][1] <= found["plan_memory"] == 1 << 20


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("heads", HEADS)
def test_recorded_steps_with_prefix_groups_run_over_the_real_wrappers(
    heads: tuple[int, int, int], num_rows: int, over_real_wrappers: dict[str, Any]
) -> None:
    """Plans of the prefixes are the same for 40 numbers of groups, rows in them and lengths, and fit."""
    every = over_real_wrappers["/".join(map(str, heads)) + f" {num_rows}"]
    found = every["recorded_groups"]
    print(f"heads {heads}, {num_rows} rows: {found['asked'][0]:,} of {every['workspace']:,}, {found['plan_ms']:.3f} ms")
    assert found["same_plans"]
    assert 0 < found["asked"][0] <= every["workspace"]
    assert 0 < found["asked"][1] <= found["plan_memory"] == 1 << 20
    assert found["plan_ms"] <= 2


def test_the_planner_of_fa3_gets_the_length_of_each_prompt(over_real_wrappers: dict[str, Any]) -> None:
    assert over_real_wrappers["fa3"] == [40, 3, 200]


@pytest.mark.parametrize("heads", HEADS)
def test_compiled_functions_are_given_the_same_without_the_wrappers(
    heads: tuple[int, int, int], over_real_wrappers: dict[str, Any]
) -> None:
    """By address, shape and value, of each planned and run part."""
    compared = over_real_wrappers["/".join(map(str, heads)) + " calls"]
    assert compared == {
        f"{name}, {kernels}": 2 * num_parts
        for name, num_parts in (("decode and prompts", 2), ("groups and prompts", 4), ("one row", 1))
        for kernels in ("fa3", "fa2")
    }


@pytest.mark.parametrize("heads", KIND_HEADS)
def test_each_kind_of_layer_has_kernels_numbers_and_plans_of_its_own(
    heads: tuple[int, int, int], over_real_wrappers: dict[str, Any]
) -> None:
    """Layers 0 and 2 are usual, the last one with sinks; layer 1 has a window, a cap and a scale, and decodes on tensor
    cores. Recorded plans are the same for 40 contexts, and fit; without windows, so are those of prefixes."""
    found = over_real_wrappers["/".join(map(str, heads)) + " kinds"]
    on_cuda_cores = [["decode", [False, False]]] if heads == (9, 3, 64) else []
    assert found["modules"] == [*on_cuda_cores, ["fa2", [False, False]], ["fa2", [True, True]]]
    usual, limited, with_sinks = map(set, found["numbers"])
    assert usual == with_sinks
    assert {WINDOW - 1, 20.0, 0.2} <= limited
    assert {WINDOW - 1, 20.0, 0.2}.isdisjoint(usual)
    assert heads[2] ** -0.5 in usual - limited
    assert found["compared"] == {"decode and prompts, fa2": 2 * (2 + 3), "one row, fa2": 2 + 3}
    assert found["num_plans"] == found["num_memories"] == 2
    for each in (found, found["recorded_groups"]):
        assert each["same_plans"]
        assert 0 < each["asked"][0] <= found["workspace"]
        assert 0 < each["asked"][1] <= each["plan_memory"] == 1 << 20


@pytest.mark.parametrize("version", RECORDED)
def test_a_window_ends_with_the_rows_own_token_and_has_one_token_more_than_its_number(version: str) -> None:
    """Which is what we give, less one; a cap is as of tanh."""
    directory = PACKAGES / version / "flashinfer/data/include/flashinfer/attention"
    variants = (directory / "variants.cuh").read_text()
    assert "mask &= (kv_idx + qo_len + window_left >= kv_len + qo_idx);" in variants
    assert "soft_cap_pre_tanh_scale = params.sm_scale * math::ptx_rcp(params.logits_soft_cap);" in variants
    assert "sm_scale_log2 = math::log2e * params.logits_soft_cap;" in variants


@pytest.mark.parametrize("num_rows", PROMPT_ROWS)
@pytest.mark.parametrize("heads", HEADS)
def test_plans_of_prompts_fit_in_the_memory_of_their_wrappers(
    heads: tuple[int, int, int], num_rows: int, over_real_wrappers: dict[str, Any]
) -> None:
    """Of 1 MiB for 8,192 rows, and of more for more."""
    found = over_real_wrappers["/".join(map(str, heads)) + " 1024"]["prompts"][str(num_rows)]
    print(f"heads {heads}, {num_rows} rows: {found['asked']:,} of {found['plan_memory']:,} bytes")
    assert 0 < found["asked"] <= found["plan_memory"] == plan_bytes(num_rows)
    assert (found["plan_memory"] == 1 << 20) is (num_rows == 8192)


@pytest.mark.parametrize("heads", HEADS)
def test_an_eager_decode_step_of_1024_rows_is_planned_in_a_fraction_of_a_millisecond(
    heads: tuple[int, int, int], over_real_wrappers: dict[str, Any]
) -> None:
    """As a recorded one."""
    milliseconds = over_real_wrappers["/".join(map(str, heads)) + " 1024"]["eager_plan_ms"]
    print(f"heads {heads}: {milliseconds:.3f} ms")
    assert milliseconds <= 0.6


@pytest.mark.parametrize("heads", HEADS)
def test_a_recorded_step_of_1024_rows_is_planned_in_a_fraction_of_a_millisecond(
    heads: tuple[int, int, int], over_real_wrappers: dict[str, Any]
) -> None:
    """The median on the host; 8 ms with the wrapper's own plan of 0.6.18 on tensor cores. Twice the target of 0.3 ms,
    for machines that others use too."""
    milliseconds = over_real_wrappers["/".join(map(str, heads)) + " 1024"]["plan_ms"]
    print(f"heads {heads}: {milliseconds:.3f} ms")
    assert milliseconds <= 0.6


@pytest.mark.parametrize("heads", HEADS)
def test_a_step_with_groups_costs_the_host_a_fraction_of_a_millisecond_a_layer(
    heads: tuple[int, int, int], over_real_wrappers: dict[str, Any]
) -> None:
    """Of 16 rows, without the launches themselves. What this makes of a step is measured at each start."""
    found = over_real_wrappers["/".join(map(str, heads)) + " 16"]["groups"]
    print(f"heads {heads}: plan {found['plan_ms']:.3f} ms, attention {found['layer_ms']:.3f} ms a layer")
    assert found["plan_ms"] <= 2
    assert found["layer_ms"] <= 1


@pytest.mark.parametrize("version", RECORDED)
def test_a_recorded_step_costs_the_host_little_with_a_prompt_and_without(version: str) -> None:
    """Of 16 layers, with 100 decode rows, and a chunk of 300 tokens beside them. Processor time without launches."""
    words = ["tests.model.execution.helpers.host_time", str(PACKAGES / version), str(PACKAGES / "needs")]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name, step in found.items():
        print(f"{name}: {step['host_us']:,} µs, {step['launches']}")
    launched, recorded = found["mixed, launched"]["launches"], found["mixed, graphs"]["launches"]
    per_layer = {"gemm": 4, "add_norm": 2, "rotate_heads": 1, "silu_mul": 1, "write_kv": 1, "attention": 2}
    assert {name: (launched[name] - (name == "gemm")) / 16 for name in per_layer} == per_layer  # one gemm for logits
    assert recorded.keys().isdisjoint({"add_norm", "rotate_heads", "silu_mul"})
    assert recorded["graph"] == 16 + 1 + 2, "the LM head's and sampling's too"
    assert "gemm" not in recorded
    assert recorded["attention"] == 2 * 16
    assert "write_kv" not in recorded
    assert sum(recorded.values()) - (19 + 32) < 40, "nothing else for each layer"
    assert found["mixed, graphs"]["host_us"] <= 1500
    assert found["decode, graphs"]["host_us"] <= 800


@pytest.mark.parametrize("heads", HEADS)
def test_costs_of_groups_are_measured_over_the_real_wrappers(
    heads: tuple[int, int, int], over_real_wrappers: dict[str, Any]
) -> None:
    """Their values mean nothing here."""
    costs = HydragenCosts(**over_real_wrappers["/".join(map(str, heads)) + " 16"]["costs"])
    assert costs != DEFAULT_HYDRAGEN, "measured"
    assert costs.saved(1, 1024) <= 1e-6


def test_an_output_in_float32_is_refused(over_real_wrappers: dict[str, Any]) -> None:
    assert over_real_wrappers["refused"] == "torch.float32"
