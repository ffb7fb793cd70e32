"""The documentation's site is built from all pages, and needs no other host."""

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from docs_site.__main__ import CONFIG, ROOT, pages

OUTPUT = ROOT / "build" / "docs"


class Resources(HTMLParser):
    """What a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if tag in ("script", "img", "iframe", "source") and found.get("src"):
            self.addresses.append(found["src"] or "")
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.addresses.append(found["href"] or "")


@pytest.fixture(scope="module")
def built() -> str:
    """What the build prints."""
    command = [sys.executable, "-m", "docs_site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_every_page_has_its_place_and_every_link_its_target(built: str) -> None:
    """MkDocs is told to warn of them, and to fail then."""
    assert built == ""
    listed = re.findall(r"^ +- (\S+\.md)$", CONFIG.read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(path.relative_to(ROOT).as_posix() for path in pages())


@pytest.mark.usefixtures("built")
def test_pages_fetch_nothing_from_another_host() -> None:
    for path in pages():
        page = OUTPUT / path.relative_to(ROOT).with_suffix(".html")
        page = page.with_name("index.html") if path.name == "README.md" else page
        resources = Resources()
        resources.feed(page.read_text())
        assert resources.addresses
        for address in resources.addresses:
            assert not re.match(r"\w+:|//", address), (page, address)
            assert (page.parent / address.partition("?")[0]).is_file(), (page, address)
