"""A scripted engine; the test starts it."""

from collections.abc import Iterator

import pytest

from tests.server.helpers.fake_engine import FakeEngine


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.stop()
