"""A real HTTP server on a free port, in front of a scripted engine."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.small_model import make_served_model
from tests.helpers.small_tokenizer import save_small_tokenizer
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.templates.request_templates import RequestTemplates


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def served_model(tokenizer_directory: Path) -> ServedModel:
    model = make_served_model(tokenizer_directory)
    return dataclasses.replace(model, request_templates=RequestTemplates(model.tokenizer))


@pytest.fixture(scope="session")
def shared_server(served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server shared by all tests that change no state in it; its engine echoes the prompt."""
    with live_server(served_model, FakeEngine(), data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture
def server(served_model: ServedModel) -> Iterator[LiveServer]:
    """A server for one test, which may set the engine's script."""
    with live_server(served_model, FakeEngine()) as server:
        yield server
