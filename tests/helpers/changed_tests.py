"""Prints the test files that a change may break, for `make test-changed`: by imports, from the changed modules up.

Tests that start a real server import little of it: of those, the ones that were changed themselves run, and one server.
A page, an example or a manifest has the tests that read it."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.helpers.import_graph import MODULES, ROOT, TESTS, importers

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
    "tokasaurus/server/page": ["tests/server/test_page.py"],
}
"""Beginnings of paths -> tests of what is no module."""
ALWAYS = ["tests/test_architecture.py", ONE_SERVER]


def changed_paths(since: str) -> list[str]:
    """Paths that differ from where this branch left `since`, and those that git does not know yet."""
    base = subprocess.check_output(
        ["git", "merge-base", since, "HEAD"], cwd=ROOT, text=True, stderr=subprocess.DEVNULL
    ).strip()
    known = subprocess.check_output(["git", "diff", "--name-only", base], cwd=ROOT, text=True)
    others = ["git", "ls-files", "--others", "--exclude-standard"]
    return [*known.splitlines(), *subprocess.check_output(others, cwd=ROOT, text=True).splitlines()]


def has_changed(*folders: str) -> bool:
    """Whether a file below one of the folders differs from main; true where git cannot tell."""
    try:
        return any(path.startswith(folders) for path in changed_paths("main"))
    except (OSError, subprocess.CalledProcessError):
        return True


def tests_of(paths: Iterable[str]) -> list[str]:
    """What pytest is to run after a change of these files."""
    used_by = importers()
    names = {str(path.relative_to(ROOT)): name for name, path in (MODULES | TESTS).items()}
    reached, waiting = set[str](), [names[path] for path in paths if path in names]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += used_by[name]
    found = {str(TESTS[name].relative_to(ROOT)) for name in reached & TESTS.keys()}
    found = {path for path in found if Path(path).name.startswith("test_")}
    for path in paths:
        found.update(test for start, tests in READERS.items() if path.startswith(start) for test in tests)
    return sorted(found) + ALWAYS


if __name__ == "__main__":
    print(*tests_of(changed_paths(sys.argv[1] if len(sys.argv) > 1 else "main")))
