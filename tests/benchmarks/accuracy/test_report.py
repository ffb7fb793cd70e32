"""The accuracy benchmark's figures, from given log-probabilities."""

import math

import numpy as np
import pytest

from benchmarks.accuracy.report import Row, check_rows, make_row


def of(*texts: list[float]) -> list[np.ndarray]:
    return [np.array(text, np.float32) for text in texts]


def row(way: str, logprobs: list[np.ndarray]) -> Row:
    return make_row("Q4_0", "", 1, way, logprobs, dequantized=of([-1, -2], [-3]), original=of([-1, -1], [-1]))


def test_errors_count_each_token_once_and_perplexity_is_over_all_tokens() -> None:
    found = row("int8, float32", of([-1.5, -2], [-2]))
    assert found.mean_error == pytest.approx(0.5)
    assert found.max_error == 1
    assert found.perplexity == pytest.approx(math.exp(5.5 / 3))
    assert found.over_dequantized == pytest.approx(math.exp(-0.5 / 3))
    assert found.over_original == pytest.approx(math.exp(2.5 / 3))


def test_the_reference_has_no_error() -> None:
    found = row("dequantised, float32", of([-1, -2], [-3]))
    assert (found.mean_error, found.p99_error, found.max_error, found.over_dequantized) == (0, 0, 0, 1)


def test_a_token_without_a_log_probability_is_no_figure() -> None:
    with pytest.raises(AssertionError, match="no log-probability"):
        row("int8, float32", of([-1, math.nan], [-2]))


def test_limits_are_of_exact_errors_in_float32_and_of_the_perplexity_of_integers() -> None:
    off = of([-1.5, -2], [-3])
    checks = check_rows([row(way, off) for way in ("exact, float32", "exact, bfloat16", "int8, bfloat16", "llama.cpp")])
    assert [check.is_met for check in checks] == [False, False]
    assert [check.name.split(", ", 1)[1].split(":")[0] for check in checks] == ["exact, float32", "int8, bfloat16"]
