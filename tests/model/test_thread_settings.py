"""How long OpenMP threads spin is set before torch loads OpenMP."""

import os
import subprocess
import sys

import pytest

SCRIPT = "import sys, os, tokasaurus.model; print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "False 2000"),
        ({"GOMP_SPINCOUNT": "5"}, "False 5"),
        ({"OMP_WAIT_POLICY": "passive"}, "False None"),
    ],
)
def test_the_spin_count_is_short_unless_the_user_sets_it(given: dict[str, str], expected: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**inherited, **given}, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == expected
