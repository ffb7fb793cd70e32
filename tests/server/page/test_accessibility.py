"""axe-core finds nothing against WCAG 2.2 A and AA in the page, dark and light, on a desktop and on a phone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.chromium import Tab
from tests.server.page.helpers.live_pages import LivePages, live_pages
from tests.server.page.helpers.recordings import simulated_events, write_recording

AXE = Path(__file__).parents[3] / ".venv-clients" / "node" / "node_modules" / "axe-core" / "axe.min.js"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]

pytestmark = pytest.mark.skipif(not AXE.is_file(), reason="needs `make test-clients CLIENTS=node`")


@pytest.fixture(scope="module")
def pages() -> Iterator[LivePages]:
    with live_pages() as served:
        served.events = simulated_events(70, num_replicas=2)
        tokens = {"prompt": 12, "generated": 3}
        served.events[-1]["keys"] = [{"name": "alice", "running": 1, "waiting": 0, "tokens": tokens}]
        yield served


def violations(tab: Tab) -> list[str]:
    options = f"{{ resultTypes: ['violations'], runOnly: {RULES} }}"
    found = tab.run(f"axe.run({options}).then((all) => all.violations.map((one) => [one.id, one.nodes[0].html]))")
    return [": ".join(one) for one in found]


@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        ((1280, 800), "light"),
        ((390, 844), "dark"),
        pytest.param((1280, 800), "dark", marks=pytest.mark.long),
        pytest.param((390, 844), "light", marks=pytest.mark.long),
    ],
)
def test_axe_finds_nothing_in_any_view(
    tab: Tab, pages: LivePages, size: tuple[int, int], scheme: str, tmp_path: Path
) -> None:
    tab.set_size(*size)
    tab.set_media(prefers_color_scheme=scheme)
    tab.open(pages.url)
    tab.wait("document.querySelectorAll('#replica-rows tr').length === 2")
    tab.run(AXE.read_text(encoding="utf-8"))
    assert violations(tab) == [], "live figures"
    tab.run("document.querySelector('.pool .terms').click()")
    assert violations(tab) == [], "words"
    tab.run("document.querySelector('.words:popover-open').hidePopover()")
    tab.run("document.getElementById('tables').click()")
    assert violations(tab) == [], "tables"
    tab.run("document.getElementById('open-replay').click()")
    assert violations(tab) == [], "an empty replay"
    tab.choose_file("#file", write_recording(tmp_path / "run.jsonl", pages.events))
    tab.wait("document.getElementById('play').textContent === 'Pause'")
    tab.run("document.getElementById('play').click()")
    tab.run("document.getElementById('tables').click()")
    assert violations(tab) == [], "a replay"
    tab.run("document.getElementById('key-dialog').showModal()")
    assert violations(tab) == [], "the question for the key"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_the_figures_of_a_server_that_is_gone(tab: Tab, scheme: str) -> None:
    with live_pages() as pages:
        pages.events, pages.ends_after = simulated_events(20, num_replicas=2), 20
        tab.set_media(prefers_color_scheme=scheme)
        tab.open(pages.url)
        tab.wait("document.getElementById('main').classList.contains('is-old')")
        pages.status = 503
        tab.expected = r"status of 503"
        tab.run(AXE.read_text(encoding="utf-8"))
        assert violations(tab) == []


def test_axe_finds_what_is_wrong(tab: Tab, pages: LivePages) -> None:
    """Or the test above could not fail."""
    tab.open(pages.url)
    tab.wait("document.querySelectorAll('#replica-rows tr').length === 2")
    tab.run(AXE.read_text(encoding="utf-8"))
    tab.run("document.getElementById('facts').style.color = '#b0b0b0'")
    tab.run("document.getElementById('scrub').removeAttribute('aria-label')")
    tab.run("document.getElementById('replay').hidden = document.getElementById('player').hidden = false")
    assert sorted(found.partition(":")[0] for found in violations(tab)) == ["color-contrast", "label"]
