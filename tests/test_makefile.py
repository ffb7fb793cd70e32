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
    "-c "*) exit ${NO_TORCH:-0} ;;
    "-m pip")
        case "$*" in *download.pytorch.org*) if [ -n "$NO_INDEX" ]; then echo "ERROR: no index" >&2; exit 1; fi ;; esac
        echo "$@" >> pip_calls; echo "progress of pip"; exit ${PIP_CODE:-0} ;;
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


def calls_of(clone: Path, tools: str = "", **variables: str) -> tuple[list[str], list[str], str]:
    """(the lines about PyTorch, the calls of pip and uv, what came on standard error), on a machine where of uv and a
    driver's program only `tools` are found."""
    found = clone / "tools"
    found.mkdir()
    for name in ("sh", "env", "mkdir", "cp", "touch", "du", "cut", "sed", "head", "test", "uname", "echo"):
        found.joinpath(name).symlink_to(shutil.which(name) or name)
    for name in tools.split():
        found.joinpath(name).write_text(f'#!/bin/sh\necho {name} "$@" >> pip_calls\nexit ${{UV_CODE:-0}}\n')
        found.joinpath(name).chmod(0o755)
    found.joinpath("make").symlink_to(shutil.which("make") or "make")
    done = make(clone, ".venv/installed", PATH=str(found), **{"NO_TORCH": "1", **variables})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[3:-1], (clone / "pip_calls").read_text().splitlines(), done.stderr


needs_no_driver = pytest.mark.skipif(
    Path("/proc/driver/nvidia/version").exists() or os.uname().sysname != "Linux", reason="an NVIDIA driver is here"
)


@needs_no_driver
def test_without_a_driver_pytorch_for_cpus_is_installed_alone_and_first(clone: Path) -> None:
    lines, (torch, package), _ = calls_of(clone)
    assert torch.endswith("--no-deps --index-url https://download.pytorch.org/whl/cpu " + torch.split()[-1])
    assert torch.split()[-1].startswith("torch>=")
    assert package.endswith("--editable .")
    assert "download.pytorch.org" not in package
    assert lines == [
        "PyTorch is the build for CPUs, since no NVIDIA driver is here; TORCH=cuda takes the one for CUDA."
    ]


@needs_no_driver
def test_uv_chooses_the_build_where_it_is(clone: Path) -> None:
    _, (torch, package), _ = calls_of(clone, "uv")
    assert torch.startswith("uv pip install --quiet --python .venv/bin/python --no-deps --torch-backend cpu torch>=")
    assert package.endswith("--editable .")


@needs_no_driver
@pytest.mark.parametrize("tools", ["", "uv"])
def test_where_the_index_for_cpus_does_not_answer_one_line_says_so(clone: Path, tools: str) -> None:
    lines, calls, stderr = calls_of(clone, tools, NO_INDEX="1", UV_CODE="2")
    (line,) = lines[1:]
    assert line.startswith(
        "https://download.pytorch.org/whl/cpu does not answer: PyTorch comes from the ordinary index"
    )
    assert calls[-1].endswith("--editable .")
    assert "ERROR" not in stderr


@pytest.mark.parametrize(
    ("tools", "variables"),
    [("nvidia-smi", {}), ("uv", {"TORCH": "cuda"}), ("", {"NO_TORCH": "0"})],
    ids=["a driver", "asked for", "installed already"],
)
def test_otherwise_pip_decides(clone: Path, tools: str, variables: dict[str, str]) -> None:
    lines, (package,), _ = calls_of(clone, tools, **variables)
    assert package.endswith("--editable .")
    assert lines == []


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
