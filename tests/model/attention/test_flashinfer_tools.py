"""What FlashInfer compiles and links with is found wherever it is, and what cannot be built is tried once."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from tests.end_to_end.helpers.toka_process import wait_for
from tests.model.attention.helpers.kernel_spec import KernelSpec
from tokasaurus.messages.status import describe_error
from tokasaurus.model.attention import choose, flashinfer_tools
from tokasaurus.model.attention.backend import KVShape
from tokasaurus.model.attention.flashinfer_tools import (
    FA3,
    failed_build,
    find_cuda,
    missing_tools,
    note_failed_build,
    provide_tools,
)


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


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def links(environment: dict[str, str], tmp_path: Path) -> bool:
    """By the words of FlashInfer's own link command."""
    home = environment["CUDA_HOME"]
    words = ["c++", "-shared", "-Wl,--no-as-needed", "-x", "c++", "/dev/null", "-o", str(tmp_path / "out.so")]
    words += [f"-L{home}/lib64", f"-L{home}/lib64/stubs", "-lcudart", "-lcuda"]
    words += environment.get("FLASHINFER_EXTRA_LDFLAGS", "").split()
    return subprocess.run(words, env=environment, capture_output=True, timeout=60).returncode == 0


def library(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["c++", "-shared", "-x", "c++", "/dev/null", "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@pytest.mark.usefixtures("cache")
def test_a_toolkit_of_pythons_packages_links(tmp_path: Path, toolkits: Path) -> None:
    """It has lib in place of lib64, no stubs, and a libcudart with a version in its name alone."""
    toolkit = make_toolkit(toolkits / "cuda")
    library(toolkit / "lib/libcudart.so.13")
    environment = {"PATH": os.environ["PATH"], "CUDA_HOME": str(toolkit)}
    assert not links(environment, tmp_path)
    provide_tools(environment, toolkits)
    assert links(environment, tmp_path)
    linked = subprocess.run(["readelf", "-d", str(tmp_path / "out.so")], capture_output=True, text=True, check=True)
    assert "[libcuda.so.1]" in linked.stdout, "the driver's library by the name under which a process finds it"
    again = dict(environment)
    provide_tools(again, toolkits)
    assert again == environment, "nothing is added twice"


def test_a_toolkit_with_all_libraries_is_left_as_it_is(cache: Path, tmp_path: Path, toolkits: Path) -> None:
    toolkit = make_toolkit(toolkits / "cuda")
    library(toolkit / "lib64/libcudart.so")
    library(toolkit / "lib64/stubs/libcuda.so")
    environment = {"PATH": os.environ["PATH"], "FLASHINFER_EXTRA_LDFLAGS": "-O1"}
    provide_tools(environment, toolkits)
    assert environment["FLASHINFER_EXTRA_LDFLAGS"] == "-O1"
    assert links(environment, tmp_path)
    assert not cache.exists()


def test_the_loaded_library_of_the_driver_comes_first(
    cache: Path, tmp_path: Path, toolkits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit = make_toolkit(toolkits / "cuda")
    library(toolkit / "lib64/libcudart.so")
    driver = tmp_path / "driver" / "libcuda.so.1"
    library(driver)
    monkeypatch.setattr(flashinfer_tools, "_loaded", lambda name: [driver] if name == "cuda" else [])
    environment = {"PATH": os.environ["PATH"]}
    provide_tools(environment, toolkits)
    assert links(environment, tmp_path)
    (place,) = cache.glob("flashinfer-libraries/*/libcuda.so")
    assert place.resolve() == driver


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone lists what a process has loaded")
def test_a_library_of_this_process_is_found_in_its_memory_map() -> None:
    assert {path.name for path in flashinfer_tools._loaded("c")} == {"libc.so.6"}
    assert list(flashinfer_tools._loaded("no-such-library")) == []


def test_nvcc_of_pythons_packages_is_found(tmp_path: Path, toolkits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_toolkit(tmp_path / "site" / "nvidia" / "cu12")
    newer = make_toolkit(tmp_path / "site" / "nvidia" / "cu13")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert find_cuda({"PATH": ""}, toolkits) == newer
    installed = make_toolkit(toolkits / "cuda")
    assert find_cuda({"PATH": ""}, toolkits) == installed


@pytest.mark.usefixtures("cache")
def test_a_build_that_failed_is_remembered_for_its_tools(toolkits: Path) -> None:
    toolkit = make_toolkit(toolkits / "cuda")
    environment = {"PATH": os.environ["PATH"], "CUDA_HOME": str(toolkit)}
    assert failed_build(environment) is None
    note_failed_build(environment, RuntimeError("Ninja build failed\nld: cannot find -lx\n"))
    found = failed_build(environment)
    assert found is not None
    assert found[0] == "ld: cannot find -lx"
    other = {**environment, "FLASHINFER_EXTRA_LDFLAGS": "-L/x"}
    assert failed_build(other) is None, "other flags may link"
    (toolkit / "bin/nvcc").write_text("#!/bin/sh\n# another version\n")
    assert failed_build(environment) is None, "another compiler may compile"
    note_failed_build(environment, RuntimeError("y"))
    found = failed_build(environment)
    assert found is not None
    found[1].write_text("{")
    assert failed_build(environment) is None


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    "line",
    [
        "g++: fatal error: Killed signal terminated program cc1plus",
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
        "cc1plus: out of memory allocating 65536 bytes after a total of 9 bytes",
        "as: BFD (GNU Binutils): x.o: No space left on device",
    ],
)
def test_a_build_that_lacked_memory_or_space_is_tried_again(toolkits: Path, line: str) -> None:
    environment = {"PATH": os.environ["PATH"], "CUDA_HOME": str(make_toolkit(toolkits / "cuda"))}
    note_failed_build(environment, RuntimeError(f"Ninja build failed\n{line}\nninja: build stopped"))
    assert failed_build(environment) is None


@pytest.mark.usefixtures("cache")
def test_a_start_does_not_build_again_what_failed_unless_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = KVShape(2, 8, 2, 64, 16, torch.bfloat16, torch.device("cuda", 0))
    tried: list[str] = []
    message = "Ninja build failed. Ninja output:\n/usr/bin/ld: cannot find -lcuda\ncollect2: error: ld returned 1"

    def build(*_: object) -> None:
        tried.append(message)
        raise RuntimeError(message)

    monkeypatch.setattr(choose.flashinfer_backend, "load_library", lambda: None)
    monkeypatch.setattr(choose.flashinfer_backend, "FlashInferBackend", build)
    errors = []
    for is_asked_for in (False, False, True, False):
        with pytest.raises(RuntimeError) as raised:
            choose._build_flashinfer(shape, 0, is_asked_for)
        errors.append(describe_error(raised.value))
    assert errors[0] == errors[2] == "/usr/bin/ld: cannot find -lcuda"
    assert errors[1] == errors[3]
    assert "cannot find -lcuda (found at an earlier start" in errors[1]
    assert len(tried) == 2
    message = "CUDA error: out of luck"
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of luck"):
            choose._build_flashinfer(shape, 16, True)
    assert len(tried) == 4


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (
            "Ninja build failed. Ninja output:\n[7/8] c++ a.o -lcuda\n/usr/bin/ld: cannot find -lcuda: No such file\n"
            "collect2: error: ld returned 1 exit status\nninja: build stopped",
            "/usr/bin/ld: cannot find -lcuda: No such file",
        ),
        (
            "Ninja build failed.\na.o: in function `f':\na.cu:(.text+0x5): undefined reference to `g'\n"
            "collect2: error: ld returned 1 exit status",
            "a.cu:(.text+0x5): undefined reference to `g'",
        ),
        (
            "Ninja build failed.\nx.cu(3): error: static assertion failed\nmore",
            "x.cu(3): error: static assertion failed",
        ),
        ("collect2: error: ld returned 1 exit status", "collect2: error: ld returned 1 exit status"),
        ("out of luck\nmore", "RuntimeError: out of luck"),
        ("", "RuntimeError"),
    ],
)
def test_the_line_says_what_is_wrong(output: str, line: str) -> None:
    assert describe_error(RuntimeError(output)) == line


def compile_in_another_process(spec: KernelSpec) -> subprocess.Popen[bytes]:
    """A process that lets the spec be compiled beside it, and lives until it is killed."""
    script = (
        "import time\n"
        "from pathlib import Path\n"
        "from tests.model.attention.helpers.kernel_spec import KernelSpec\n"
        "from tokasaurus.model.attention import flashinfer_tools\n"
        f"flashinfer_tools.compile_beside(KernelSpec(Path({str(spec.directory)!r}), {spec.outcome!r}))\n"
        "(compilation,) = flashinfer_tools._compiling\n"
        f"Path({str(spec.directory / 'ended')!r}).write_text(str(compilation.wait()))\n"
        "time.sleep(600)\n"
    )
    return subprocess.Popen([sys.executable, "-c", script])


def test_a_kernel_is_compiled_beside_a_server(tmp_path: Path) -> None:
    with compile_in_another_process(spec := KernelSpec(tmp_path, "compiles")) as process:
        wait_for(lambda: spec.is_compiled, 60)
        wait_for(lambda: (ended := tmp_path / "ended").exists() and ended.read_text() == "0", 60)
        process.kill()


def test_a_compilation_ends_with_its_server(tmp_path: Path) -> None:
    with compile_in_another_process(KernelSpec(tmp_path, "hangs")) as process:
        wait_for((tmp_path / "pid").exists, 60)
        compiler = psutil.Process(int((tmp_path / "pid").read_text()))
        assert compiler.nice() == 19
        process.kill()

    def has_ended() -> bool:
        try:
            return compiler.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_for(has_ended, 60)
    assert not (tmp_path / "kernel.so").exists()


def test_a_kernel_that_cannot_be_compiled_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with compile_in_another_process(KernelSpec(tmp_path, "fails")) as process:
        wait_for(lambda: failed_build(os.environ, FA3) is not None, 60)
        process.kill()
    assert failed_build(os.environ) is None, "FlashInfer itself can be built"


@pytest.mark.parametrize(
    ("is_compiled", "has_failed", "started"), [(True, False, 0), (False, False, 1), (False, True, 0)]
)
def test_a_start_loads_what_is_compiled_and_waits_for_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_compiled: bool, has_failed: bool, started: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec, compiled = KernelSpec(tmp_path, "compiles"), []
    monkeypatch.setitem(sys.modules, "flashinfer.jit.core", SimpleNamespace(JitSpec=KernelSpec))
    monkeypatch.setattr(choose, "compile_beside", compiled.append)
    prepared = []
    backend: Any = SimpleNamespace(prepare_fa3=lambda: prepared.append(spec.build_and_load()))
    if is_compiled:
        spec.build()
    if has_failed:
        note_failed_build(os.environ, RuntimeError("Ninja build failed. Ninja output:\nptxas died"), FA3)
    assert choose.has_compiled_fa3(backend) is is_compiled
    assert prepared == ["loaded"] * is_compiled
    assert len(compiled) == started
    assert spec.is_compiled is is_compiled
    assert spec.build_and_load() == "loaded", "FlashInfer compiles again as before"


def test_a_start_goes_on_where_nothing_can_be_compiled_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = KernelSpec(tmp_path, "compiles")
    spec.callback = lambda: None  # type: ignore[attr-defined]  (which pickle refuses)
    monkeypatch.setitem(sys.modules, "flashinfer.jit.core", SimpleNamespace(JitSpec=KernelSpec))
    backend: Any = SimpleNamespace(prepare_fa3=lambda: spec.build_and_load())
    assert choose.has_compiled_fa3(backend) is False
    assert "fa3 is not compiled for later starts" in caplog.text
