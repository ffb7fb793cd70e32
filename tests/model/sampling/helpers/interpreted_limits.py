"""Thresholds of limits and passes over the vocabulary of the Triton sampler, in Triton's interpreter. Run as a module.

A process of its own: the variable TRITON_INTERPRET must be set before anything imports Triton, and then holds for all.
"""

import contextlib
import os
import unittest.mock
from collections.abc import Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpreterBuilder

from tests.model.helpers.sampling_rows import make_rows, noise_keys, with_params
from tokasaurus.model.sampling import triton_rows
from tokasaurus.model.sampling.sample import sample_by_triton
from tokasaurus.model.sampling.triton_limits import find_least
from tokasaurus.model.sampling.triton_rows import row_arguments

FLAGS = {"HAS_CHANGED": False, "HAS_MASKS": False}
TOP_PS = [1e-4, 0.01, 0.3, 0.9, 0.95, 0.99, 0.9999, 1 - 2.0**-24]
MIN_PS = [1e-4, 0.02, 0.5, 1.0]


def distributions(rng: np.random.Generator, size: int) -> Iterator[tuple[str, NDArray[np.floating]]]:
    """Rows of logits."""
    normal = rng.normal(0, 2.5, size)
    yield "normal", normal
    yield "flat", rng.normal(0, 0.01, size)
    yield "very flat", 20 + rng.normal(0, 1e-5, size)
    yield "all equal", np.full(size, 3.25)
    yield "around zero", rng.normal(0, 1e-30, size)
    yield "zeros of both signs", rng.choice([0.0, -0.0, -2.0], size)
    yield "one peak", np.where(np.arange(size) == size // 2, 25.0, normal / 10)
    yield "few values", rng.integers(-5, 5, size) / 2
    yield "large", normal * 1000
    yield "heavy tail", rng.standard_cauchy(size)
    yield "falling", -np.log1p(np.arange(size)) * 1.1
    yield "rising", np.arange(size) / size * 3
    yield "one class of ids", np.where(np.arange(size) % 256 == 3, normal + 9, normal)
    yield "few tokens allowed", np.where(rng.random(size) < 3 / size, normal, -np.inf)
    yield "half allowed", np.where(rng.random(size) < 0.5, normal, -np.inf)
    yield "one allowed", np.where(np.arange(size) == size - 1, 1.0, -np.inf)
    yield "none allowed", np.full(size, -np.inf)


def all_limits(rng: np.random.Generator, size: int) -> list[tuple[float, int, float]]:
    """(top_p, top_k, min_p) of some rows: each kind alone, and some together."""
    top_ks = [1, 2, 5, 40, size // 3, size - 1, size, 3 * size]
    alone = [(1.0, 0, 0.0), *((p, 0, 0.0) for p in TOP_PS), *((1.0, k, 0.0) for k in top_ks)]
    alone += [(1.0, 0, p) for p in MIN_PS]
    together = [
        (float(rng.choice([*TOP_PS, 1.0])), int(rng.choice([0, *top_ks])), float(rng.choice([0.0, *MIN_PS])))
        for _ in range(12)
    ]
    return alone + together


def check_threshold(adjusted: NDArray[np.float32], least: float, limits: tuple[float, int, float]) -> None:
    """Against a sort in float64. Sums of probabilities may differ by rounding."""
    top_p, top_k, min_p = limits
    largest = adjusted.max()
    if largest == -np.inf:
        return
    kept = adjusted >= np.float32(least)
    assert kept[adjusted == largest].all()
    values = adjusted.astype(np.float64)
    by_min_p = float(largest + np.log(np.float32(min_p))) if min_p else -np.inf
    by_top_k = np.sort(values)[::-1][top_k - 1] if 0 < top_k < len(values) else -np.inf
    inside = values >= max(by_min_p, by_top_k)
    assert not kept[~inside].any(), "min_p and top_k exclude them"
    if top_p == 1.0:
        assert kept[inside].all(), "no limit excludes them"
        return
    mass = np.exp(values - largest)
    mass[~inside] = 0
    target, tolerance = top_p * mass.sum(), 3e-6 * mass.sum()
    assert mass[kept].sum() >= target - tolerance, "fewer than top_p"
    assert mass[values > values[kept].min()].sum() < target + tolerance, "more than top_p"


def check_thresholds(block: int, size: int, seed: int) -> None:
    """block: token ids of one class differ by a multiple of it."""
    rng = np.random.default_rng(seed)
    for name, row in distributions(rng, size):
        limits = all_limits(rng, size)
        rng.shuffle(limits)
        limits = limits[:5]
        columns = [np.array(column) for column in zip(*limits, strict=True)]
        temperature = rng.choice([1.0, 0.7, 2.0], len(limits)).astype(np.float32)
        keys = noise_keys([1] * len(limits), [0] * len(limits), [1] * len(limits))
        rows = make_rows(temperature.tolist(), [1.0] * len(limits), keys)
        rows = with_params(rows, top_p=columns[0], top_k=columns[1], min_p=columns[2])
        logits = torch.tensor(np.tile(row, (len(limits), 1)), dtype=torch.float32)
        if seed % 2:
            logits = logits.bfloat16()
        with unittest.mock.patch.object(triton_rows, "_BLOCK", block):
            arguments = row_arguments(logits, slice(0, len(limits)), rows.device_params, None, None)
            found = find_least(len(limits), size, torch.device("cpu"), *arguments, **FLAGS)
        for index, own in enumerate(limits):
            adjusted = (logits[index].float() / float(temperature[index])).numpy()
            try:
                check_threshold(adjusted, float(found[index]), own)
            except AssertionError as error:
                raise AssertionError(f"{name}, seed {seed}, {own}, temperature {temperature[index]}") from error


@contextlib.contextmanager
def counted_reads(tensor: torch.Tensor) -> Iterator[list[int]]:
    """The number of elements that kernels load from a tensor, one count for each load."""
    counts: list[int] = []
    first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    load = InterpreterBuilder.create_masked_load

    def counting(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        is_inside = mask.data & (pointers.data >= first) & (pointers.data < end)
        counts.append(int(is_inside.sum()))
        return load(self, pointers, mask, *others)

    with unittest.mock.patch.object(InterpreterBuilder, "create_masked_load", counting):
        yield counts


def passes(logits: torch.Tensor, limits: tuple[float, int, float], temperature: float, block: int = 2048) -> float:
    """How often the sampler reads each logit of a row."""
    rows = with_params(
        make_rows([temperature], [limits[0]], noise_keys([1], [0], [5])),
        top_k=np.array([limits[1]]),
        min_p=np.array([limits[2]]),
    )
    with counted_reads(logits) as counts, unittest.mock.patch.object(triton_rows, "_BLOCK", block):
        sample_by_triton(logits, rows)
    return round(sum(counts) / logits.shape[1], 2)


def check_logarithms() -> None:
    """Noise is computed for few tokens: two logarithms each."""
    size = 128_256
    logits = torch.randn((1, size), generator=torch.Generator().manual_seed(0))
    count = 0
    logarithm = InterpreterBuilder.create_log

    def counting(self: Any, argument: Any) -> Any:
        nonlocal count
        count += argument.data.size
        return logarithm(self, argument)

    keys = noise_keys(list(range(6)), [0] * 6, [5] * 6)
    with unittest.mock.patch.object(InterpreterBuilder, "create_log", counting):
        sample_by_triton(logits.expand(6, size), make_rows([1.0] * 6, [1.0] * 6, keys))
    assert 0 < count < 0.2 * 2 * 6 * size


def check_passes() -> None:
    """At the size of a large vocabulary, of logits like a model's: some tokens far above a normal distribution."""
    rng = np.random.default_rng(0)
    size = 151_936
    model_like = rng.normal(0, 2.2, size) + 8 * (rng.random(size) < 0.001)
    logits = torch.tensor(model_like[None], dtype=torch.bfloat16)
    for temperature in (0.0, 0.6, 1.0):
        assert passes(logits, (1.0, 0, 0.0), temperature) == 1
    for limits in ((0.9, 0, 0.0), (0.95, 0, 0.0), (0.5, 0, 0.0), (1.0, 40, 0.0), (1.0, 0, 0.02), (0.9, 50, 0.01)):
        assert passes(logits, limits, 0.8) == 2, limits
        assert passes(logits, limits, 0.0) == 1, "greedy rows have no limits"
    flat = torch.tensor(rng.normal(0, 1, (1, size)), dtype=torch.float32)
    for limits, most in (((0.9, 0, 0.0), 10), ((1.0, 30_000, 0.0), 10), ((0.95, 30_000, 0.001), 18)):
        found = passes(flat, limits, 1.0)
        assert 3 < found <= most, (limits, found)
    equal = torch.zeros(1, size, dtype=torch.bfloat16)
    assert passes(equal, (1.0, 1000, 0.0), 1.0) == 2
    assert passes(equal, (0.9, 0, 0.0), 1.0) == 3


def main() -> None:
    for seed, (block, size) in enumerate([(64, 600), (16, 150), (256, 1300), (2048, 1)]):
        check_thresholds(block, size, seed)
    check_passes()
    check_logarithms()
    print("all as expected")


if __name__ == "__main__":
    main()
