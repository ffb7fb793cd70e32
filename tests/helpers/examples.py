"""How many random cases a test tries: few in `make test`, all of them in `make test-long`."""

import os
from collections.abc import Iterable
from typing import Any

import hypothesis
import pytest
from _pytest.mark import ParameterSet

IS_NIGHTLY = bool(os.environ.get("TOKA_NIGHTLY"))
"""Set by `make test-long`."""


def examples(num_nightly: int, num_quick: int | None = None, **options: Any) -> hypothesis.settings:
    """Decorates a test that hypothesis calls. num_quick: examples in `make test`; a tenth unless it is given."""
    quick = max(num_nightly // 10, 10) if num_quick is None else num_quick
    return hypothesis.settings(max_examples=num_nightly if IS_NIGHTLY else quick, **options)


def seeds(num_nightly: int) -> list[Any]:
    """Values of a parameter: a tenth of them, the others are long."""
    num_quick = max(num_nightly // 10, 3)
    return [*range(num_quick), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(num_quick, num_nightly))]


def few(num_quick: int, names: str | tuple[str, ...], cases: Iterable[Any], **options: Any) -> pytest.MarkDecorator:
    """As pytest.mark.parametrize: `make test` has the first `num_quick` cases, the others are long."""
    params = []
    for number, case in enumerate(cases):
        is_param = isinstance(case, ParameterSet)
        values = case.values if is_param else (case,) if isinstance(names, str) else tuple(case)
        marks = case.marks if is_param else ()
        name = case.id if is_param else None
        params.append(pytest.param(*values, marks=marks if number < num_quick else (*marks, pytest.mark.long), id=name))
    return pytest.mark.parametrize(names, params, **options)
