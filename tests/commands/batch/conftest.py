"""A real HTTP server with files and batches, in front of a scripted engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands.batch.helpers.request_lines import write_requests
from tests.helpers.small_model import make_served_model
from tests.helpers.small_tokenizer import save_small_tokenizer
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tokasaurus.server.served_model import ServedModel


@pytest.fixture(autouse=True)
def no_keys_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKA_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return make_served_model(save_small_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def server(served_model: ServedModel, data_dir: Path) -> Iterator[LiveServer]:
    """Its engine echoes the prompt; a test may set another script."""
    with live_server(served_model, FakeEngine(), data_dir=data_dir) as server:
        yield server


@pytest.fixture
def words(server: LiveServer, tmp_path: Path) -> list[str]:
    """Flags of a run of 30 lines on the server."""
    source = write_requests(tmp_path / "in.jsonl", 30)
    return [f"input={source}", f"output={tmp_path / 'out.jsonl'}", f"base_url={server.url}/v1"]
