"""The choice between the kernels' gemms and torch's, and gemms computed by that choice."""

from pathlib import Path

import pytest
import torch

from tests.helpers.damage import DAMAGE
from tests.helpers.plain_info import with_layers
from tests.helpers.tiny_model import save_tiny_model
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.linear_layers import (
    activation_dtype,
    assert_close,
    fill,
    layer_kernels,
    make_norm,
    random_rows,
)
from tests.model.helpers.steps import StepDriver, make_runner
from tokasaurus.checkpoint import ModelInfo
from tokasaurus.checkpoint.spec import MLPSpec
from tokasaurus.model.cpu import gemm_choice
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.cpu.gemm_choice import MANY_ROWS, GemmChoice, choose_gemm
from tokasaurus.model.decoder.layers import ActivatedLinear, Linear

CHOICES = [GemmChoice(few, many) for few in (0.5, 2.0) for many in (0.5, 2.0)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_kernels()  # found in the shared cache
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemms_are_the_same_by_kernels_and_by_torch(dtype: torch.dtype, choice: GemmChoice) -> None:
    linear, norm = Linear(72, 48, bias=True, dtype=dtype), make_norm(72, dtype)
    fill(linear)
    weight, bias = linear.weight.double(), linear.bias.double()
    linear.pack(layer_kernels(), choice)
    for num_rows in (1, MANY_ROWS - 1, MANY_ROWS, 100):
        x = random_rows(num_rows, 72, activation_dtype(dtype))
        assert linear.runs_on_kernels(num_rows) == choice.uses_kernels(num_rows)
        assert_close(linear(x, norm), norm(x).double() @ weight.T + bias)


@pytest.mark.parametrize("choice", CHOICES)
def test_gated_gemms_are_the_same_by_kernels_and_by_torch(choice: GemmChoice) -> None:
    linear = ActivatedLinear(64, MLPSpec(40), 0, 40, torch.float32)
    fill(linear)
    linear.weight.mul_(0.3)
    weight = linear.weight.double()
    linear.pack(layer_kernels(), choice)
    for num_rows in (1, MANY_ROWS):
        x = random_rows(num_rows, 64, torch.float32)
        gates, ups = (x.double() @ weight.T).chunk(2, dim=1)
        assert_close(linear(x), torch.nn.functional.silu(gates) * ups)


@pytest.mark.parametrize("choice", CHOICES)
def test_models_give_the_same_tokens_by_kernels_and_by_torch(choice: GemmChoice, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2")
    prompt = [(7 * i) % 250 for i in range(MANY_ROWS + 8)]  # many rows; then decode, few

    def generate(chosen: GemmChoice) -> list[int]:
        model, info = load(tmp_path)
        model.pack(load_kernels(), chosen)
        driver = StepDriver(make_runner(model, info, "cpu"))
        driver.open(1, prompt)
        tokens = [driver.run([], [(1, len(prompt))])[1][0]]
        while len(tokens) < 6:
            tokens.append(driver.run([1], [])[1][0])
        return tokens

    assert generate(choice) == generate(gemm_choice.ALWAYS_KERNELS)


@pytest.fixture
def info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelInfo:
    """Info of a tiny model, whose gemms take little time to measure."""
    monkeypatch.setattr(gemm_choice, "_ALL_BYTES", 1 << 18)
    save_tiny_model(tmp_path / "model", "qwen2")
    return load(tmp_path / "model")[1]


def test_the_choice_is_measured_once_and_cached(info: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = load_kernels()
    assert kernels is not None
    first = choose_gemm(kernels, info, torch.bfloat16)
    assert first.few_speedup > 0
    assert first.many_speedup > 0
    assert first.may_mix == kernels.has_bfloat16_arithmetic

    def measure_again(*_: object) -> GemmChoice:
        raise AssertionError("it is in the cache")

    with monkeypatch.context() as patch:
        patch.setattr(gemm_choice, "_measure", measure_again)
        assert choose_gemm(kernels, info, torch.bfloat16) == first
        other_model = with_layers(info, mlp=MLPSpec(128))
        with pytest.raises(AssertionError, match="in the cache"):
            choose_gemm(kernels, other_model, torch.bfloat16)
        with pytest.raises(AssertionError, match="in the cache"):
            choose_gemm(kernels, info, torch.float32)
        # A library from a wheel: all instruction sets are in one directory.
        patch.setattr(kernels, "path", kernels.path.with_name("other.so"))
        with pytest.raises(AssertionError, match="in the cache"):
            choose_gemm(kernels, info, torch.bfloat16)


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_choice_is_measured_again(
    info: ModelInfo, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = load_kernels()
    assert kernels is not None
    choices = iter([GemmChoice(1.5, 1.25), GemmChoice(1.75, 1.0)])
    monkeypatch.setattr(gemm_choice, "_measure", lambda *_: next(choices))
    first = choose_gemm(kernels, info, torch.float32)
    (file,) = (tmp_path / "cache" / "gemm").glob("*/choice.json")
    DAMAGE[kind](file)
    second = choose_gemm(kernels, info, torch.float32)
    assert second != first
    assert choose_gemm(kernels, info, torch.float32) == second


def test_an_unwritable_cache_only_causes_another_measurement(info: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = load_kernels()
    assert kernels is not None
    monkeypatch.setenv("TOKA_CACHE", "/dev/null/cache")
    assert choose_gemm(kernels, info, torch.float32).few_speedup > 0


def test_torch_gemms_are_chosen_only_if_clearly_faster() -> None:
    assert GemmChoice(0.9, 0.9).always_kernels
    assert GemmChoice(0.8, 0.8).always_torch
    assert not GemmChoice(0.8, 2.0).uses_kernels(1)
    assert GemmChoice(0.8, 2.0, may_mix=False).always_kernels
    assert GemmChoice(0.8, 0.8, may_mix=False).always_torch


def test_the_description_names_the_faster_gemm_for_few_and_many_rows() -> None:
    assert GemmChoice(2.0, 0.5).describe() == (
        "few rows by kernels (2.00 x torch), from 32 rows on by torch (2.00 x kernels)"
    )
