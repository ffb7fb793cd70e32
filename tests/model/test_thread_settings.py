"""How long OpenMP threads spin is settled before torch loads them."""

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
def test_the_users_setting_stands_and_the_default_is_short(given: dict[str, str], expected: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**inherited, **given}, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == expected
