"""A real HTTP server on a free port, in front of a scripted engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.small_tokenizer import EOS_IDS, VOCAB_SIZE, save_small_tokenizer
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tokasaurus.server.served_model import ServedModel
from tokasaurus.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def served_model(tokenizer_directory: Path) -> ServedModel:
    return ServedModel(
        name="org/small",
        tokenizer=Tokenizer.load(tokenizer_directory),
        vocab_size=VOCAB_SIZE,
        eos_ids=frozenset(EOS_IDS),
        created=1_700_000_000,
        system_fingerprint="fp_test",
        allow_logprobs=True,
        max_top_logprobs=20,
    )


@pytest.fixture(scope="session")
def shared_server(served_model: ServedModel) -> Iterator[LiveServer]:
    """A server shared by all tests that change no state in it; its engine echoes the prompt."""
    with live_server(served_model, FakeEngine()) as server:
        yield server


@pytest.fixture
def server(served_model: ServedModel) -> Iterator[LiveServer]:
    """A server for one test, which may set the engine's script."""
    with live_server(served_model, FakeEngine()) as server:
        yield server
