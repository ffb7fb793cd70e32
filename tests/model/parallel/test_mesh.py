"""How layers, heads and rows are divided among ranks, against the definitions applied one by one."""

import math
from dataclasses import replace

import pytest

from tests.helpers.plain_info import plain_info
from tokasaurus.checkpoint import ModelInfo, RopeInfo
from tokasaurus.checkpoint.spec import ExpertsSpec, MLPSpec, RouterSpec
from tokasaurus.model.parallel.mesh import Mesh


def model_of(num_layers: int = 4, vocab_size: int = 275) -> ModelInfo:
    sizes = num_layers, 64, 12, 4, 16, 90, vocab_size, 512
    return plain_info("llama", *sizes, 1e-5, RopeInfo(1e4), False, (0,), "float32")


MODEL = model_of()
HEAD_OF_ONE_LAYER = 2 * 12 * 16 + 2 * 4 * 16 + 3 * 90
"""Token ids for which the LM head has as many parameters as a layer: queries and output, keys and values, MLP."""


@pytest.mark.parametrize(("pp_size", "tp_size"), [(1, 1), (3, 1), (1, 4), (2, 3)])
def test_workers_are_numbered_by_replica_then_stage_then_shard(pp_size: int, tp_size: int) -> None:
    expected = [
        Mesh(pp, pp_size, tp, tp_size) for _replica in range(3) for pp in range(pp_size) for tp in range(tp_size)
    ]
    assert [Mesh.of_worker(index, pp_size, tp_size) for index in range(len(expected))] == expected


def stages_of(info: ModelInfo, pp_size: int) -> list[range]:
    return [Mesh(pp_rank=rank, pp_size=pp_size).stage_layers(info) for rank in range(pp_size)]


@pytest.mark.parametrize("num_layers", [8, 9, 15, 30, 32])
@pytest.mark.parametrize("pp_size", [1, 2, 3, 8])
@pytest.mark.parametrize("vocab_size", [10, 3000, 100_000])
def test_no_other_stages_have_a_faster_slowest_one(num_layers: int, pp_size: int, vocab_size: int) -> None:
    """All ways to divide the layers into stages of at least one, by their numbers in the last stage."""
    info = model_of(num_layers, vocab_size)
    stages = stages_of(info, pp_size)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert min(sizes) >= 1
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
    head = vocab_size / HEAD_OF_ONE_LAYER
    slowest = max(max(sizes[:-1], default=0), sizes[-1] + head)
    for num_last in range(1, num_layers - pp_size + 2):
        rest = math.ceil((num_layers - num_last) / (pp_size - 1)) if pp_size > 1 else 0
        if pp_size > 1 or num_last == num_layers:
            assert slowest <= max(rest, num_last + head)


@pytest.mark.parametrize(
    ("num_layers", "head", "pp_size", "sizes"),
    [
        (32, 2.41, 2, [17, 15]),  # 17.4; 18 and 14 would take 18
        (32, 2.41, 3, [12, 11, 9]),  # 12; 11, 11 and 10 would take 12.4
        (30, 8.0, 2, [19, 11]),
        (30, 8.0, 3, [13, 12, 5]),  # 13; 13, 13 and 4 as well, but less evenly
        (5, 0.5, 4, [2, 1, 1, 1]),
        (4, 9.0, 2, [3, 1]),  # the last stage needs a layer
    ],
)
def test_stages_by_hand(num_layers: int, head: float, pp_size: int, sizes: list[int]) -> None:
    info = model_of(num_layers, round(head * HEAD_OF_ONE_LAYER))
    assert [len(stage) for stage in stages_of(info, pp_size)] == sizes


def test_layers_that_differ_count_by_the_mean_of_their_work() -> None:
    """Of experts, the chosen ones count, and all outputs of the router."""
    info = model_of(4, 600)
    first = info.spec.layers[0]
    with_experts = replace(first, mlp=ExpertsSpec(RouterSpec(20, 2), MLPSpec(40)))
    small = replace(first, mlp=MLPSpec(1))
    layers = (first, with_experts, with_experts, small)
    attention = 2 * 12 * 16 + 2 * 4 * 16
    parameters = [attention + 3 * 90, *[attention + 20 + 2 * 3 * 40] * 2, attention + 3]
    found = replace(info, spec=replace(info.spec, layers=layers)).head_layers
    assert found == pytest.approx(600 / (sum(parameters) / 4))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="pp_size=8 is more than the model's 7 layers"):
        stages_of(model_of(7, 275), 8)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tp_size"),
    [(8, 8, 1), (8, 8, 8), (32, 8, 4), (32, 8, 16), (12, 2, 2), (12, 2, 4), (4, 1, 4), (64, 4, 16), (28, 4, 4)],
)
def test_a_rank_holds_exactly_the_kv_heads_that_its_query_heads_read(
    num_heads: int, num_kv_heads: int, tp_size: int
) -> None:
    for rank in range(tp_size):
        mesh = Mesh(tp_rank=rank, tp_size=tp_size)
        start, length = mesh.shard(num_heads, "attention heads")
        kv_start, kv_length = mesh.kv_head_shard(num_kv_heads)
        group = num_heads // num_kv_heads
        needed = sorted({head // group for head in range(start, start + length)})
        assert list(range(kv_start, kv_start + kv_length)) == needed
        # Grouped attention maps query head i of the rank to KV head i // (length / kv_length) of the rank.
        for index in range(length):
            assert kv_start + index // (length // kv_length) == (start + index) // group


@pytest.mark.parametrize(("num_kv_heads", "tp_size"), [(3, 2), (2, 3), (4, 6)])
def test_kv_heads_that_do_not_divide_are_refused(num_kv_heads: int, tp_size: int) -> None:
    with pytest.raises(ValueError, match=f"KV heads \\({num_kv_heads}\\).*tp_size={tp_size}"):
        Mesh(tp_size=tp_size).kv_head_shard(num_kv_heads)


@pytest.mark.parametrize(("vocab_size", "tp_size"), [(4, 4), (272, 4), (275, 4), (273, 2), (49152, 3), (151_936, 7)])
def test_vocabulary_shards_are_even_and_hold_every_token_once_in_order(vocab_size: int, tp_size: int) -> None:
    shards = [Mesh(tp_rank=rank, tp_size=tp_size).vocab_shard(vocab_size) for rank in range(tp_size)]
    assert [token for start, length in shards for token in range(start, start + length)] == list(range(vocab_size))
    lengths = [length for _, length in shards]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_more_ranks_than_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"vocabulary \(3\).*tp_size=4"):
        Mesh(tp_size=4).vocab_shard(3)


@pytest.mark.parametrize(("pp_size", "tp_size"), [(1, 1), (1, 2), (4, 1), (2, 2)])
def test_a_model_that_can_be_divided_passes(pp_size: int, tp_size: int) -> None:
    for index in range(pp_size * tp_size):
        Mesh.of_worker(index, pp_size, tp_size).check(MODEL)


@pytest.mark.parametrize(
    ("changes", "pp_size", "tp_size", "message"),
    [
        ({}, 1, 5, r"attention heads \(12\) cannot be divided among tp_size=5"),
        ({}, 1, 3, r"KV heads \(4\) cannot be divided among tp_size=3"),
        ({}, 1, 4, r"intermediate_size \(90\) cannot be divided among tp_size=4"),
        ({"vocab_size": 1}, 1, 2, r"vocabulary \(1\) cannot be divided among tp_size=2"),
        ({}, 5, 1, "pp_size=5 is more than the model's 4 layers"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_with_its_sizes(
    changes: dict[str, int], pp_size: int, tp_size: int, message: str
) -> None:
    for index in range(pp_size * tp_size):
        with pytest.raises(ValueError, match=message):
            Mesh.of_worker(index, pp_size, tp_size).check(model_of(**changes))


def test_one_rank_of_the_last_stage_replies() -> None:
    ranks = [Mesh(stage, 2, shard, 2) for stage in range(2) for shard in range(2)]
    assert [mesh.replies for mesh in ranks] == [False, False, True, False]
