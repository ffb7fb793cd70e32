"""Node and the packages that an environment installs with its npm."""

import os
import shutil
import sys
from pathlib import Path

import pytest

PACKAGES = Path(sys.prefix) / "node_modules"
NODE = shutil.which("node", path=str(Path(sys.executable).parent))
VARIABLES = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "NODE_PATH": str(PACKAGES),
}
"""With which Node finds the packages, and programs find Node."""


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips tests where Node or one of the packages is missing."""
    return pytest.mark.skipif(
        NODE is None or not all((PACKAGES / name).is_dir() for name in packages),
        reason=f"{' and '.join(packages)} are not installed: `make test-clients` has them",
    )
