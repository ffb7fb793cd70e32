"""The kernels for NEON on a machine that has none: cross-compiled, checked by neon_check.cpp in an emulator."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tokasaurus.model.cpu import build
from tokasaurus.model.cpu.build import INSTRUCTION_SETS, Library, features_library, find_or_build, kernel_library

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SYSTEM = Path("/usr/aarch64-linux-gnu")  # C and C++ libraries, where Debian's cross compiler has them
OLD, NEW = "cortex-a72", "max"  # processors without and with dot products of bfloat16

pytestmark = [
    pytest.mark.neon,
    pytest.mark.skipif(
        shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None or not SYSTEM.exists(),
        reason=f"needs {COMPILER}, {EMULATOR} (Debian: g++-aarch64-linux-gnu, qemu-user) and {SYSTEM}",
    ),
]


def built(library: Library) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", COMPILER)
        return find_or_build(library)


def run_on(processor: str, source: Path, library: Library, directory: Path) -> subprocess.CompletedProcess[str]:
    """Compile the program `source`, link it to the library and run it in the emulator."""
    path, program = built(library), directory / "program"
    flags = [*library.compiler_flags, "-std=c++17", "-O1", "-Wno-psabi", *build.INCLUDE_FLAGS]
    command = [COMPILER, *flags, str(source), str(path), f"-Wl,-rpath,{path.parent}", "-o", str(program)]
    subprocess.run(command, check=True)
    emulated = [EMULATOR, "-cpu", processor, "-L", str(SYSTEM), str(program)]
    return subprocess.run(emulated, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(("name", "processor"), [("neon", OLD), ("neon", NEW), ("neon_bf16", NEW)])
def test_kernels_for_neon_equal_plain_loops(name: str, processor: str, tmp_path: Path) -> None:
    (level,) = [level for level in INSTRUCTION_SETS if level.name == name]
    done = run_on(processor, Path(__file__).with_name("neon_check.cpp"), kernel_library(level), tmp_path)
    lines = done.stdout.splitlines()
    assert f"dot products of bfloat16: {'yes' if level.multiplies_bfloat16 else 'no'}" in lines
    assert not [line for line in lines if line.startswith("WRONG")]
    assert done.returncode == 0, done.stderr
    assert sum(line.startswith("ok ") for line in lines) > 80


@pytest.mark.parametrize(("processor", "features"), [(OLD, ["neon"]), (NEW, ["neon", "bf16", "i8mm"])])
def test_the_features_of_a_processor_are_found(processor: str, features: list[str], tmp_path: Path) -> None:
    source = tmp_path / "show.cpp"
    source.write_text(
        '#include <cstdio>\nextern "C" const char* toka_cpu_features();\nint main() { std::puts(toka_cpu_features()); }'
    )
    done = run_on(processor, source, features_library("aarch64"), tmp_path)
    assert done.stdout.split() == features
