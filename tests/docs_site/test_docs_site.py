"""The documentation's site is built from all pages, needs no other host, and its search finds flags first."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from docs_site.__main__ import CONFIG, ROOT, pages
from tests.server.page.helpers.node import NODE

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


SEARCH = """
const fs = require("node:fs"), vm = require("node:vm");
const [worker, index] = process.argv.slice(1);
let answered;
const sandbox = {
  console,
  addEventListener: (_, receive) => { sandbox.receive = receive; },
  postMessage: data => answered(data),
};
vm.createContext(sandbox);
vm.runInContext("globalThis.self = globalThis", sandbox);  // a worker's global object
vm.runInContext(fs.readFileSync(worker, "utf8"), sandbox);
const ask = data => new Promise(resolve => { answered = resolve; sandbox.receive({ data }); });
(async () => {
  await ask({ type: 0, data: { ...JSON.parse(fs.readFileSync(index, "utf8")), options: {} } });
  const found = {};
  for (const query of JSON.parse(fs.readFileSync(0, "utf8"))) {
    const { data: { items } } = await ask({ type: 2, data: query });
    found[query] = items.map(sections => sections[0].location.split("#")[0]);
  }
  console.log(JSON.stringify(found));
})();
"""
"""Runs the search as the site's pages do: the theme's own worker, which takes messages. Prints the pages found, best
first, for each query."""


def search(site: Path, queries: list[str]) -> dict[str, list[str]]:
    assert NODE is not None
    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.js")
    command = [NODE, "--eval", SEARCH, str(worker), str(site / "search" / "search_index.json")]
    done = subprocess.run(command, input=json.dumps(queries), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(NODE is None, reason="needs Node, which runs the site's search")
def test_search_finds_a_flag_on_the_page_of_flags(site: Path) -> None:
    names = re.findall(r"^- `(\w+)`", (ROOT / "docs" / "flags.md").read_text(), flags=re.MULTILINE)
    assert {"model", "drain_seconds", "kv_cache_num_tokens"} < set(names)
    first = {name: pages[0] for name, pages in search(site, names).items()}
    assert first == dict.fromkeys(names, "docs/flags.html")


@pytest.mark.skipif(NODE is None, reason="needs Node, which runs the site's search")
def test_search_finds_explanations_before_measurements(site: Path) -> None:
    found = search(site, ["prefix groups", "toka_requests_running", "memory", "shared prefixes", "best_of"])
    assert found["prefix groups"][0] == found["shared prefixes"][0] == "docs/scheduling.html"
    assert found["toka_requests_running"][0] == "docs/metrics.html"
    assert found["best_of"][0] == "docs/fields.html"
    for pages_found in found.values():
        reports = {"benchmarks/index.html", "CHANGELOG.html"}
        assert not reports.intersection(pages_found[:2])
