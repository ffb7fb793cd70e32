"""Errors and perplexities from log-probabilities, and their table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.results import Check, at_most

Logprobs = list[NDArray[np.float32]]
"""Of each text, without its first token."""

MAX_EXACT_ERROR = 1e-3
MAX_INT8_RATIO = 1.01


@dataclass(frozen=True, slots=True)
class Row:
    """One way of computing with one file."""

    weights: str
    """The format: a type of GGUF's blocks, or a flag."""
    types: str
    """Types of the matrices and their shares of the bytes."""
    num_bytes: int
    """Of all weights."""
    way: str
    mean_error: float
    """Mean over tokens of |log-probability - reference|; the reference computes with the same weights, dequantised, in
    float32."""
    p99_error: float
    """99 % of the tokens have at most this error."""
    max_error: float
    perplexity: float
    over_dequantized: float
    """Perplexity over the reference's."""
    over_original: float
    """Perplexity over that of the weights before they were quantised, in float32."""


def make_row(
    weights: str,
    types: str,
    num_bytes: int,
    way: str,
    logprobs: Logprobs,
    dequantized: Logprobs,
    original: Logprobs,
) -> Row:
    """dequantized, original: log-probabilities of the same tokens."""
    errors = np.abs(_joined(logprobs) - _joined(dequantized))
    perplexity = perplexity_of(logprobs)
    return Row(
        *(weights, types, num_bytes, way),
        mean_error=float(errors.mean()),
        p99_error=float(np.quantile(errors, 0.99)),
        max_error=float(errors.max()),
        perplexity=perplexity,
        over_dequantized=perplexity / perplexity_of(dequantized),
        over_original=perplexity / perplexity_of(original),
    )


def perplexity_of(logprobs: Logprobs) -> float:
    return math.exp(-_joined(logprobs).mean())


def _joined(logprobs: Logprobs) -> NDArray[np.float64]:
    values = np.concatenate(logprobs).astype(np.float64)
    assert np.isfinite(values).all(), "a token has no log-probability"
    return values


def check_rows(rows: Sequence[Row]) -> list[Check]:
    """Limits of our own ways of computing; llama.cpp's are only shown."""
    checks: list[Check] = []
    for row in rows:
        if row.way.startswith("exact, float32"):
            checks.append(at_most(f"{row.weights}, {row.way}: largest error", row.max_error, MAX_EXACT_ERROR))
        elif row.way.startswith("int8"):
            name = f"{row.weights}, {row.way}: perplexity over the dequantised weights'"
            checks.append(at_most(name, row.over_dequantized, MAX_INT8_RATIO))
    return checks


def print_rows(rows: Sequence[Row], console: Console) -> None:
    table = Table("weights", "computed by")
    for column in ("MB", "mean error", "99 %", "max", "perplexity", "/ dequantised", "/ original"):
        table.add_column(column, justify="right")
    before = ""
    for row in rows:
        figures = [f"{value:.2g}" for value in (row.mean_error, row.p99_error, row.max_error)]
        ratios = [f"{value:.4f}" for value in (row.perplexity, row.over_dequantized, row.over_original)]
        name = "" if row.weights == before else row.weights
        table.add_row(name, row.way, f"{row.num_bytes / 1e6:.0f}" if name else "", *figures, *ratios)
        before = row.weights
    console.print(table)
    for weights, types in {row.weights: row.types for row in rows}.items():
        console.print(f"{weights}: {types}", soft_wrap=True)
