"""Two servers of equal shapes and other weights, for all tests of roll-outs: starting one takes seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.helpers.rollouts import RolloutServer, rollout_server, save_checkpoints


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return save_checkpoints(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def first(models: list[Path]) -> Iterator[RolloutServer]:
    with rollout_server(models[0], f"data_dir={models[0].parent / 'data'}") as server:
        yield server


@pytest.fixture
def server(first: RolloutServer, models: list[Path]) -> Iterator[RolloutServer]:
    """Started with the first model. It runs with that model's weights, named "0", before and after each test, whatever
    the test has left."""
    yield first
    first.http.post("/resume")
    if first.version != "0":
        first.update(models[0], version="0")


@pytest.fixture(scope="session")
def second(models: list[Path]) -> Iterator[RolloutServer]:
    """Started with the second model, whose weights it keeps."""
    with rollout_server(models[1]) as server:
        yield server
