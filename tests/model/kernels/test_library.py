"""What happens where the kernels cannot be built."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.model.steps import CPU
from tokasaurus.model.attention.backend import KVShape
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.attention.torch_backend import TorchBackend
from tokasaurus.model.kernels import library
from tokasaurus.model.kernels.library import load_kernels


@pytest.fixture(scope="module")
def built_library() -> Path:
    kernels = load_kernels()
    assert kernels is not None
    return Path(kernels.library._name)


@pytest.fixture
def nothing_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


def assert_one_warning(caplog: pytest.LogCaptureFixture, about: str) -> None:
    (record,) = [record for record in caplog.records if record.name == library.__name__]
    assert record.levelno == logging.WARNING
    assert about in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.usefixtures("nothing_loaded")
def test_without_a_compiler_one_line_warns_and_plain_torch_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load_kernels() is None
    assert load_kernels() is None
    assert_one_warning(caplog, "no C++ compiler found")
    shape = KVShape(1, 4, 2, 16, 16, torch.float32, CPU)
    assert isinstance(make_backend(None, shape, load_kernels()), TorchBackend)


@pytest.mark.usefixtures("nothing_loaded")
def test_a_compiler_that_fails_is_one_line_of_warning_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit 0\necho out of luck >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert load_kernels() is None
    assert_one_warning(caplog, "out of luck")


@pytest.mark.usefixtures("built_library", "nothing_loaded")
def test_kernels_are_built_once_and_then_found(built_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_builds = 0

    def build(_compiler: list[str], to: Path) -> None:
        nonlocal num_builds
        num_builds += 1
        shutil.copy(built_library, to / "kernels.so")

    monkeypatch.setattr(library, "_build", build)
    for _ in range(2):
        assert load_kernels() is not None
        load_kernels.cache_clear()
    assert num_builds == 1
