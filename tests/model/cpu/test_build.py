"""Which instruction sets a processor has, which one is used, and building while the launcher fetches the model."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.processes import assert_all_end
from tokasaurus.config import ServerConfig
from tokasaurus.messages.status import UserError
from tokasaurus.model.cpu import build
from tokasaurus.model.cpu.build import (
    INSTRUCTION_SETS,
    PLAIN_TORCH,
    choose_set,
    kernels_built_ahead,
    machine,
    machine_sets,
    supported_sets,
)

AVX2 = "avx2 fma bmi bmi2 f16c lzcnt movbe"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
AVX512_BF16 = f"{AVX512} avx512bf16 avx512vnni"
AMX = "amx_tile amx_bf16 amx_int8"

PROCESSORS = [
    ("x86_64", "", []),
    ("x86_64", "avx2", []),  # without FMA
    ("x86_64", AVX2, ["avx2"]),
    ("x86_64", f"{AVX2} avx512f", ["avx2"]),
    ("x86_64", AVX512, ["avx512", "avx2"]),
    ("x86_64", f"{AVX2} avxvnni", ["avx2_vnni", "avx2"]),
    ("x86_64", f"{AVX512} avx512bf16", ["avx512", "avx2"]),
    ("x86_64", f"{AVX512} avx512vnni", ["avx512_vnni", "avx512", "avx2"]),
    ("x86_64", AVX512_BF16, ["avx512_bf16", "avx512_vnni", "avx512", "avx2"]),
    ("x86_64", f"{AVX512_BF16} amx_tile amx_bf16", ["avx512_bf16", "avx512_vnni", "avx512", "avx2"]),
    ("x86_64", f"{AVX512_BF16} {AMX}", ["amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2"]),
    ("aarch64", "neon", ["neon"]),
    ("aarch64", "neon bf16", ["neon"]),
    ("aarch64", "neon bf16 i8mm", ["neon_bf16", "neon"]),
    ("riscv64", AVX2, []),
]

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


@pytest.mark.parametrize(("machine_name", "features", "expected"), PROCESSORS)
def test_a_set_is_supported_if_the_processor_has_all_its_features(
    machine_name: str, features: str, expected: list[str]
) -> None:
    assert [level.name for level in supported_sets(machine_name, features.split())] == expected


@pytest.mark.parametrize(("machine_name", "features", "names"), PROCESSORS)
def test_the_best_set_is_chosen_unless_another_is_requested(machine_name: str, features: str, names: list[str]) -> None:
    supported = supported_sets(machine_name, features.split())
    best = choose_set(None, supported)
    assert (None if best is None else best.name) == (names[0] if names else None)
    assert choose_set(PLAIN_TORCH, supported) is None
    for cpu_isa in {level.cpu_isa for level in INSTRUCTION_SETS}:
        mine = [name for name in names if name.removesuffix("_bf16" if cpu_isa == "neon" else "") == cpu_isa]
        if mine:
            chosen = choose_set(cpu_isa, supported)
            assert chosen is not None
            assert chosen.name == mine[0]
        else:
            with pytest.raises(UserError, match=f"^cpu_isa={cpu_isa}: .*allowed are .*torch$"):
                choose_set(cpu_isa, supported)


def test_the_flag_allows_all_sets() -> None:
    assert {*ServerConfig.flags["cpu_isa"].choices} == {*(level.cpu_isa for level in INSTRUCTION_SETS), PLAIN_TORCH}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_the_sets_of_this_machine_match_the_features_in_proc_cpuinfo() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = next(line for line in lines if line.startswith(("flags", "Features"))).split(":")[1].split()
    names = {"bmi1": "bmi", "abm": "lzcnt", "avx512_bf16": "avx512bf16", "asimd": "neon"}
    names |= {"avx512_vnni": "avx512vnni", "avx_vnni": "avxvnni"}
    assert machine_sets() == supported_sets(machine(), [names.get(name, name) for name in found])


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
    config, lines = ServerConfig.parse(["device=cpu"]), []
    for _ in range(2):
        with kernels_built_ahead(config, lines.append):
            wait_until(is_built)
    assert lines == ["compiling the CPU kernels, at the first start only"]


@pytest.mark.usefixtures("empty_cache")
def test_an_unfinished_build_ends_with_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    use_compiler(tmp_path / "slow", f"echo $$ >> {pids}; exec sleep 60", monkeypatch)
    with kernels_built_ahead(ServerConfig.parse(["device=cpu"]), lambda _line: None):
        wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"))
    assert_all_end([int(pid) for pid in pids.read_text().split()], within_s=30)  # it sleeps for 60
    assert not is_built()


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("word", ["cpu_isa=torch", "device=cuda"])
def test_kernels_that_are_not_used_are_not_built(word: str, tmp_path: Path) -> None:
    with kernels_built_ahead(ServerConfig.parse([word]), pytest.fail):
        assert not (tmp_path / "cache").exists()


def test_an_instruction_set_that_the_processor_lacks_is_refused_in_one_line() -> None:
    lacking = LACKING[machine()]
    command = [sys.executable, "-m", "tokasaurus", f"cpu_isa={lacking}", "device=cpu", "port=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"toka: cpu_isa={lacking}: this processor does not have it; allowed are ")
