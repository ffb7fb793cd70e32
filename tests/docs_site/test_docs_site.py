"""The documentation's site is built from all pages, and needs no other host."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from docs_site.__main__ import CONFIG, ROOT, pages

HOSTS = {
    *(
        "arxiv.org",
        "docs.astral.sh",
        "docs.ray.io",
        "docs.rs",
        "docs.sglang.io",
        "github.com",
        "huggingface.co",
        "pre-commit.com",
    ),
    *("squidfunk.github.io", "ui.perfetto.dev"),
}
WITHOUT_ENCRYPTION = {"http://joschu.net/blog/kl-approx.html"}


class Resources(HTMLParser):
    """What a browser fetches to show a page, and its links to other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.links: list[str] = []
        """To other hosts."""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if tag in ("script", "img", "iframe", "source") and found.get("src"):
            self.addresses.append(found["src"] or "")
        if tag == "a" and re.match("https?:", found.get("href") or ""):
            self.links.append(found["href"] or "")
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.addresses.append(found["href"] or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it is built, without a warning. MkDocs warns of pages without a place and of links without a target."""
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "docs_site", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return directory / "docs"


def test_every_page_has_its_place(site: Path) -> None:
    assert (site / "index.html").is_file()
    listed = re.findall(r"^ +- (\S+\.md)$", CONFIG.read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(path.relative_to(ROOT).as_posix() for path in pages())


def read_page(site: Path, path: Path) -> tuple[Path, Resources]:
    """A page of the project as the site has it."""
    page = site / path.relative_to(ROOT).with_suffix(".html")
    page = page.with_name("index.html") if path.name == "README.md" else page
    resources = Resources()
    resources.feed(page.read_text())
    return page, resources


def test_pages_fetch_nothing_from_another_host(site: Path) -> None:
    for path in pages():
        page, resources = read_page(site, path)
        assert resources.addresses
        for address in resources.addresses:
            assert not re.match(r"\w+:|//", address), (page, address)
            assert (page.parent / address.partition("?")[0]).is_file(), (page, address)


def test_links_to_other_hosts_are_encrypted_and_name_hosts_that_are_known(site: Path) -> None:
    """They are not opened, which needs a network: a host that is misspelled is new here."""
    links = {link for path in pages() for link in read_page(site, path)[1].links}
    hosts = {address.netloc for address in map(urlsplit, links - WITHOUT_ENCRYPTION) if address.scheme == "https"}
    assert [link for link in links - WITHOUT_ENCRYPTION if not link.startswith("https://")] == []
    assert hosts - HOSTS == set(), "a host that is right belongs into HOSTS"
