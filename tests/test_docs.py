"""The pages in docs name tests and flags that exist."""

import ast
import re
from pathlib import Path

from tokasaurus.batch_command.config import RUN_FLAGS, STORED_FLAGS
from tokasaurus.config_flags import SERVER_FLAGS

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / f"{name}.md" for name in ("README", "SECURITY", "CHANGELOG"))]
OF_OTHERS = {"auth_token"}
"""Options of other programs that the pages name."""
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


def defined_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_fault_names_a_test_that_exists() -> None:
    named = re.findall(r"\| `(\S+\.py)::(\w+)` \|$", OPERATIONS, flags=re.MULTILINE)
    assert len(named) >= 30
    missing = [f"{path}::{name}" for path, name in named if name not in defined_in(ROOT / "tests" / path)]
    assert missing == []
    assert len(set(named)) == len(named)


def test_the_table_of_the_torture_has_the_rows_of_every_part() -> None:
    table = OPERATIONS.partition("## make torture")[2]
    shown = set(re.findall(r"^\| (\w+) \|", table, flags=re.MULTILINE)) - {"part"}
    folder = ROOT / "tests" / "torture"
    parts = {path.stem for pattern in ("[!_t]*.py", "fuzz/[!_t]*.py") for path in folder.glob(pattern)}
    assert shown == parts | {"stops"}


def test_flags_in_the_docs_exist() -> None:
    known = {*SERVER_FLAGS.flags, *SERVER_FLAGS.aliases, *RUN_FLAGS.flags, *STORED_FLAGS.flags}
    for page in PAGES:
        if page.name == "CHANGELOG.md":  # it also names what was renamed
            continue
        named = set(re.findall(r"`([a-z][a-z_]+)=`", page.read_text()))
        unknown = named - known - OF_OTHERS
        assert unknown == set(), f"{page.name}: {unknown}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in (
        *sorted((ROOT / "docs").glob("*.md")),
        ROOT / "README.md",
        ROOT / "SECURITY.md",
        ROOT / "CHANGELOG.md",
    ):
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
            if "://" in target:
                continue
            linked = page if not target else (page.parent / target).resolve()
            assert linked.exists(), f"{page.name}: {target}"
            if anchor and linked.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", linked.read_text(), flags=re.MULTILINE)
                anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert anchor in anchors, f"{page.name}: {target}#{anchor}"
