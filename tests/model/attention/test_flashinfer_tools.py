"""What FlashInfer compiles with, on machines made of empty files."""

import os
import sys
from pathlib import Path

import pytest

from tokasaurus.model.attention.flashinfer_tools import find_cuda, missing_tools, provide_tools


def make_program(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def make_toolkit(directory: Path) -> Path:
    make_program(directory / "bin/nvcc")
    (directory / "include").mkdir()
    (directory / "include/cuda_runtime.h").touch()
    return directory


@pytest.fixture
def toolkits(tmp_path: Path) -> Path:
    """In the place of /usr/local, empty."""
    directory = tmp_path / "local"
    directory.mkdir()
    return directory


def test_the_toolkit_has_nvcc_and_headers_wherever_it_is(tmp_path: Path, toolkits: Path) -> None:
    assert find_cuda({"PATH": ""}, toolkits) is None
    make_program(tmp_path / "scripts/nvcc")
    assert find_cuda({"PATH": str(tmp_path / "scripts")}, toolkits) is None, "a script without headers beside it"
    older, newer = make_toolkit(toolkits / "cuda-12.8"), make_toolkit(toolkits / "cuda-13.0")
    assert find_cuda({"PATH": str(tmp_path / "scripts")}, toolkits) == newer
    named = make_toolkit(tmp_path / "named")
    assert find_cuda({"PATH": str(older / "bin")}, toolkits) == older
    assert find_cuda({"PATH": "", "CUDA_HOME": str(named)}, toolkits) == named
    assert find_cuda({"PATH": "", "CUDA_HOME": str(tmp_path)}, toolkits) == newer, "no nvcc in CUDA_HOME"


def test_flashinfer_is_told_where_the_toolkit_is(tmp_path: Path, toolkits: Path) -> None:
    make_program(tmp_path / "scripts/nvcc")
    make_program(tmp_path / "scripts/ninja")
    environment = {"PATH": str(tmp_path / "scripts")}
    provide_tools(environment, toolkits)
    assert environment == {"PATH": str(tmp_path / "scripts")}
    assert missing_tools(environment, toolkits) == ["nvcc"]
    toolkit = make_toolkit(toolkits / "cuda")
    provide_tools(environment, toolkits)
    assert environment == {"PATH": str(tmp_path / "scripts"), "CUDA_HOME": str(toolkit)}
    assert missing_tools(environment, toolkits) == []


def test_ninja_is_found_beside_this_python(tmp_path: Path, toolkits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv/bin/python"))
    environment = {"PATH": "/nowhere"}
    provide_tools(environment, toolkits)
    assert environment == {"PATH": "/nowhere"}
    assert missing_tools(environment, toolkits) == ["nvcc", "ninja"]
    make_program(tmp_path / "venv/bin/ninja")
    provide_tools(environment, toolkits)
    assert environment["PATH"] == os.pathsep.join(("/nowhere", str(tmp_path / "venv/bin")))
    assert missing_tools(environment, toolkits) == ["nvcc"]
    make_program(tmp_path / "scripts/ninja")
    environment = {"PATH": str(tmp_path / "scripts")}
    provide_tools(environment, toolkits)
    assert environment == {"PATH": str(tmp_path / "scripts")}
