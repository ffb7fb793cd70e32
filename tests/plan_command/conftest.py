"""Checkpoints of published shapes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.plan_command.helpers.checkpoints import CONFIGS, save


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[str], Path]:
    """Makes the checkpoint of a published name, without its weights' data."""

    def make(name: str) -> Path:
        save(tmp_path / name, CONFIGS[name])
        return tmp_path / name

    return make
