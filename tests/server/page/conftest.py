"""A browser for all tests of the page."""

from collections.abc import Callable, Iterator

import pytest

from tests.helpers.chromium import CHROMIUM, Tab, chromium


@pytest.fixture(scope="session")
def open_tab() -> Iterator[Callable[[], Tab]]:
    """Opens an empty tab."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with chromium() as opened:
        yield opened


@pytest.fixture
def tab(open_tab: Callable[[], Tab]) -> Iterator[Tab]:
    """A tab of a desktop's size that fails the test for an error in its console or a request to another host."""
    opened = open_tab()
    opened.set_size(1280, 800)
    try:
        yield opened
        opened.run("1")  # takes what has arrived
        assert opened.errors == []
        assert opened.hosts() <= {"127.0.0.1"}
    finally:
        opened.close()
