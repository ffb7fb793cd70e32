"""`make test-flashinfer-build` without a compiler: what a call leaves for the next."""

import os
import time
from pathlib import Path

import pytest
import torch

from tests.model.attention.helpers import flashinfer_build, flashinfer_double
from tests.model.attention.helpers.flashinfer_build import FAILED, NOT_ALL_BUILT, Module
from tests.model.attention.helpers.flashinfer_modules import run_start
from tests.model.helpers.paged_problems import CPU
from tokasaurus.model.attention.backend import KVShape

NINJA = """#!/bin/sh
# As ninja: builds what its log does not have, one output after the other.
cd "$4"
for output in first.o second.o library.so; do
    grep -q $output .ninja_log && continue
    echo "compiling $output"
    %s
    printf '1000\\t3500\\t0\\t%%s\\tabc\\n' $PWD/$output >> .ninja_log
    printf x > $output
done
"""


def test_a_start_uses_both_kinds_of_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the double: what is run to find the modules is what a start runs."""
    flashinfer_double.install(monkeypatch)
    used = set()
    library = flashinfer_double.Library()
    for name in ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"):
        real = getattr(library, name)
        monkeypatch.setattr(
            library, name, lambda *args, _real=real, **options: used.add(_real) or _real(*args, **options)
        )
    assert run_start(KVShape(1, 9, 3, 64, 16, torch.bfloat16, CPU), library) >= 4
    assert len(used) == 2


def make_executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_without_a_compiler_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flashinfer_build, "find_cuda", lambda _environment: None)
    assert flashinfer_build.main([]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("skipped: no nvcc")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    """One module, whose library is taken for a good one."""
    name = "batch_decode_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_64_head"
    module = Module(name, tmp_path / "module", tmp_path / "module/library.so", 2, ["9/3/64", "9/3/64"])
    module.directory.mkdir()
    (module.directory / ".ninja_log").write_text("# ninja log v5\n")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    monkeypatch.setattr(flashinfer_build, "find_cuda", lambda _environment: tmp_path)
    monkeypatch.setattr(flashinfer_build, "build_environment", lambda _build: environment)
    monkeypatch.setattr(flashinfer_build, "find_modules", lambda *_: [module])
    monkeypatch.setattr(flashinfer_build, "load_error", lambda *_: None)
    return module


def test_a_call_that_is_cut_is_gone_on_with(module: Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_executable(tmp_path / "ninja", NINJA % "[ $output = first.o ] || exec sleep 60")
    began_s = time.monotonic()
    assert flashinfer_build.main(["0.1", "--minutes", "0.03"]) == NOT_ALL_BUILT
    assert time.monotonic() - began_s < 20, "ninja and what it has started are ended"
    assert "time is up with 1 outputs" in capsys.readouterr().out
    make_executable(tmp_path / "ninja", NINJA % ":")
    assert flashinfer_build.main(["0.1"]) == 0
    out = capsys.readouterr().out
    assert "[1/1] decode bf16 head size 64 (9/3/64): 2 files" in out
    assert "compiled: 8 s, the longest file 2 s" in out
    assert "compiling first.o" not in (module.directory / "ninja.out").read_text()


def test_a_module_that_does_not_compile_or_load_is_a_failure(
    module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_executable(tmp_path / "ninja", NINJA % "exit 3")
    assert flashinfer_build.main(["0.1"]) == FAILED
    out = capsys.readouterr().out
    assert "compiling first.o" in out
    assert "ninja's exit code 3" in out
    make_executable(tmp_path / "ninja", NINJA % ":")
    monkeypatch.setattr(flashinfer_build, "load_error", lambda *_: "undefined symbol: cuGetProcAddress")
    assert flashinfer_build.main(["0.1"]) == FAILED
    assert "cannot be loaded: undefined symbol" in capsys.readouterr().out
    assert module.library.exists()
