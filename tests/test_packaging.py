"""`pip install .` installs every file of the package."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tokasaurus"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="reads TOML with the standard library")
def test_every_file_that_is_not_python_is_installed() -> None:
    """An editable install would hide a C++ source that is left out: the kernels would silently be off."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["tokasaurus"]
    installed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    others = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert {path.name for path in others} >= {"py.typed", "attention.cpp"}
    assert others == installed
