"""The checks of a start: right backends pass, wrong ones do not, and the next one takes their place."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.tiny_model import save_tiny_model
from tests.model.attention.helpers import flashinfer_double
from tokasaurus.checkpoint import resolve_checkpoint
from tokasaurus.config import ServerConfig
from tokasaurus.messages.status import FlagRefused
from tokasaurus.model.attention import flashinfer_backend
from tokasaurus.model.attention.backend import AttentionBackend, KVShape
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.attention.flashinfer_backend import FlashInferBackend
from tokasaurus.model.attention.torch_backend import TorchBackend
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.attention_check import measure_attention
from tokasaurus.model.worker.entry import start_worker
from tokasaurus.model.worker.self_check import Checks, ComputesWrongly, Measured, compared, describe

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def shape_of(dtype: torch.dtype, heads: tuple[int, int, int] = (8, 2, 64), page_size: int = 16) -> KVShape:
    return KVShape(2, *heads, page_size, dtype, CPU)


def check_attention(backend: AttentionBackend, shape: KVShape) -> None:
    for measured in measure_attention(backend, shape):
        if not measured.is_right:
            raise ComputesWrongly(describe(measured))


def build(name: str, shape: KVShape, monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    flashinfer_double.install(monkeypatch, any_dtype=True)
    return make_backend(name, shape, load_kernels() if name == "cpu" else None)


@pytest.mark.parametrize("heads", [(8, 2, 64), (9, 3, 64), (28, 4, 128), (3, 3, 80)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["torch", "flashinfer"])
def test_right_backends_are_far_within_the_tolerance(
    name: str, dtype: torch.dtype, heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = shape_of(dtype, heads)
    measured = list(measure_attention(build(name, shape, monkeypatch), shape))
    names = [what.removeprefix("attention ") for what, _, _ in measured]
    assert names[:4] == ["(decode)", "(prefill)", "(decode and prefill)", "(prefix group)"]
    assert names[4:] == (["(recorded decode)"] * 2 if name == "flashinfer" else [])
    for what, error, tolerance in measured:
        assert error < tolerance / 2, what


@pytest.mark.parametrize("page_size", [16, 32, 256])
def test_the_cpu_kernels_pass_with_any_page_size(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(torch.float32, page_size=page_size)
    check_attention(build("cpu", shape, monkeypatch), shape)


class Wrong:
    """The plain backend, wrong in one way."""

    def __init__(self, backend: AttentionBackend, what: str) -> None:
        self._backend, self._what = backend, what

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        if self._what != "does not write":
            self._backend.write(key, value, layer)

    def attend(
        self, query: torch.Tensor, layer: int, part: Any, output: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        asked = query * 1.2 if self._what == "scale" else query
        found, lse = self._backend.attend(asked, layer, part)
        match self._what:
            case "base-2 LSE":
                lse = None if lse is None else lse * 1.4427
            case "heads":
                found = found.flip(1)
            case "NaN":
                found[-1, -1, -1] = torch.nan
        return found if output is None else output.copy_(found), lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", ["does not write", "base-2 LSE", "scale", "heads", "NaN"])
def test_wrong_backends_are_found(what: str, dtype: torch.dtype) -> None:
    shape = shape_of(dtype)
    with pytest.raises(ComputesWrongly, match=r"^attention \(.*\) differs by .*, allowed is "):
        check_attention(Wrong(TorchBackend(shape), what), shape)


@pytest.mark.parametrize("fault", ["raises", "computes wrongly", "is built by a compiler that fails"])
def test_what_fails_is_left_out_with_one_line_or_refused_by_name(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flashinfer_double.install(monkeypatch)
    on_cuda = KVShape(2, 8, 2, 64, 16, torch.float32, torch.device("cuda", 0))
    monkeypatch.setattr("tokasaurus.model.attention.choose.missing_tools", lambda _environment: ["nvcc", "ninja"])

    def broken(_shape: KVShape, _max_graph_rows: int) -> AttentionBackend:
        if fault == "raises":
            raise KeyError(torch.float32)
        if fault == "is built by a compiler that fails":
            raise RuntimeError("Ninja build failed\nx.cu: error: static assertion failed\nmore")
        return Wrong(TorchBackend(shape_of(torch.float32)), "heads")

    monkeypatch.setattr("tokasaurus.model.attention.choose._build_flashinfer", broken)

    def check(backend: AttentionBackend) -> None:
        if isinstance(backend, Wrong):
            check_attention(backend, shape_of(torch.float32))

    left_out: list[tuple[str, str]] = []
    with caplog.at_level(logging.WARNING):
        chosen = make_backend(
            None, on_cuda, None, check=check, on_left_out=lambda name, reason: left_out.append((name, reason))
        )
    assert isinstance(chosen, TorchBackend)
    ((name, reason),) = left_out
    (line,) = [record.getMessage() for record in caplog.records]
    assert name == "flashinfer"
    assert line.startswith(f"attention_backend=flashinfer is switched off, since it fails at the start: {reason}")
    assert "compiled by nvcc and ninja, which must be installed" in line
    assert "\n" not in line
    assert ("static assertion failed" in line) == (fault == "is built by a compiler that fails")
    with pytest.raises(ValueError, match=r"^attention_backend=flashinfer: "):
        make_backend("flashinfer", on_cuda, None, check=check)


def test_ranks_choose_alike() -> None:
    shape = shape_of(torch.float32)
    answers = iter([False, True])
    kernels = load_kernels()
    assert kernels is not None
    assert isinstance(make_backend(None, shape, kernels, all_agree=lambda _works: next(answers)), TorchBackend)
    with pytest.raises(ValueError, match=r"^attention_backend=cpu: it fails on another rank$"):
        make_backend("cpu", shape, kernels, all_agree=lambda _works: False)


def test_a_backend_asked_for_by_name_that_fails_is_a_refused_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, "qwen2")
    flashinfer_double.install(monkeypatch)

    def fail(_self: FlashInferBackend, *_: Any) -> None:
        raise OSError("cannot load x.so")

    monkeypatch.setattr(flashinfer_backend.FlashInferBackend, "__init__", fail)
    config = ServerConfig.parse(["attention_backend=flashinfer", "kv_cache_num_tokens=100"])
    with pytest.raises(FlagRefused, match=r"^attention_backend=flashinfer: OSError: cannot load x\.so$") as raised:
        start_worker(config, resolve_checkpoint(str(tmp_path)), Mesh(), 0, lambda _: None)
    assert raised.value.exit_code == 2


def test_a_check_that_fails_is_noted_with_one_line_and_by_name_refused(caplog: pytest.LogCaptureFixture) -> None:
    checks = Checks()
    right, other = torch.tensor([1.0, torch.nan, 4.0]), torch.tensor([1.0, torch.nan, 4.5])

    def measure_wrong() -> Iterator[Measured]:
        yield compared("first", right, right, 0.1)
        yield compared("second", other, right, 0.1)
        yield compared("third", right, right, 0.1)

    def measure_right() -> Iterator[Measured]:
        yield compared("of zeros", torch.zeros(2), torch.zeros(2), 0.0)
        yield compared("within", other, right, 0.125)

    def fail() -> Iterator[Measured]:
        yield compared("first", right, right, 0.1)
        raise KeyError("no such\nkernel")

    assert checks.passes("good", measure_right, "good is", "worse")
    assert not checks.passes("bad", measure_wrong, "bad is", "it is slow")
    assert not checks.passes("broken", fail, "broken is", "it is slow")
    expected = ["second differs by 0.12, allowed is 0.1", "KeyError: 'no such\\nkernel'"]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"{name} is switched off: {why}; it is slow" for name, why in zip(("bad", "broken"), expected, strict=True)
    ]
    assert checks.switched_off == ["bad", "broken"]
    with pytest.raises(FlagRefused, match=f"^bad=T: {expected[0]}$"):
        checks.passes("bad", measure_wrong, "bad is", "it is slow", flag="bad=T")
    found = [(result.feature, result.failure) for result in checks.results]
    assert found[:7] == [("good", None)] * 2 + [
        ("bad", None),
        ("bad", expected[0]),
        ("bad", None),
        ("broken", None),
        ("broken", expected[1]),
    ]


def test_memory_that_is_missing_is_no_fault_of_what_is_checked() -> None:
    def fail() -> Iterator[Measured]:
        raise torch.OutOfMemoryError
        yield

    with pytest.raises(torch.OutOfMemoryError):
        Checks().passes("feature", fail, "it is", "")


@pytest.mark.parametrize(
    ("found", "expected"),
    [([1.0, torch.nan], [1.0, 2.0]), ([1.0, 2.0], [1.0, torch.nan]), ([1.0, torch.inf], [1.0, 2.0]), ([1.0], [0.0])],
)
def test_what_is_not_finite_or_should_be_zero_is_not_right(found: list[float], expected: list[float]) -> None:
    assert not compared("x", torch.tensor(found), torch.tensor(expected), 0.5).is_right


def test_ranks_switch_off_alike(caplog: pytest.LogCaptureFixture) -> None:
    checks = Checks(all_agree=lambda _works: False)
    assert not checks.passes("feature", lambda: iter(()), "feature is", "slow")
    assert checks.switched_off == ["feature"]
    assert [record.getMessage() for record in caplog.records] == [
        "feature is switched off: it fails on another rank; slow"
    ]
