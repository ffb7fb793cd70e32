"""A server with a tiny model, shared by the tests of the client and of map."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka
from tokasaurus import Client


@pytest.fixture(scope="session")
def toka(model: Path) -> Iterator[TokaProcess]:
    flags = ("dtype=float32", "device=cpu", "kv_cache_num_tokens=16384", "max_seqs_per_forward=32")
    with running_toka(f"model={model}", *flags) as process:
        yield process


@pytest.fixture(scope="session")
def client(toka: TokaProcess) -> Iterator[Client]:
    with Client(toka.url) as opened:
        yield opened
