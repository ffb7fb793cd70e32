"""The FlashInfer backend's own code over a double of FlashInfer, which checks each call and computes on the CPU."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given

from tests.helpers.examples import IS_NIGHTLY, examples, few
from tests.helpers.tiny_model import FAMILIES, family_config, option_config, save_random_model, save_tiny_model
from tests.model.attention.helpers import flashinfer_double
from tests.model.attention.helpers.flashinfer_problems import problems
from tests.model.execution.helpers.launch_count import CountingDevice
from tests.model.helpers.float64_attention import attention_beside_float64
from tests.model.helpers.greedy_decoding import assert_equals_oracle, load, oracle_greedy
from tests.model.helpers.paged_problems import CPU, Segment, attend_all, fill, make_part, scattered_tables
from tests.model.helpers.prefix_samples import Samples
from tests.model.helpers.pretend_device import DEVICE, PretendTransfers, move_to_device, on_device, pretended
from tests.model.helpers.steps import StepDriver, make_runner, one_thread
from tokasaurus.checkpoint.spec import AttentionSpec
from tokasaurus.model.attention import choose, flashinfer_backend
from tokasaurus.model.attention.backend import KVShape, PagedLayout
from tokasaurus.model.attention.block_lists import as_in_steps, in_recorded, lists_in
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.attention.row_split import attend_rows, merge_partial
from tokasaurus.model.attention.torch_backend import TorchBackend
from tokasaurus.model.buffer_sizes import RING_SIZE, padded_count, workspace_bytes

pytestmark = pytest.mark.cuda_path

CUDA = torch.device("cuda")
KNOWN_OPTIONS = {
    *("num_qo_heads", "num_kv_heads", "head_dim", "head_dim_qk", "page_size"),
    *("q_data_type", "kv_data_type", "o_data_type"),
}
"""Of `plan`, for every kind of layer."""
NO_TOKENS = torch.zeros(0, dtype=torch.int64)


@pytest.fixture
def _double(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_double.install(monkeypatch)


@pytest.fixture
def _double_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """For numbers that are compared to the last digits, and whole models, which are in float32."""
    flashinfer_double.install(monkeypatch, any_dtype=True)


@pytest.mark.usefixtures("_double_in_float32")
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=problems())
def test_ragged_batches_equal_the_reference(problem: tuple[KVShape, list[Segment], bool, int]) -> None:
    shape, segments, causal, seed = problem
    output, lse = attend_all("flashinfer", shape, segments, causal, layer=1, seed=seed, is_partial=True)
    expected = attend_all("reference", shape, segments, causal, layer=1, seed=seed, is_partial=True)
    assert lse is not None
    torch.testing.assert_close((output, lse * math.log(2)), expected, atol=1e-5, rtol=1e-5)


def test_a_layer_with_prefix_groups_launches_two_parts_and_their_merging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in between: the LSE is merged in FlashInfer's base."""
    flashinfer_double.install(monkeypatch)
    device = CountingDevice()
    for wrapper in (flashinfer_double.PrefillWrapper, flashinfer_double.DecodeWrapper):
        monkeypatch.setattr(wrapper, "_run", device.one_launch("attend", wrapper._run))
    monkeypatch.setattr(flashinfer_backend, "merge_partial", device.one_launch("merge", merge_partial))
    shape = KVShape(1, 4, 2, 64, 16, torch.bfloat16, DEVICE)
    suffixes, tables = [Segment(1, 5), Segment(1, 20)], [[4], [5, 6]]
    with torch.inference_mode(), device:
        backend = make_backend("flashinfer", shape, None)
        backend.allocate(9)
        layout = PagedLayout(
            on_device(torch.zeros(0, dtype=torch.int64)),
            (make_part(suffixes, tables, 0, causal=True, is_partial=True),),
            make_part([Segment(2, 48)], [[1, 2, 3]], 0, causal=False, is_partial=True),
        )
        backend.plan(layout)
        query = on_device(torch.ones(2, 4, 64, dtype=torch.bfloat16))
        output = on_device(torch.zeros(2, 4, 64, dtype=torch.bfloat16))
        device.launches = launches = []
        attend_rows(backend, query, 0, layout, output)
    assert launches == ["attend", "attend", "merge"]


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_partial_part_has_the_querys_dtype_and_an_lse_of_base_2(dtype: torch.dtype) -> None:
    """FlashInfer has no float32 output, which its double refuses."""
    shape = KVShape(1, 6, 2, 64, 16, dtype, CPU)
    segments = [Segment(1, 600), Segment(1, 33), Segment(40, 200)]
    (output, lse), (expected, expected_lse) = attention_beside_float64("flashinfer", shape, segments)
    assert output.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), expected_lse / math.log(2), atol=1e-4, rtol=0)
    torch.testing.assert_close(output.double(), expected, atol=1e-4, rtol=torch.finfo(dtype).eps)


@pytest.mark.usefixtures("_double")
def test_rounding_both_parts_before_their_merge_costs_less_than_a_second_rounding() -> None:
    """Rows of two prefix groups in bfloat16, against the reference, which keeps its parts in float32. One rounding of
    random values has a root mean square of 2 ** -8 / sqrt(12) of their power of 2; merging averages those of parts."""
    shape = KVShape(1, 8, 2, 64, 16, torch.bfloat16, CPU)
    prefixes = [Segment(5, 320), Segment(4, 160)]
    suffixes = [Segment(1, 20 + 37 * row) for row in range(9)]
    tables, num_blocks = scattered_tables([*prefixes, *suffixes], 16, seed=2)
    layout = PagedLayout(
        NO_TOKENS,
        (make_part(suffixes, tables[2:], 0, causal=True, is_partial=True),),
        make_part(prefixes, tables[:2], 0, causal=False, is_partial=True),
    )
    query = torch.randn((9, 8, 64), generator=torch.Generator().manual_seed(0)).bfloat16()
    exact_shape = replace(shape, dtype=torch.float32)
    exact, once, twice = (
        attend_in_groups(name, each, prefixes + suffixes, tables, num_blocks, layout, query.to(each.dtype)).double()
        for name, each in (("reference", exact_shape), ("reference", shape), ("flashinfer", shape))
    )
    errors = [(result - exact).square().mean().sqrt() for result in (once, twice)]
    assert errors[0] < errors[1] < 2**0.5 * errors[0]


def attend_in_groups(
    name: str,
    shape: KVShape,
    segments: list[Segment],
    tables: list[list[int]],
    num_blocks: int,
    layout: PagedLayout,
    query: torch.Tensor,
) -> torch.Tensor:
    backend = make_backend(name, shape, None)
    backend.allocate(num_blocks)
    fill(backend, shape, segments, tables)
    backend.plan(layout)
    return attend_rows(backend, query, 0, layout)


@pytest.mark.usefixtures("_double")
def test_strided_queries_are_read_in_place_and_outputs_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As views of the fused gemm's result; only a partial part computes its LSE."""
    shape = KVShape(1, 4, 2, 64, 16, torch.bfloat16, CPU)
    backend = make_backend("flashinfer", shape, None)
    backend.allocate(4)
    fill(backend, shape, [Segment(1, 40)], [[3, 1, 2]])
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda _tensor: pytest.fail("a copy"))
    query = torch.randn(7, 8, 64).bfloat16()[:, :4]
    output = torch.full((7, 4, 64), torch.nan).bfloat16()
    for num_rows in (1, 5):
        part = make_part([Segment(num_rows, 40)], [[3, 1, 2]], 1, causal=True)
        layout = PagedLayout(NO_TOKENS, (part,))
        backend.plan(layout)
        rows = slice(1, 1 + num_rows)
        result, lse = backend.attend(query[rows], 0, part, output[rows])
        assert lse is None
        assert result.data_ptr() == output[1].data_ptr()
        expected, _ = backend.attend(query[rows].clone(), 0, part)
        assert torch.equal(output[rows], expected)
    assert output[0].isnan().all()
    assert output[6].isnan().all()


@pytest.mark.usefixtures("_double_in_float32")
@pytest.mark.parametrize("num_rows", [1, 5])
def test_rows_that_see_no_token_have_no_weight_in_a_merge(num_rows: int) -> None:
    shape = KVShape(1, 4, 2, 32, 16, torch.float32, CPU)
    backend = make_backend("flashinfer", shape, None)
    backend.allocate(4)
    fill(backend, shape, [Segment(1, 40)], [[3, 1, 2]])
    empty = make_part([Segment(num_rows, 0)], [[0]], 0, causal=False, is_partial=True)
    full = make_part([Segment(num_rows, 40)], [[3, 1, 2]], 0, causal=False, is_partial=True)
    backend.plan(PagedLayout(NO_TOKENS, (full,), empty))
    query = torch.randn(num_rows, 4, 32)
    nothing, everything = backend.attend(query, 0, empty), backend.attend(query, 0, full)
    assert (nothing[1] == -torch.inf).all()
    merged = backend.merge(nothing, everything, torch.empty_like(query))
    torch.testing.assert_close(merged, everything[0], atol=0, rtol=0)


@pytest.mark.usefixtures("_double_in_float32")
def test_parts_of_one_layout_have_wrappers_of_their_own_planned_once_for_all_layers() -> None:
    shape = KVShape(3, 2, 1, 16, 16, torch.float32, CPU)
    backend = make_backend("flashinfer", shape, None)
    backend.allocate(5)
    table = [3, 1, 2, 4]
    fill(backend, shape, [Segment(1, 60)], [table])
    pieces = [
        (3, 0),
        (3, 1),
        (1, 2),
        (1, 0),
        (3, 2),
        (1, 1),
    ]  # rows, and the first block, of more parts than a step has
    parts = tuple(make_part([Segment(rows, 30)], [table[i : i + 2]], 0, causal=False) for rows, i in pieces)
    query = torch.randn(3, 2, 16)
    alone = []
    for part in parts:
        backend.plan(PagedLayout(NO_TOKENS, (part,)))
        alone.append([backend.attend(query[: part.num_rows], layer, part)[0] for layer in range(3)])
    backend.plan(PagedLayout(NO_TOKENS, parts))
    wrappers = list(backend._planned.values())  # type: ignore[attr-defined]
    before = [wrapper.num_plans for wrapper in wrappers]
    together = [[backend.attend(query[: part.num_rows], layer, part)[0] for layer in range(3)] for part in parts]
    torch.testing.assert_close(together, alone, atol=0, rtol=0)
    assert len(set(map(id, wrappers))) == len(parts)
    assert [wrapper.num_plans for wrapper in wrappers] == before


@pytest.mark.usefixtures("_double")
def test_wrappers_have_a_mebibyte_for_plans_and_more_for_long_forwards() -> None:
    shape = KVShape(1, 4, 2, 64, 16, torch.bfloat16, CPU)
    backend = make_backend("flashinfer", shape, None)
    for num_rows, mebibytes in ((8192, 1), (20_000, 2), (1, 2)):
        for _ in range(RING_SIZE):
            part = make_part([Segment(num_rows, num_rows)], [[1] * -(-num_rows // 16)], 0, causal=True)
            backend.plan(PagedLayout(NO_TOKENS, (part,)))
            (wrapper,) = backend._planned.values()  # type: ignore[attr-defined]
            assert wrapper.plan_memory == mebibytes << 20


@pytest.mark.usefixtures("_double_in_float32")
@few(1, ("family", "page_size"), sorted(itertools.product(FAMILIES, [16, 7]), key=lambda case: case != ("qwen3", 7)))
def test_a_model_samples_the_tokens_of_the_torch_backend(family: str, page_size: int, tmp_path: Path) -> None:
    """Prompts in chunks beside decode rows, with and without prefix groups."""
    save_tiny_model(tmp_path, family)
    model, info = load(tmp_path)
    runs = []
    for backend, grouped in (("torch", False), ("flashinfer", False), ("flashinfer", True)):
        driver = StepDriver(make_runner(model, info, backend, page_size), page_size)
        samples = Samples(driver, page_size, seed=FAMILIES.index(family))
        with one_thread():
            samples.run(15, grouped)
        runs.append(samples.sampled)
        assert (samples.num_grouped > 50) is grouped
    for others in runs[1:]:
        check_equal(others, runs[0])


@pytest.mark.usefixtures("_double_in_float32")
@pytest.mark.parametrize("family", ["gemma2", "granite_swa", "granite"])
def test_layers_of_their_own_kinds_sample_the_tokens_of_the_torch_backend(family: str, tmp_path: Path) -> None:
    """Windows, caps, scales and sinks by layer; with prefix groups too where no layer has a window."""
    save_random_model(tmp_path, option_config(family, 0))
    model, info = load(tmp_path)
    has_windows = family != "granite"
    runs = []
    for backend, grouped in (("torch", False), ("flashinfer", False), ("flashinfer", not has_windows)):
        runner = make_runner(model, info, backend)
        assert runner._backend.computes_groups is (backend == "torch" or not has_windows)
        samples = Samples(StepDriver(runner), 16, seed=4)
        with one_thread():
            samples.run(12, grouped)
        runs.append(samples.sampled)
        assert (samples.num_grouped > 20) is grouped
    for others in runs[1:]:
        check_equal(others, runs[0])


TWO_KINDS = KVShape(
    *(4, 6, 2, 64, 16, torch.bfloat16, CPU),
    layers=tuple(AttentionSpec(6, 2, 64, 0.2, softcap=cap) for cap in (None, 5.0, None, 5.0)),
    sinks=(None, torch.linspace(-2, 3, 6), torch.linspace(1, 0, 6), None),
)


@pytest.mark.usefixtures("_double")
def test_recorded_rows_and_their_prefixes_have_a_plan_for_each_kind_of_layer() -> None:
    """The double reads what is planned from the buffers of its recordings, and finds a plan that another replaced."""
    shape, others = TWO_KINDS, replace(TWO_KINDS, layers=TWO_KINDS.layers[::-1], sinks=TWO_KINDS.sinks[::-1])
    segments = [Segment(1, 32 + own) for own in (1, 20, 7)]
    tables = [[1, 2, 3], [1, 2, 4, 5], [1, 2, 6]]
    suffixes = [Segment(1, segment.kv_length - 32) for segment in segments]
    layout = PagedLayout(
        NO_TOKENS,
        (make_part(suffixes, [table[2:] for table in tables], 0, causal=True, is_partial=True),),
        make_part([Segment(3, 32)], [[1, 2]], 0, causal=False, is_partial=True),
    )
    query = torch.randn((3, 6, 64), generator=torch.Generator().manual_seed(0)).bfloat16()
    backend, reference, other = (
        make_backend(name, each, None)
        for name, each in (("flashinfer", shape), ("reference", shape), ("reference", others))
    )
    for each in (backend, reference, other):
        each.allocate(7)
        fill(each, shape, segments, tables)
        each.plan(layout)
    assert isinstance(backend, flashinfer_backend.FlashInferBackend)
    memory, prefixes = backend.prepare_recording(3, 4), backend.prepare_groups(1)
    on_device = in_recorded(
        as_in_steps(replace(layout, kv_indices=torch.zeros(3, dtype=torch.int64)), backend, shape), memory
    )
    assert on_device.prefix is not None
    assert on_device.prefix.lists is not None
    lists = lists_in(prefixes, on_device.prefix.lists)
    for _ in range(2):  # the first plan, and one that leaves the lists as they are
        for name in ("starts", "blocks", "last_lengths"):
            getattr(lists, name).copy_(getattr(on_device.prefix.lists, name))
        recorded = replace(on_device, prefix=replace(on_device.prefix, lists=lists))
        backend.plan_recorded(recorded)
        for layer in (0, 1, 3, 2, 0):
            found, expected, wrong = (
                attend_rows(each, query, layer, planned)
                for each, planned in ((backend, recorded), (reference, layout), (other, layout))
            )
            torch.testing.assert_close(found, expected, atol=0.02, rtol=0)
            assert not torch.allclose(found, wrong, atol=0.05, rtol=0), "layers differ by more than rounding"


@pytest.mark.usefixtures("_double")
def test_usual_layers_are_planned_with_the_usual_options_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start's wrappers, and plans of a step, are as many as with one layer; kinds of layers have their own."""
    planned: list[dict[str, object]] = []
    note = flashinfer_double._Wrapper._note_plan

    def noted(wrapper: object, lists: object, causal: bool, options: dict[str, object]) -> None:
        planned.append({name: value for name, value in options.items() if name not in KNOWN_OPTIONS})
        note(wrapper, lists, causal, options)  # type: ignore[arg-type]

    monkeypatch.setattr(flashinfer_double._Wrapper, "_note_plan", noted)
    windowed = AttentionSpec(4, 2, 64, 0.3, window=100, softcap=30.0)
    usual = AttentionSpec(4, 2, 64, 0.125)
    for layers, expected in (
        ((), [{"sm_scale": 0.125}]),
        ((usual, usual), [{"sm_scale": 0.125}]),
        (
            (windowed, usual, windowed),
            [{"sm_scale": 0.3, "window_left": 99, "logits_soft_cap": 30.0}, {"sm_scale": 0.125}],
        ),
    ):
        shape = KVShape(len(layers) or 2, 4, 2, 64, 16, torch.bfloat16, CPU, layers=layers)
        backend = make_backend("flashinfer", shape, None)
        assert isinstance(backend, flashinfer_backend.FlashInferBackend)
        assert sum(len(wrappers.prefill + wrappers.decode) for wrappers in backend._sets) == RING_SIZE * 4 * len(
            expected
        )
        on_tensor_cores = [wrapper._init_options["use_tensor_cores"] for wrapper in backend._sets[0].decode]  # type: ignore[attr-defined]
        assert on_tensor_cores == ["window_left" in options for options in expected] * 2
        for segments in ([Segment(1, 40)], [Segment(5, 40)]):
            planned.clear()
            backend.plan(PagedLayout(NO_TOKENS, (make_part(segments, [[1, 2, 3]], 0, causal=True),)))
            assert planned == expected


@pytest.mark.usefixtures("_double_in_float32")
@few(2, "family", ["granite_swa", *FAMILIES])
def test_steps_with_staged_plans_never_wait_for_the_device(family: str, tmp_path: Path) -> None:
    """On a device that refuses calls which would wait; the lists of blocks are built there, after the plan. In prefix
    groups, but with windows and sinks."""
    grouped = family in FAMILIES
    save_random_model(tmp_path, family_config(family) if grouped else option_config(family, 0))

    def run(backend: str, device: torch.device, transfers: PretendTransfers | None) -> dict[int, list]:
        model, info = load(tmp_path)
        if device == DEVICE:
            move_to_device(model)
        runner = make_runner(model, info, backend, device=device, transfers=transfers)
        samples = Samples(StepDriver(runner, 16), 16, seed=3)
        with one_thread():
            samples.run(12 if IS_NIGHTLY else 3, grouped)
        assert samples.num_grouped > (30 if IS_NIGHTLY else 5) or not grouped
        return samples.sampled

    expected = run("torch", CPU, None)
    with pretended():
        sampled = run("flashinfer", DEVICE, PretendTransfers())
    check_equal(sampled, expected)


def check_equal(sampled: dict[int, list], expected: dict[int, list]) -> None:
    """Pairs of token and log-probability by slot."""
    assert sampled.keys() == expected.keys()
    for slot, pairs in expected.items():
        assert [token for token, _ in sampled[slot]] == [token for token, _ in pairs]
        assert [logprob for _, logprob in sampled[slot]] == pytest.approx([logprob for _, logprob in pairs], abs=1e-4)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (KVShape(1, 4, 2, 64, 16, torch.bfloat16, CPU), "device=cpu"),
        (KVShape(1, 4, 2, 64, 16, torch.float32, CUDA), "not float32 and float32"),
        (KVShape(1, 4, 2, 64, 16, torch.float16, CUDA, torch.bfloat16), "not bfloat16 and float16"),
        (KVShape(1, 4, 2, 80, 16, torch.bfloat16, CUDA), "head size 80"),
        (KVShape(1, 4, 2, 64, 16, torch.bfloat16, CUDA), "pip install flashinfer-python"),
    ],
)
def test_what_flashinfer_cannot_serve_is_refused_by_name_and_served_by_torch_otherwise(
    shape: KVShape, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flashinfer_backend.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ValueError, match=f"attention_backend=flashinfer: .*{why}"):
        make_backend("flashinfer", shape, None)
    assert isinstance(make_backend(None, shape, None), TorchBackend)
    assert [record.name for record in caplog.records] == ([choose.__name__] if shape.device == CUDA else [])


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128), (64, 8, 128), (8, 1, 256)]
)
def test_the_workspace_holds_the_partial_results_of_all_tiles_at_once(
    num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    """132 multiprocessors with 2 thread blocks each; a tile is 128 rows of one KV head, in float32, with its LSE."""
    shape = KVShape(1, num_heads, num_kv_heads, head_dim, 16, torch.bfloat16, CUDA)
    tiles_of_a_head = math.ceil(132 * 2 / num_kv_heads)
    needed = tiles_of_a_head * num_heads * 128 * (head_dim * 4 + 4)
    size = workspace_bytes(shape, 132)
    assert size >= max(needed, 128 * 2**20)
    assert size <= max(needed, 128 * 2**20) + 2**20


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "mebibytes"),
    [(32, 8, 64, 162), (32, 8, 128, 322), (28, 4, 128, 324), (40, 8, 128, 423), (64, 8, 128, 773), (9, 3, 64, 128)],
)
def test_the_workspace_holds_what_is_reserved_for_the_largest_graph(
    num_heads: int, num_kv_heads: int, head_dim: int, mebibytes: int
) -> None:
    """1,024 rows. Three query heads a KV head decode on CUDA cores, which reserve little."""
    shape = KVShape(1, num_heads, num_kv_heads, head_dim, 16, torch.bfloat16, CUDA)
    assert workspace_bytes(shape, 132, 1024) >> 20 in (mebibytes, mebibytes + 1)
    assert workspace_bytes(shape, 132, 16) < 2 * workspace_bytes(shape, 132)


def test_rows_with_windows_decode_on_tensor_cores_which_reserve_a_tile_for_each_row() -> None:
    """Gemma 2 9B: two query heads a KV head."""
    shape = KVShape(1, 16, 8, 256, 16, torch.bfloat16, CUDA)
    assert workspace_bytes(shape, 132, 1024) < workspace_bytes(shape, 132, 1024, has_windows=True)
    reserved = 16 * (1024 * 2 // 16 + 1023) * 16 * (256 + 1) * 4
    assert 0 <= workspace_bytes(shape, 132, 1024, has_windows=True) - reserved < 1 << 20


@pytest.mark.usefixtures("_double")
def test_larger_graphs_than_the_workspace_was_sized_for_are_refused() -> None:
    shape = KVShape(1, 32, 8, 128, 16, torch.bfloat16, CPU)
    backend = flashinfer_backend.FlashInferBackend(shape, flashinfer_double.Library(), max_graph_rows=64)
    backend.prepare_recording(64, 4)
    with pytest.raises(AssertionError, match="max_graph_rows was less than 65"):
        backend.prepare_recording(65, 4)


@pytest.mark.usefixtures("_double_in_float32")
@few(1, "family", FAMILIES)
def test_a_model_has_the_greedy_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    """Prompts in chunks of random sizes beside decode rows."""
    assert_equals_oracle(tmp_path, save_tiny_model(tmp_path, family), "flashinfer", seed=2)


@pytest.mark.usefixtures("_double_in_float32")
def test_padded_rows_change_nothing(tmp_path: Path) -> None:
    """Each step decodes for all slots and prefills one more: 37 tokens first, 17 + 20 at last, padded to 38."""
    oracle = save_tiny_model(tmp_path, "qwen2")
    model, info = load(tmp_path)
    driver = StepDriver(make_runner(model, info, "flashinfer"))
    prompts = {slot: [(slot + 3) * i % 250 for i in range(length)] for slot, length in enumerate([37, 71, 33], start=1)}
    prompts |= {slot: [slot * i % 250 for i in range(1, 21)] for slot in range(4, 19)}
    tokens: dict[int, list[int]] = {slot: [] for slot in prompts}
    for slot, prompt in prompts.items():
        driver.open(slot, prompt)
        decode = [other for other, sampled in tokens.items() if sampled]
        num_tokens = len(decode) + len(prompt)
        assert slot not in (1, 18) or padded_count(num_tokens) > num_tokens
        for sampled_slot, (token, _) in driver.run(decode, [(slot, len(prompt))]).items():
            tokens[sampled_slot].append(token)
    for slot, prompt in prompts.items():
        assert tokens[slot] == oracle_greedy(oracle, prompt, len(tokens[slot]))[0]


@pytest.mark.usefixtures("_double_in_float32")
def test_a_preempted_sequence_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    """Its prompt and tokens are computed again in other blocks, in chunks, beside a sequence that decodes."""
    oracle = save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path)
    driver = StepDriver(make_runner(model, info, "flashinfer"))
    prompts = {1: [5 * i % 250 for i in range(1, 40)], 2: [3 * i % 250 for i in range(1, 20)]}
    tokens: dict[int, list[int]] = {1: [], 2: []}

    def run(decode: list[int], prefill: list[tuple[int, int]], owners: dict[int, int]) -> None:
        for slot, (token, _) in driver.run(decode, prefill).items():
            tokens[owners[slot]].append(token)

    for slot, prompt in prompts.items():
        driver.open(slot, prompt)
    run([], [(1, 39), (2, 19)], {1: 1, 2: 2})
    for _ in range(5):
        run([1, 2], [], {1: 1, 2: 2})
    again = prompts[1] + tokens[1]
    driver.open(3, again)
    for chunk in (20, len(again) - 20):
        run([2], [(3, chunk)], {2: 2, 3: 1})
    for _ in range(6):
        run([2, 3], [], {2: 2, 3: 1})
    for slot, prompt in prompts.items():
        assert tokens[slot] == oracle_greedy(oracle, prompt, len(tokens[slot]))[0]
