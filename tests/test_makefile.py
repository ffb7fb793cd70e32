"""What `make` says of its targets, and while it installs, with a Python that installs nothing."""

import os
import pty
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    "-m pip") echo "$@" >> pip_calls; echo "progress of pip"; exit ${PIP_CODE:-0} ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "fake_python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return tmp_path


def make(
    clone: Path, target: str, stderr: int = subprocess.PIPE, **variables: str
) -> "subprocess.CompletedProcess[str]":
    command = ["make", "--no-print-directory", f"PYTHON={clone / 'fake_python'}", target]
    # Not as a part of the `make` that runs these tests: it would say so in its lines, and take over that one's flags.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        command,
        cwd=clone,
        env={**environment, **variables},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("target", "what"), [("installed", "."), ("installed-dev", ".[dev]")])
def test_an_installation_says_what_comes_and_how_large_it_is(clone: Path, target: str, what: str) -> None:
    done = make(clone, f".venv/{target}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].startswith(f"Installing {what} into .venv, once: PyTorch and about ")
    assert "GB to download" in lines[2]
    assert "GB on disk" in lines[2]
    assert lines[3].startswith("Installed: .venv has ")
    assert len(lines) == 4
    assert make(clone, f".venv/{target}").stdout == f"make: '.venv/{target}' is up to date.\n"
    call, *templates = (clone / "pip_calls").read_text().splitlines()
    assert call.endswith(f"--editable {what}")
    assert len(templates) == (target == "installed-dev")


def test_pip_shows_its_progress_on_a_terminal_only(clone: Path) -> None:
    assert make(clone, ".venv/installed").returncode == 0
    terminal, other_end = pty.openpty()
    assert make(clone, ".venv/installed-dev", stderr=other_end).returncode == 0
    os.close(other_end)
    os.close(terminal)
    elsewhere, on_a_terminal, _ = (clone / "pip_calls").read_text().splitlines()
    assert "--quiet" in elsewhere.split()
    assert "--quiet" not in on_a_terminal.split()


def test_a_failed_installation_is_tried_again(clone: Path) -> None:
    assert make(clone, ".venv/installed", PIP_CODE="1").returncode != 0
    assert make(clone, ".venv/installed").returncode == 0
    assert len((clone / "pip_calls").read_text().splitlines()) == 2


def test_help_shows_each_target_with_one_line(clone: Path) -> None:
    """Of the targets that a user calls: those that make no file."""
    phony = re.search(r"^\.PHONY: (.*)$", (clone / "Makefile").read_text(), flags=re.MULTILINE)
    assert phony
    shown = [line.split(None, 1) for line in make(clone, "help").stdout.splitlines()]
    assert {name for name, _ in shown} == set(phony[1].split())
    assert all(len(text) < 80 for _, text in shown)


def test_what_check_runs_exists() -> None:
    listed = re.search(r"^CHECKED_TESTS = \$\(addprefix tests/, (.*?)\)$", (ROOT / "Makefile").read_text(), re.M | re.S)
    assert listed
    tests = [word for word in listed[1].split() if word != "\\"]
    assert len(tests) >= 8
    for test in tests:
        path, _, function = test.partition("::")
        assert (ROOT / "tests" / path).exists(), path
        assert not function or f"def {function}(" in (ROOT / "tests" / path).read_text(), test
