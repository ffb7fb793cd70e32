"""Checkpoints of published shapes; a real HTTP server whose engine echoes the first tokens of a prompt."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.commands.helpers.checkpoints import CONFIGS, save
from tests.helpers.small_model import make_served_model
from tests.helpers.small_tokenizer import save_small_tokenizer
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[str], Path]:
    """Makes the checkpoint of a published name, without its weights' data."""

    def make(name: str) -> Path:
        save(tmp_path / name, CONFIGS[name])
        return tmp_path / name

    return make


@pytest.fixture(autouse=True)
def no_key_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKA_API_KEY", raising=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = make_served_model(save_small_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    with live_server(model, FakeEngine()) as server:
        yield server
