"""`python -m docs_site [DIRECTORY]`: build the site in DIRECTORY/docs, by default build/docs. A warning of MkDocs is an
error, a link without a target too."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIG = Path(__file__).with_name("mkdocs.yml")
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "examples/README.md",
    "torture/README.md",
)
TABLES_OF_NAMES = {"docs/flags.md": 4.0, "docs/fields.md": 1.0, "docs/metrics.md": 1.0}
"""Pages that the search finds first by the names that begin their lines; the weight decides where two have a name."""
REPORTS = {"benchmarks/README.md": 0.1, "CHANGELOG.md": 0.1, "torture/README.md": 0.1}
"""Pages that name much and explain little, with their weight in the search."""
_NAMES = re.compile(r"^[|-] ((?:`\w+`[†‡]?(?:, )?)+)", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def main(directory: Path) -> int:
    """The exit code of MkDocs."""
    source = directory.resolve() / "docs_source"
    copy_pages(source)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(CONFIG)]
    # Material's advice to move to another generator, which is no fault of the pages
    places = {"DOCS_SOURCE": str(source), "DOCS_OUTPUT": str(directory.resolve() / "docs")}
    return subprocess.run(command, env={**os.environ, **places, "NO_MKDOCS_2_WARNING": "1"}).returncode


def copy_pages(source: Path) -> None:
    """Fill a directory with all pages and with the files of the project that they link to, where they lie in the
    project: so the pages' links are the site's."""
    shutil.rmtree(source, ignore_errors=True)
    for path in pages():
        for copied in (path, *linked_files(path)):
            target = source / copied.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(copied, target)
        name = path.relative_to(ROOT).as_posix()
        (source / name).write_text(search_settings(name, path.read_text()) + path.read_text())


def search_settings(name: str, text: str) -> str:
    """What a page tells Material's search, as front matter. name: the page's path within the project."""
    weight = (TABLES_OF_NAMES | REPORTS).get(name)
    if weight is None:
        return ""
    lines = _NAMES.findall(text) if name in TABLES_OF_NAMES else []
    names = [one for line in lines for one in re.findall(r"\w+", line)]
    return f"---\n{json.dumps({'search': {'boost': weight}, 'tags': names})}\n---\n"


def pages() -> list[Path]:
    """All pages of the site."""
    return [*(ROOT / name for name in PAGES), *sorted((ROOT / "docs").glob("*.md"))]


def linked_files(page: Path) -> Iterator[Path]:
    """Files of the project that a page links to and that are no pages. Links to nothing are left for MkDocs to find."""
    for link in _LINK.findall(page.read_text()):
        path = (page.parent / link).resolve()
        if path.is_file() and path.suffix != ".md" and path.is_relative_to(ROOT):
            yield path


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build"))
