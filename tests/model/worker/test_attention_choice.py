"""FlashInfer's fa2 or fa3 for prompts: which a start takes. The double of FlashInfer computes both."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.model.attention.helpers import flashinfer_double
from tests.model.attention.helpers.flashinfer_double import PrefillWrapper
from tests.model.helpers.paged_problems import CPU, Segment, fill, make_part, scattered_tables
from tokasaurus.checkpoint.spec import AttentionSpec
from tokasaurus.model.attention import choose, flashinfer_backend
from tokasaurus.model.attention.backend import KVShape, PagedLayout
from tokasaurus.model.attention.flashinfer_backend import FlashInferBackend, has_fa3
from tokasaurus.model.attention.row_split import attend_rows
from tokasaurus.model.buffer_sizes import fa3_plan_bytes, plan_bytes
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker import attention_choice
from tokasaurus.model.worker.attention_choice import choose_calls, choose_prefill
from tokasaurus.model.worker.self_check import Checks

pytestmark = pytest.mark.cuda_path

SHAPE = KVShape(1, 4, 2, 64, 16, torch.bfloat16, CPU)
NO_TOKENS = torch.zeros(0, dtype=torch.int64)


def make_backend(monkeypatch: pytest.MonkeyPatch, shape: KVShape = SHAPE) -> FlashInferBackend:
    flashinfer_double.install(monkeypatch)
    return FlashInferBackend(shape, flashinfer_backend.load_library())


def take_times(monkeypatch: pytest.MonkeyPatch, backend: FlashInferBackend, fa2_s: float, fa3_s: float) -> None:
    """The device's clock shows these times, after first runs that load code."""
    runs: dict[bool, int] = {}

    def seconds(call: Callable[[], object]) -> float:
        call()
        runs[backend.uses_fa3] = runs.get(backend.uses_fa3, 0) + 1
        is_first = runs[backend.uses_fa3] % 4 == 1
        return 9.0 if is_first else fa3_s if backend.uses_fa3 else fa2_s

    monkeypatch.setattr(attention_choice, "_PROMPTS", ((64,), (64, 128)))
    monkeypatch.setattr(attention_choice, "make_stopwatch", lambda _device: SimpleNamespace(seconds=seconds))


def attend_prompts(backend: FlashInferBackend, num_prompts: int = 2) -> torch.Tensor:
    """A decode row, and prompts of which the last tokens are computed."""
    decode, prompts = [Segment(1, 21)], [Segment(5, 20 + 7 * index) for index in range(num_prompts)]
    tables, num_blocks = scattered_tables([*decode, *prompts], 16, seed=1)
    backend.allocate(num_blocks)
    fill(backend, SHAPE, [*decode, *prompts], tables)
    parts = make_part(decode, tables[:1], 0, True), make_part(prompts, tables[1:], 1, True)
    backend.plan(PagedLayout(NO_TOKENS, parts))
    num_rows = 1 + 5 * num_prompts
    query = torch.randn(num_rows, 4, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    return attend_rows(backend, query, 0, PagedLayout(NO_TOKENS, parts))


def fa3_runs(backend: FlashInferBackend) -> int:
    wrappers: list[Any] = [wrappers.fa3 for wrappers in backend._sets if wrappers.fa3 is not None]
    assert all(isinstance(wrapper, PrefillWrapper) and wrapper.is_fa3 for wrapper in wrappers)
    return sum(wrapper.num_runs for wrapper in wrappers)


def test_faster_fa3_computes_prompts_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend(monkeypatch)
    expected = attend_prompts(backend)
    take_times(monkeypatch, backend, fa2_s=0.003, fa3_s=0.002)
    line = choose_prefill(backend, SHAPE, Mesh(), checks := Checks())
    assert line == "prompts take fa3: 3 ms a layer by fa2, 2 by fa3"
    assert checks.switched_off == []
    before = fa3_runs(backend)
    torch.testing.assert_close(attend_prompts(backend), expected, atol=0, rtol=0)
    assert fa3_runs(backend) == before + 1
    prefix = make_part([Segment(2, 32)], [[1, 2]], 0, False, is_partial=True)
    suffix = make_part([Segment(1, 3), Segment(1, 3)], [[3], [4]], 0, True, is_partial=True)
    layout = PagedLayout(NO_TOKENS, (suffix,), prefix)
    backend.plan(layout)
    attend_rows(backend, torch.zeros(2, 4, 64, dtype=torch.bfloat16), 0, layout)
    assert fa3_runs(backend) == before + 1, "a shared prefix is few segments with long contexts"


@pytest.mark.parametrize("fa3_s", [0.00299, 0.0031])
def test_fa3_that_is_not_clearly_faster_is_freed(fa3_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend(monkeypatch)
    take_times(monkeypatch, backend, fa2_s=0.003, fa3_s=fa3_s)
    assert choose_prefill(backend, SHAPE, Mesh(), Checks()).startswith("prompts take fa2: 3 ms")
    assert not backend.uses_fa3
    assert all(wrappers.fa3 is None for wrappers in backend._sets)
    attend_prompts(backend)


def test_the_slowest_rank_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend(monkeypatch)
    take_times(monkeypatch, backend, fa2_s=0.003, fa3_s=0.002)
    others = iter([1, *[-1, -4_000_000] * 2])  # another rank has fa3 compiled; its times, with their signs turned
    monkeypatch.setattr(attention_choice, "least_of_ranks", lambda value, *_: min(value, next(others)))
    assert choose_prefill(backend, SHAPE, Mesh(), Checks()) == "prompts take fa2: 3 ms a layer by fa2, 4 by fa3"
    assert not backend.uses_fa3


def wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    run = PrefillWrapper._run

    def run_wrong(wrapper: PrefillWrapper, *args: Any) -> Any:
        output, lse = run(wrapper, *args)
        return output.mul_(1.1) if wrapper.is_fa3 else output, lse

    monkeypatch.setattr(PrefillWrapper, "_run", run_wrong)


def failed_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    run = PrefillWrapper._run

    def fail(wrapper: PrefillWrapper, *args: Any) -> Any:
        if wrapper.is_fa3:
            raise RuntimeError("Ninja build failed. Ninja output:\nptxas died")
        return run(wrapper, *args)

    monkeypatch.setattr(PrefillWrapper, "_run", fail)


@pytest.mark.parametrize("fault", [wrong_results, failed_builds])
def test_fa3_that_fails_or_computes_wrongly_is_switched_off(
    fault: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Any,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    backend = make_backend(monkeypatch)
    expected = attend_prompts(backend)
    with pytest.MonkeyPatch.context() as patched:
        fault(patched)
        assert choose_prefill(backend, SHAPE, Mesh(), checks := Checks()) == "prompts take fa2"
    assert checks.switched_off == ["flashinfer_fa3"]
    (line,) = [record.getMessage() for record in caplog.records if "fa3" in record.getMessage()]
    assert line.startswith("FlashInfer's fa3 is switched off: ")
    torch.testing.assert_close(attend_prompts(backend), expected, atol=0, rtol=0)
    later = Checks()
    take_times(monkeypatch, backend, fa2_s=0.003, fa3_s=0.002)
    choose_prefill(backend, SHAPE, Mesh(), later)
    is_tried_again = fault is wrong_results
    assert backend.uses_fa3 is is_tried_again, "a build that failed is not tried at each start"
    assert choose.failed_build({}) is None, "FlashInfer itself can be built"


def test_calls_that_cannot_be_learnt_or_compute_wrongly_leave_the_wrappers_in_use(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = make_backend(monkeypatch)
    expected = attend_prompts(backend)

    def prepare_wrong() -> None:
        wrong = SimpleNamespace(run=lambda _query, _kv_cache, output, _lse: output.zero_())
        kernels = ("decode", 0), ("fa2", 0)
        backend._calls = dict.fromkeys(kernels, SimpleNamespace(plan=lambda *_: wrong))  # type: ignore[arg-type]

    for prepare in (backend.prepare_calls, prepare_wrong):  # the double has no compiled functions
        caplog.clear()
        monkeypatch.setattr(backend, "prepare_calls", prepare)
        choose_calls(backend, SHAPE, checks := Checks())
        assert checks.switched_off == ["flashinfer_calls"]
        (line,) = caplog.messages
        assert line.startswith("calling FlashInfer without its wrappers is switched off: ")
        torch.testing.assert_close(attend_prompts(backend), expected, atol=0, rtol=0)


def test_plans_that_are_too_large_are_left_to_fa2(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend(monkeypatch)
    backend.prepare_fa3()
    before = fa3_runs(backend)
    for wrappers in backend._sets:
        backend._make_plan_memory(wrappers, fa3_plan_bytes(10, 2, SHAPE, 1))
    attend_prompts(backend, num_prompts=2)
    assert fa3_runs(backend) == before + 1
    attend_prompts(backend, num_prompts=3)
    assert fa3_runs(backend) == before + 1


@pytest.mark.parametrize(("num_heads", "head_dim"), [(32, 64), (64, 128)])
def test_usual_plans_of_fa3_fit(num_heads: int, head_dim: int) -> None:
    shape = replace(SHAPE, num_heads=num_heads, num_kv_heads=8, head_dim=head_dim)
    assert fa3_plan_bytes(8192, 256, shape, 132) <= plan_bytes(8192)


def test_fa3_is_for_hopper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def capabilities() -> Iterator[tuple[int, int]]:
        yield from ((8, 0), (9, 0), (10, 0))

    given = capabilities()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: next(given))
    assert [has_fa3(torch.device("cuda", 0)) for _ in range(3)] == [False, True, False]
    assert not has_fa3(CPU)


@pytest.mark.parametrize(
    ("layer", "takes_fa3"),
    [
        (AttentionSpec(4, 2, 64, 0.3), True),
        (AttentionSpec(4, 2, 64, 0.125, window=9), False),
        (AttentionSpec(4, 2, 64, 0.125, softcap=9.0), False),
    ],
)
def test_windows_and_caps_are_left_to_fa2(
    layer: AttentionSpec, takes_fa3: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(SHAPE, layers=(layer,), sinks=(torch.linspace(0, 1, 4),))
    backend = make_backend(monkeypatch, shape)
    take_times(monkeypatch, backend, fa2_s=0.003, fa3_s=0.002)
    line = choose_prefill(backend, shape, Mesh(), checks := Checks())
    assert line.startswith("prompts take fa3: 3 ms" if takes_fa3 else "prompts take fa2, for windows")
    assert backend.uses_fa3 is takes_fa3
    assert checks.switched_off == []
    attend_prompts(backend)


def test_a_rank_that_has_not_compiled_fa3_lets_all_take_fa2(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend(monkeypatch)
    monkeypatch.setattr(attention_choice, "least_of_ranks", lambda _value, *_: 0)
    line = choose_prefill(backend, SHAPE, Mesh(), checks := Checks())
    assert line.startswith("prompts take fa2; fa3 is compiled for later starts")
    assert not backend.uses_fa3
    assert checks.switched_off == []
    attend_prompts(backend)
