"""How many random cases a test tries: few in `make test`, all of them in `make test-long`."""

import os
from typing import Any

import hypothesis
import pytest

IS_NIGHTLY = bool(os.environ.get("TOKA_NIGHTLY"))
"""Set by `make test-long`."""


def examples(num_nightly: int, num_quick: int | None = None, **options: Any) -> hypothesis.settings:
    """Decorates a test that hypothesis calls. num_quick: examples in `make test`; a fifth unless it is given."""
    quick = max(num_nightly // 5, 20) if num_quick is None else num_quick
    return hypothesis.settings(max_examples=num_nightly if IS_NIGHTLY else quick, **options)


def seeds(num_nightly: int) -> list[Any]:
    """Values of a parameter: a fifth of them, the others are long."""
    num_quick = max(num_nightly // 5, 4)
    return [*range(num_quick), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(num_quick, num_nightly))]
