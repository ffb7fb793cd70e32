"""How the kernel libraries are found, built and loaded, and what is used without them."""

import ctypes
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.damage import DAMAGE
from tests.model.helpers.steps import CPU
from tokasaurus.checkpoint.cache import write_checksums
from tokasaurus.messages.status import UserError
from tokasaurus.model.attention.backend import KVShape
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.attention.torch_backend import TorchBackend
from tokasaurus.model.cpu import bindings, build
from tokasaurus.model.cpu.bindings import STRUCTS, Kernels, StructMismatch, load_kernels
from tokasaurus.model.cpu.build import Library, LibraryUnavailable, find_or_build, is_there, machine


@pytest.fixture
def nothing_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def failing_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken"
    script = '[ "$1" = --version ] && echo broken 1.0 && exit 0\necho In a file: >&2\necho error: bad luck >&2\nexit 1'
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


@pytest.fixture
def counting_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that logs its calls -> the log, one line per call."""
    calls, compiler = tmp_path / "calls", tmp_path / "counting"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return calls


def tiny_library(directory: Path, answer: int) -> Library:
    directory.mkdir(exist_ok=True)
    first, second = directory / "first.cpp", directory / "second.cpp"
    first.write_text('int answer(); extern "C" int toka_answer() { return answer(); }')
    second.write_text(f"int answer() {{ return {answer}; }}")
    return Library("tiny", machine(), (first, second), ())


def call(path: Path) -> int:
    answer: int = ctypes.CDLL(str(path)).toka_answer()
    return answer


def assert_one_warning(caplog: pytest.LogCaptureFixture, about: str) -> None:
    (record,) = [record for record in caplog.records if record.name == bindings.__name__]
    assert record.levelno == logging.WARNING
    assert about in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.usefixtures("nothing_loaded", "no_compiler")
def test_without_a_compiler_one_line_warns_and_plain_torch_is_used(caplog: pytest.LogCaptureFixture) -> None:
    assert load_kernels() is None
    assert load_kernels() is None
    assert_one_warning(caplog, "no C++ compiler found")
    shape = KVShape(1, 4, 2, 16, 16, torch.float32, CPU)
    assert isinstance(make_backend(None, shape, load_kernels()), TorchBackend)


@pytest.mark.usefixtures("nothing_loaded", "failing_compiler")
def test_a_failing_compiler_gives_a_one_line_warning_with_its_error(caplog: pytest.LogCaptureFixture) -> None:
    assert load_kernels() is None
    assert_one_warning(caplog, "error: bad luck")


@pytest.mark.usefixtures("nothing_loaded", "no_compiler")
def test_a_requested_instruction_set_is_never_replaced_by_plain_torch() -> None:
    with pytest.raises(UserError, match=r"^cpu_isa=avx2: .*no C\+\+ compiler found"):
        load_kernels("avx2")


@pytest.mark.usefixtures("nothing_loaded")
def test_plain_torch_builds_nothing_and_logs_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_kernels("torch") is None
    assert not list(tmp_path.iterdir())
    assert not caplog.records


@pytest.mark.usefixtures("nothing_loaded")
def test_a_library_is_built_once_and_then_found(tmp_path: Path, counting_compiler: Path) -> None:
    tiny = tiny_library(tmp_path / "sources", 5)
    assert not is_there(tiny)
    paths = [find_or_build(tiny) for _ in range(2)]
    assert is_there(tiny)
    assert paths[0] == paths[1]
    assert call(paths[0]) == 5
    builds = [line for line in counting_compiler.read_text().splitlines() if line != "--version"]
    assert len(builds) == 3  # each source, and the linker


@pytest.mark.usefixtures("nothing_loaded")
def test_changed_sources_are_built_again(tmp_path: Path) -> None:
    assert [call(find_or_build(tiny_library(tmp_path / "sources", answer))) for answer in (5, 6)] == [5, 6]


@pytest.mark.usefixtures("nothing_loaded")
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_library_is_built_again_before_it_is_loaded(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = tiny_library(tmp_path / "sources", 5)
    path = find_or_build(tiny)  # not loaded yet: this process would keep the loaded file
    DAMAGE[kind](path)
    assert not is_there(tiny)
    assert str(path) in caplog.text
    assert find_or_build(tiny) == path
    assert is_there(tiny)
    assert call(path) == 5


@pytest.mark.usefixtures("nothing_loaded")
def test_the_remains_of_a_killed_build_are_harmless(tmp_path: Path) -> None:
    tiny = tiny_library(tmp_path / "sources", 5)
    path = find_or_build(tiny)
    unfinished = path.parent.with_name(f".{path.parent.name}.unfinished")
    unfinished.mkdir()
    (unfinished / path.name).write_text("half")
    path.unlink()
    assert call(find_or_build(tiny)) == 5
    assert not unfinished.exists()


@pytest.mark.usefixtures("nothing_loaded")
def test_a_library_exports_only_the_functions_that_python_calls(tmp_path: Path) -> None:
    path = find_or_build(tiny_library(tmp_path / "sources", 5))
    with pytest.raises(AttributeError):
        ctypes.CDLL(str(path))._Z6answerv  # noqa: B018


@pytest.mark.usefixtures("nothing_loaded")
def test_a_prebuilt_library_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_library(tmp_path / "sources", 5)
    prebuilt = use_prebuilt(tiny, tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", "")
    assert is_there(tiny)
    assert find_or_build(tiny) == prebuilt
    with pytest.raises(LibraryUnavailable):  # built from other sources
        find_or_build(tiny_library(tmp_path / "sources", 6))


@pytest.mark.usefixtures("nothing_loaded")
def test_a_prebuilt_library_that_cannot_be_loaded_is_built_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tiny_library(tmp_path / "sources", 5)
    prebuilt = use_prebuilt(tiny, tmp_path, monkeypatch)
    prebuilt.write_text("made for another system")
    write_checksums(prebuilt.parent)
    assert call(find_or_build(tiny)) == 5


@pytest.mark.usefixtures("nothing_loaded")
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_prebuilt_library_is_never_loaded(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = tiny_library(tmp_path / "sources", 5)
    prebuilt = use_prebuilt(tiny, tmp_path, monkeypatch)
    DAMAGE[kind](prebuilt)
    assert call(find_or_build(tiny)) == 5  # from source
    assert kind == "missing" or str(prebuilt) in caplog.text
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "empty"))
    with pytest.raises(LibraryUnavailable):
        find_or_build(tiny)


def use_prebuilt(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs the library as a wheel would."""
    directory = tmp_path / "prebuilt"
    directory.mkdir()
    built = find_or_build(library)
    prebuilt = directory / library.prebuilt_name(built.suffix)
    shutil.copy(built, prebuilt)
    write_checksums(directory)
    monkeypatch.setattr(build, "PREBUILT", directory)
    return prebuilt


def test_every_struct_is_checked_when_a_library_is_loaded() -> None:
    defined = {
        each for each in vars(bindings).values() if isinstance(each, type) and issubclass(each, ctypes.Structure)
    }
    assert set(STRUCTS.values()) == defined


@pytest.mark.parametrize("name", STRUCTS)
def test_a_struct_without_its_last_field_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shorter(ctypes.Structure):
        _fields_ = tuple(STRUCTS[name]._fields_)[:-1]

    kernels = load_kernels()
    if kernels is None:
        pytest.skip("no kernels for this machine")
    size, shorter = ctypes.sizeof(STRUCTS[name]), ctypes.sizeof(Shorter)
    monkeypatch.setitem(STRUCTS, name, Shorter)
    with pytest.raises(StructMismatch, match=f"^struct {name} has {size} bytes in C[+][+] and {shorter} in Python"):
        Kernels(kernels.path)
