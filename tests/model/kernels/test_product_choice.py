"""The choice between the kernels' matrix products and torch's, and products by that choice."""

from pathlib import Path

import pytest
import torch

from tests.model.layers.test_linear import activation_dtype, assert_close, fill, layer_kernels, make_norm, random_rows
from tests.model.steps import StepDriver, make_runner
from tests.model.test_decoder import load
from tests.tiny_model import save_tiny_model
from tokasaurus.model.kernels import product_choice
from tokasaurus.model.kernels.library import load_kernels
from tokasaurus.model.kernels.product_choice import MANY_ROWS, ProductChoice, choose_products
from tokasaurus.model.layers.linear import GatedLinear, Linear, OutputShard

CHOICES = [ProductChoice(few, many) for few in (0.5, 2.0) for many in (0.5, 2.0)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_kernels()  # found in the shared cache
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_the_same_whoever_multiplies(dtype: torch.dtype, choice: ProductChoice) -> None:
    linear, norm = Linear(72, 48, bias=True, dtype=dtype), make_norm(72, dtype)
    fill(linear)
    weight, bias = linear.weight.double(), linear.bias.double()
    linear.pack(layer_kernels(), choice)
    for num_rows in (1, MANY_ROWS - 1, MANY_ROWS, 100):
        x = random_rows(num_rows, 72, activation_dtype(dtype))
        assert linear.runs_on_kernels(num_rows) == choice.uses_kernels(num_rows)
        assert_close(linear(x, norm), norm(x).double() @ weight.T + bias)


@pytest.mark.parametrize("choice", CHOICES)
def test_gated_products_are_the_same_whoever_multiplies(choice: ProductChoice) -> None:
    gate, up = (OutputShard(name, 40, 0, 40) for name in ("gate", "up"))
    linear = GatedLinear(64, gate, up, torch.float32)
    fill(linear)
    linear.weight.mul_(0.3)
    weight = linear.weight.double()
    linear.pack(layer_kernels(), choice)
    for num_rows in (1, MANY_ROWS):
        x = random_rows(num_rows, 64, torch.float32)
        gates, ups = (x.double() @ weight.T).chunk(2, dim=1)
        assert_close(linear(x), torch.nn.functional.silu(gates) * ups)


@pytest.mark.parametrize("choice", CHOICES)
def test_models_give_the_same_tokens_whoever_multiplies(choice: ProductChoice, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2")
    prompt = [(7 * i) % 250 for i in range(MANY_ROWS + 8)]  # many rows; then decode, few

    def generate(chosen: ProductChoice) -> list[int]:
        model, info = load(tmp_path)
        model.pack(load_kernels(), chosen)
        driver = StepDriver(make_runner(model, info, "cpu"))
        driver.open(1, prompt)
        tokens = [driver.run([], [(1, len(prompt))])[1][0]]
        while len(tokens) < 6:
            tokens.append(driver.run([1], [])[1][0])
        return tokens

    assert generate(choice) == generate(product_choice.ALWAYS_KERNELS)


def test_the_choice_is_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = load_kernels()
    assert kernels is not None
    monkeypatch.setattr(product_choice, "_MATRIX_BYTES", 1 << 16)
    first = choose_products(kernels, 64, torch.bfloat16)
    assert first.few_speedup > 0
    assert first.many_speedup > 0

    def measure_again(*_: object) -> ProductChoice:
        raise AssertionError("it is in the cache")

    with monkeypatch.context() as patch:
        patch.setattr(product_choice, "_measure", measure_again)
        assert choose_products(kernels, 64, torch.bfloat16) == first
        with pytest.raises(AssertionError, match="in the cache"):
            choose_products(kernels, 96, torch.bfloat16)  # another model


def test_a_broken_file_or_no_place_to_write_only_means_another_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = load_kernels()
    assert kernels is not None
    monkeypatch.setattr(product_choice, "_MATRIX_BYTES", 1 << 16)
    choose_products(kernels, 64, torch.float32)
    (file,) = (tmp_path / "cache" / "products").iterdir()
    file.write_text("{")
    assert choose_products(kernels, 64, torch.float32).few_speedup > 0
    monkeypatch.setenv("TOKA_CACHE", "/dev/null/cache")
    assert choose_products(kernels, 64, torch.float32).few_speedup > 0


def test_the_line_for_the_user_names_each_winner() -> None:
    assert ProductChoice(2.0, 0.5).describe() == (
        "few rows by kernels (2.00 x torch), from 32 rows on by torch (2.00 x kernels)"
    )
