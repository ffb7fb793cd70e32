"""`make test-changed` runs tests that exist, and for words alone only those of the documentation."""

import subprocess
from pathlib import Path

import pytest

from tests.helpers import changed_tests
from tests.helpers.changed_tests import ALWAYS, READERS, WORDS, has_other_code
from tests.helpers.import_graph import ROOT

BEFORE = '''"""A module."""
LIMIT = 3
"""Of what."""


class Box:
    """A class."""

    size: int
    """In bytes."""

    def grow(self, by: int = LIMIT) -> str:
        """A method."""
        return "text" * by  # a comment
'''


@pytest.mark.parametrize(
    ("old", "new", "is_code"),
    [
        ("A module.", "Another module.", False),
        ("Of what.", "Of which\n\nthings.", False),
        ("A class.", "", False),
        ("In bytes.", "In words.", False),
        ("A method.", "Grows.", False),
        ("  # a comment", "\n", False),
        ('"text"', '"texts"', True),
        ("LIMIT = 3", "LIMIT = 4", True),
        ("by: int", "by: float", True),
        ('        """A method."""\n        return', "        return", False),
    ],
)
def test_code_differs_unless_only_words_do(
    old: str, new: str, is_code: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "module.py"
    path.write_text(BEFORE)
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q", "-b", "main"), ("add", "."), (*author, "commit", "-q", "-m", "before")):
        subprocess.run(("git", *words), cwd=tmp_path, check=True)
    assert BEFORE.count(old) == 1
    path.write_text(BEFORE.replace(old, new))
    monkeypatch.setattr(changed_tests, "ROOT", tmp_path)
    assert has_other_code("module.py", "main") is is_code


def test_a_new_module_is_code() -> None:
    assert has_other_code("tokasaurus/there_is_none.py", "HEAD")


def test_words_run_what_documents_them_and_code_what_imports_it() -> None:
    path = "tokasaurus/manager/planning/step_budget.py"
    assert changed_tests.tests_of([], [path]) == sorted(WORDS) + ALWAYS
    found = changed_tests.tests_of([path], [])
    assert "tests/manager/planning/test_step_budget.py" in found
    assert not set(WORDS) & set(found)
    assert "tests/release/test_release.py" in changed_tests.tests_of(["release/__main__.py"], [])


def test_each_test_that_is_named_exists() -> None:
    for name in [*ALWAYS, *WORDS, *(test for tests in READERS.values() for test in tests)]:
        assert (ROOT / name.partition("::")[0]).exists(), name
    for start in READERS:
        assert list(ROOT.glob(f"{start}*")), start
