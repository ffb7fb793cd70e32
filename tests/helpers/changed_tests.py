"""Prints the test files that a change may break, for `make test-changed`: by imports, from the changed modules up.

Tests that start a real server import little of it: of those, the ones that were changed themselves run, and one server.
A page, an example or a manifest has the tests that read it, a docstring those of the documentation."""

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.helpers.import_graph import FILES, ROOT, TESTS, importers

ONE_SERVER = "tests/end_to_end/test_processes.py::test_a_served_local_checkpoint_matches_transformers"
READERS = {
    "docs": ["tests/test_docs.py", "tests/docs_site"],
    "README.md": ["tests/test_docs.py"],
    "CHANGELOG.md": ["tests/test_docs.py"],
    "deploy": ["tests/deploy"],
    "examples": ["tests/examples"],
    "Makefile": ["tests/test_makefile.py"],
    "pyproject.toml": ["tests/test_packaging.py"],
    "tokasaurus/model/cpu/csrc": ["tests/model/cpu"],
    "tokasaurus/server/page": ["tests/server/page", "tests/server/test_web_pages.py"],
}
"""Beginnings of paths -> tests of what is no module."""
ALWAYS = ["tests/test_architecture.py", ONE_SERVER]
WORDS = ["tests/test_docs.py", "tests/test_command_line.py"]
"""Tests of what is made from docstrings."""


def branch_point(since: str) -> str:
    """The commit at which this branch left `since`."""
    command = ["git", "merge-base", since, "HEAD"]
    return subprocess.check_output(command, cwd=ROOT, text=True, stderr=subprocess.DEVNULL).strip()


def changed_paths(since: str) -> list[str]:
    """Paths that differ from where this branch left `since`, and those that git does not know yet."""
    known = subprocess.check_output(["git", "diff", "--name-only", branch_point(since)], cwd=ROOT, text=True)
    others = ["git", "ls-files", "--others", "--exclude-standard"]
    return [*known.splitlines(), *subprocess.check_output(others, cwd=ROOT, text=True).splitlines()]


def has_changed(*folders: str) -> bool:
    """Whether a file below one of the folders differs from main; true where git cannot tell."""
    try:
        return any(path.startswith(folders) for path in changed_paths("main"))
    except (OSError, subprocess.CalledProcessError):
        return True


def code_of(source: str) -> str:
    """What is left of a module without comments, layout and docstrings, an attribute's included."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [line for line in body if not _is_text(line)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def has_other_code(path: str, since: str) -> bool:
    """False for a module of which only comments and docstrings differ from where this branch left `since`."""
    command = ["git", "show", f"{branch_point(since)}:{path}"]
    before = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    now = ROOT / path
    return before.returncode != 0 or not now.is_file() or code_of(before.stdout) != code_of(now.read_text())


def tests_of(paths: Iterable[str], words: Iterable[str]) -> list[str]:
    """What pytest is to run after a change of these files, and of the docstrings or comments alone of `words`."""
    used_by = importers()
    names = {str(path.relative_to(ROOT)): name for name, path in FILES.items()}
    reached, waiting = set[str](), [names[path] for path in paths if path in names]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += used_by[name]
    found = {str(TESTS[name].relative_to(ROOT)) for name in reached & TESTS.keys()}
    found = {path for path in found if Path(path).name.startswith("test_")}
    for path in [*paths, *words]:
        found.update(test for start, tests in READERS.items() if path.startswith(start) for test in tests)
    return sorted(found.union(WORDS if any(words) else ())) + ALWAYS


def main(since: str) -> None:
    paths = changed_paths(since)
    words = [path for path in paths if path.endswith(".py") and not has_other_code(path, since)]
    print(*tests_of([path for path in paths if path not in words], words))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "main")
