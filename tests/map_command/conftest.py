"""A real HTTP server in front of an engine that echoes the prompt's first tokens."""

from collections.abc import Iterator

import pytest

from tests.helpers.small_model import make_served_model
from tests.helpers.small_tokenizer import save_small_tokenizer
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server


@pytest.fixture(autouse=True)
def no_key_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKA_API_KEY", raising=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = make_served_model(save_small_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    with live_server(model, FakeEngine()) as server:
        yield server
