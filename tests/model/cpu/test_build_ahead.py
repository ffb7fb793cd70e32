"""Building the kernels in the background, while the launcher fetches the model."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.processes import assert_all_end
from tokasaurus.config import parse_server_config
from tokasaurus.model.cpu import build
from tokasaurus.model.cpu.build_ahead import kernels_built_ahead
from tokasaurus.model.cpu.isa import choose_set, machine

LACKING = {"x86_64": "neon", "aarch64": "avx2"}

# Compiles the CPU feature detection and links as usual, but runs {kernels} in place of compiling the kernels, which
# takes half a minute.
QUICK = """\
#!/bin/sh
case "$*" in
  *cpu_features*) exec g++ "$@" ;;
  *" -c "*) while [ "$1" != -o ]; do shift; done; {kernels} ;;
  *) exec g++ "$@" ;;
esac
"""


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))


def use_compiler(path: Path, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(QUICK.format(kernels=kernels))
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def is_built() -> bool:
    level = choose_set(None, build.machine_sets())
    assert level is not None
    return build.is_there(build.kernel_library(level))


def wait_until(happened, within_s: float = 120) -> None:
    deadline = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.usefixtures("empty_cache")
def test_missing_kernels_are_built_in_the_background_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_compiler(tmp_path / "quick", 'exec g++ -x c++ -c /dev/null "$@"', monkeypatch)
    config, lines = parse_server_config(["device=cpu"]), []
    for _ in range(2):
        with kernels_built_ahead(config, lines.append):
            wait_until(is_built)
    assert lines == ["compiling the CPU kernels, at the first start only"]


@pytest.mark.usefixtures("empty_cache")
def test_an_unfinished_build_ends_with_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    use_compiler(tmp_path / "slow", f"echo $$ >> {pids}; exec sleep 60", monkeypatch)
    with kernels_built_ahead(parse_server_config(["device=cpu"]), lambda _line: None):
        wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"))
    assert_all_end([int(pid) for pid in pids.read_text().split()], within_s=30)  # it sleeps for 60
    assert not is_built()


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("word", ["cpu_isa=torch", "device=cuda"])
def test_kernels_that_are_not_used_are_not_built(word: str, tmp_path: Path) -> None:
    with kernels_built_ahead(parse_server_config([word]), pytest.fail):
        assert not (tmp_path / "cache").exists()


def test_an_instruction_set_that_the_processor_lacks_is_refused_in_one_line() -> None:
    lacking = LACKING[machine()]
    command = [sys.executable, "-m", "tokasaurus", f"cpu_isa={lacking}", "device=cpu", "port=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"toka: cpu_isa={lacking}: this processor does not have it; allowed are ")
