"""The pages in docs name tests and flags that exist."""

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import http_page, library_page, reference_pages
from tokasaurus.checkpoint.families import FAMILIES
from tokasaurus.commands.batch.config import RunConfig, StoredConfig
from tokasaurus.commands.bench.config import BenchConfig
from tokasaurus.commands.map import MapConfig
from tokasaurus.commands.mismatch import MismatchConfig
from tokasaurus.commands.top.config import TopConfig
from tokasaurus.config import ServerConfig
from tokasaurus.library.client import Client
from tokasaurus.messages.sampling import CLIENT_PARAMETERS, SamplingParams
from tokasaurus.server.app import ROLLOUT_ROUTES, SERVED_ROUTES
from tokasaurus.server.openapi import DescribedApp
from tokasaurus.server.protocol.sampling_fields import SamplingFields
from tokasaurus.server.tools.formats import FORMATS
from torture.__main__ import PARTS

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / f"{name}.md" for name in ("README", "SECURITY", "CHANGELOG"))]
OF_OTHERS = {"auth_token", "config"}
"""Options of other programs that the pages name, and the file of flags, which is no flag of a config."""
SOURCES = ("tokasaurus", "tests", "benchmarks", "torture", "examples")
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


def defined_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_fault_names_a_test_that_exists() -> None:
    named = re.findall(r"\(`(\S+\.py)::(\w+)`\)$", OPERATIONS, flags=re.MULTILINE)
    assert len(named) >= 30
    missing = [f"{path}::{name}" for path, name in named if name not in defined_in(ROOT / "tests" / path)]
    assert missing == []
    assert len(set(named)) == len(named)


def test_the_figures_of_the_torture_are_of_every_part() -> None:
    figures = (ROOT / "torture" / "README.md").read_text()
    shown = set(re.findall(r"^- (\w+): ", figures, flags=re.MULTILINE))
    assert shown == {*PARTS, "soak"}


def test_flags_in_the_docs_exist() -> None:
    known = {
        *ServerConfig.flags,
        *(flag.alias for flag in ServerConfig.flags.values()),
        *RunConfig.flags,
        *StoredConfig.flags,
        *MapConfig.flags,
        *MismatchConfig.flags,
        *TopConfig.flags,
        *BenchConfig.flags,
        *inspect.signature(Client.map).parameters,
    }
    for page in PAGES:
        if page.name == "CHANGELOG.md":  # it also names what was renamed
            continue
        named = set(re.findall(r"`([a-z][a-z_]+)=`", page.read_text()))
        unknown = named - known - OF_OTHERS
        assert unknown == set(), f"{page.name}: {unknown}"


def test_the_api_page_explains_every_sampling_parameter() -> None:
    """In the list of fields, with the default where a model has none."""
    listed = (ROOT / "docs" / "api.md").read_text().partition("## Fields")[2].partition("\n## ")[0]
    rows = [row.partition(": ")[0] for row in listed.splitlines() if row.startswith("- `")]
    for name in SamplingParams._fields:
        (cell,) = [cell for cell in rows if f"`{name}`" in cell]
        mark = "\\*" if SamplingFields.model_fields[name].default is None else ""
        assert f"({CLIENT_PARAMETERS[name].default:g}{mark})" in cell, f"{name}: {cell}"


def test_contributing_names_the_files_that_a_sampling_parameter_is_in() -> None:
    """Those that mention one by its name, and the C++ that has names of its own."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page.partition("### A sampling parameter\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`((?!tests/)[\w/]+\.(?:py|cpp|h))`", section))
    package = ROOT / "tokasaurus"
    sources = [path for suffix in ("py", "cpp", "h") for path in package.rglob(f"*.{suffix}")]
    words = {path.relative_to(package).as_posix(): set(re.findall(r"\w+", path.read_text())) for path in sources}
    # temperature is read in more places: noise, and what is greedy. The checkpoint's keys only list what may be there.
    for name in (name for name in SamplingParams._fields if name != "temperature"):
        mentioning = {path for path, own in words.items() if name in own} - {"checkpoint/config_keys.py"}
        assert mentioning <= named, f"{name}: the section leaves out {mentioning - named}"
    mention_none = {path for path in named if not words[path] & {*SamplingParams._fields, "frequency"}}
    assert mention_none == set()


def test_source_files_that_the_pages_name_exist() -> None:
    """By their last parts: a page may name a file by its folder or alone."""
    sources = [f"/{path.relative_to(ROOT)}" for folder in SOURCES for path in (ROOT / folder).rglob("*.*")]
    for page in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"):
        named = re.findall(r"`(?:\.\./)*([\w./-]+\.(?:py|cpp|h))`", page.read_text())
        assert [name for name in named if not any(source.endswith(f"/{name}") for source in sources)] == [], page.name


def test_the_page_of_checkpoints_names_every_family() -> None:
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    (named,) = re.findall(
        r"\*\*Families\*\*, by `model_type` in config\.json: (.*?)\. The first three", page, flags=re.DOTALL
    )
    assert set(re.findall(r"`(\w+)`", named)) == set(FAMILIES)


def test_modules_that_the_pages_run_exist() -> None:
    for page in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", ROOT / "Makefile"):
        for name in re.findall(
            r"-m ((?:benchmarks|tests|tokasaurus|torture)(?:\.[a-z_]+)*)(?![\w.])", page.read_text()
        ):
            path = ROOT / name.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), f"{page.name}: {name}"


def test_the_page_of_benchmarks_lists_every_command() -> None:
    folder = ROOT / "benchmarks"
    runnable = [path for path in folder.rglob("*.py") if 'if __name__ == "__main__":' in path.read_text()]
    commands = {".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__main__") for path in runnable}
    listed = re.findall(r"^\| \[`([\w.]+)`\]", (folder / "README.md").read_text(), flags=re.MULTILINE)
    run_by_others = {"gpu.attention", "gpu.profile_steps", "cpu_table.openvino_loads"}
    assert sorted(listed) == sorted(commands - run_by_others)


def test_figures_of_the_comparison_are_those_of_the_benchmarks() -> None:
    measured = (ROOT / "docs" / "comparison.md").read_text().partition("\n## On CPUs\n")[2].partition("\n## ")[0]
    cells = [cell.strip() for line in measured.splitlines() for cell in line.split("|")[2:-1]]
    figures = [cell for cell in cells if re.fullmatch(r"\d[\d, ]*", cell)]
    assert len(figures) >= 20
    benchmarks = (ROOT / "benchmarks" / "README.md").read_text()
    assert [figure for figure in figures if figure not in benchmarks] == []


def test_formats_of_tool_calls_are_those_of_the_table() -> None:
    listed = (ROOT / "docs" / "api.md").read_text().partition("\n**Calls.**")[2].partition("\n\n")[2]
    lines = []
    for format_ in FORMATS.values():
        beginning = " ".join(f"{format_.start}{format_.opening('f')}{format_.bracket}".split())
        shown = f"`` {beginning} ``" if "`" in beginning else f"`{beginning}`"
        lines.append(f"- `{format_.name}`: {format_.models}; {shown}")
    assert listed.partition("\n\n")[0].splitlines() == lines


def test_the_pages_are_no_longer_than_somebody_reads() -> None:
    """As `wc -w` counts. What is told twice is told once, with a link."""
    pages = [*sorted((ROOT / "docs").glob("**/*.md")), ROOT / "README.md"]
    assert sum(len(page.read_text().split()) for page in pages) <= 70_000
    assert len((ROOT / "benchmarks" / "README.md").read_text().split()) <= 4_000


def test_the_path_of_a_newcomer_says_how_many_words_it_has_at_most_12_000() -> None:
    path = (ROOT / "README.md").read_text().partition("**A newcomer's path**")[2].partition("\n\n")[0]
    steps = re.findall(r"(this page|\]\((\S+?\.md)(?:#([\w-]+))?\)) \(([\d,]+)\)", path)
    assert len(steps) >= 6
    for _, page, anchor, said in steps:
        text = (ROOT / (page or "README.md")).read_text()
        if anchor:  # a section
            (heading,) = [
                one for one in re.findall(r"^## .*$", text, re.M) if one[3:].lower().replace(" ", "-") == anchor
            ]
            text = text.partition(f"\n{heading}\n")[2].partition("\n## ")[0]
        assert len(text.split()) == pytest.approx(int(said.replace(",", "")), rel=0.1), page
    assert sum(int(said.replace(",", "")) for *_, said in steps) <= 12_000


def test_links_between_pages_lead_somewhere() -> None:
    for page in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", ROOT / "torture" / "README.md"):
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
            if "://" in target:
                continue
            linked = page if not target else (page.parent / target).resolve()
            assert linked.exists(), f"{page.name}: {target}"
            if anchor and linked.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", linked.read_text(), flags=re.MULTILINE)
                anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert anchor in anchors, f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize("path", reference_pages.PAGES, ids=lambda path: path.name)
def test_a_page_of_the_reference_is_made_from_the_code(path: Path) -> None:
    assert path.read_text() == reference_pages.PAGES[path](), "`make reference` writes it anew"


def test_the_page_of_routes_names_every_field_and_object() -> None:
    """Beside fields of other servers that have no effect, which are on a page of their own."""
    app = DescribedApp(title="any", version="any")
    app.router.routes = [route for module in (*SERVED_ROUTES, *ROLLOUT_ROUTES) for route in module.router.routes]
    described = app.openapi()
    text = http_page.PATH.read_text() + (ROOT / "docs" / "fields.md").read_text()
    words = set(re.findall(r"`(?:sampling_params\.)?([\w\[\]]+)\??`", text))
    names: set[str] = set()

    def visit(schema: Any) -> None:
        """Of the schema and of those below it, with the objects that they refer to."""
        for below in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
            visit(below)
        if isinstance(schema, dict):
            names.update(schema.get("properties", ()))

    visit(described["paths"])
    reached: list[str] = re.findall(r'schemas/(\w+)"', json.dumps(described["paths"]))
    for name in reached:  # which grows meanwhile
        schema = described["components"]["schemas"][name]
        visit(schema)
        reached += [one for one in re.findall(r'schemas/(\w+)"', json.dumps(schema)) if one not in reached]
    assert len(names) >= 300
    assert sorted(names - words - {"error"}) == []


def test_the_reference_of_the_library_has_every_name_that_can_be_imported() -> None:
    names: dict[str, object] = {}
    exec("from tokasaurus import *", names)
    assert set(library_page.NAMES) == names.keys() - {"__builtins__"}
