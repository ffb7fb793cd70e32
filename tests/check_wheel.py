"""The wheel that `make wheel` builds, installed without a compiler.

Run by `make test-wheel` only: compiling the kernels for every instruction set takes a minute or two.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tokasaurus import __version__
from tokasaurus.checkpoint.cache import CHECKSUMS
from tokasaurus.model.cpu.build import INSTRUCTION_SETS, machine, machine_sets

# libgcc_s is a part of every system that has a C++ library, and so of every one with torch.
C_LIBRARIES = {"libc", "libm", "libgcc_s", "ld-linux-x86-64", "ld-linux-aarch64"}
DIST = Path(__file__).parents[1] / "dist"

# Run without a compiler, in a process that imports only the installed package.
USE_KERNELS = """
import numpy as np
import torch
from tokasaurus.messages.generation import SAMPLING_DTYPE
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.model.cpu import build
from tokasaurus.model.cpu.build import choose_set
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.sampling.rules import params_to_device
try:
    build.find_compiler()
except build.LibraryUnavailable:
    pass
else:
    raise AssertionError("found a compiler")
level = choose_set(None, build.machine_sets())
print(build.find_or_build(build.kernel_library(level)))
logits = torch.tensor([[0.0, 3.0, 1.0]])
greedy = np.array([SamplingParams(temperature=0.0)], SAMPLING_DTYPE)
params = params_to_device(greedy, torch.device("cpu"))
token = torch.empty(1, dtype=torch.int64)
load_kernels().sample(logits, params, torch.zeros((1, 2), dtype=torch.int64), None, None, None, token, None, None)
print(token.item())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (wheel,) = DIST.glob(f"tokasaurus-{__version__}-*.whl")
    directory = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(directory)]
    subprocess.run([*command, str(wheel)], check=True)
    return directory


def prebuilt(installed: Path) -> dict[str, Path]:
    """Prebuilt libraries by instruction set, and the feature detection by architecture."""
    directory = installed / "tokasaurus" / "model" / "cpu" / "prebuilt"
    return {path.stem.rpartition("-")[0]: path for path in directory.iterdir() if path.name != CHECKSUMS}


def test_the_wheel_contains_the_kernels_for_each_architecture_with_a_compiler(installed: Path) -> None:
    machines = [name for name in ("x86_64", "aarch64") if name == machine() or shutil.which(f"{name}-linux-gnu-g++")]
    expected = {f"cpu_features_{name}" for name in machines}
    expected |= {level.name for level in INSTRUCTION_SETS if level.machine in machines}
    assert set(prebuilt(installed)) == expected


def test_kernels_run_without_a_compiler(installed: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    environment |= {"PATH": str(tmp_path), "PYTHONPATH": str(installed), "TOKA_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", USE_KERNELS]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path, token = done.stdout.split()
    assert Path(path) == prebuilt(installed)[machine_sets()[0].name]
    assert token == "1"
    assert not (tmp_path / "cache").exists()


def test_the_wheel_contains_the_live_page(installed: Path) -> None:
    page = Path("tokasaurus", "server", "page")
    sources = {path.name: path.read_bytes() for path in (DIST.parent / page).iterdir() if path.is_file()}
    assert sources.keys() >= {"page.html", "page.css", "page.mjs"}
    assert {path.name: path.read_bytes() for path in (installed / page).iterdir() if path.is_file()} == sources


def test_the_wheel_contains_the_page_about_the_api_with_its_licence(installed: Path) -> None:
    page = Path("tokasaurus", "server", "docs_page")
    sources = {path.name: path.read_bytes() for path in (DIST.parent / page).iterdir() if path.is_file()}
    assert sources.keys() >= {"docs.html", "swagger-ui-bundle.js.gz", "swagger-ui.css.gz", "LICENSE", "NOTICE"}
    assert {path.name: path.read_bytes() for path in (installed / page).iterdir() if path.is_file()} == sources


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("readelf") is None, reason="reads ELF files by readelf")
def test_libraries_need_only_what_torch_needs(installed: Path) -> None:
    for path in prebuilt(installed).values():
        lines = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout.splitlines()
        needed = {line.partition("[")[2].rstrip("]") for line in lines if "(NEEDED)" in line}
        assert {name.split(".")[0] for name in needed} <= C_LIBRARIES, path
