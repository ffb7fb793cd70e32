"""The attention benchmarks: whole and split attention agree, figures are consistent, and they run from end to end.

Tokens read with prefix groups are compared with a token-by-token count."""

import itertools
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.kernels import attention, attention_cases, prefix_groups
from benchmarks.kernels.prefix_groups import PAGE_SIZE, Batch, tokens_read
from tokasaurus.manager.planning.prefix_groups import Grouping

SMALL = ["--sequences", "3", "--tokens", "40", "--rows", "2", "5", "--prefix", "64", "--groups", "2", "3"]
SMALL += ["--prefixes", "32", "64", "--suffix", "20", "--rounds", "1"]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_whole_and_split_attention_of_a_group_agree(backend: str) -> None:
    group = attention_cases.group(backend, num_rows=5, num_prefix_tokens=64, num_suffix_tokens=20)
    for whole, split in zip(group.whole, group.split, strict=True):
        torch.testing.assert_close(whole(), split(), atol=5e-3, rtol=2**-6)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_decode_goes_through_all_layers_with_blocks_of_each_sequence(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    real = attention_cases.attend_rows

    def attend_spied(made, query, layer, layout):
        seen.append((layer, layout.parts[0]))
        return real(made, query, layer, layout)

    monkeypatch.setattr(attention_cases, "attend_rows", attend_spied)
    calls, num_bytes = attention_cases.decode(backend, num_sequences=3, num_tokens=40)
    for call in calls:
        call()
    assert [layer for layer, _ in seen] == list(range(30))
    part = seen[0][1]
    assert sorted(part.block_table.flatten().tolist()) == list(range(1, 10))
    assert part.kv_lengths.tolist() == [40, 40, 40]
    assert num_bytes == 3 * 40 * 2 * 3 * 64 * 2, "keys and values of three heads of 64, in bfloat16"


def test_candidates_are_interleaved_and_the_first_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    order, now = [], 0.0
    monkeypatch.setattr(attention_cases.time, "perf_counter", lambda: now)

    def call(name: str, seconds: float) -> None:
        nonlocal now
        order.append(name)
        now += seconds if len(order) > 3 else 50

    candidates = {"a": [lambda: call("a", 2)] * 2, "b": [lambda: call("b", 7)]}
    assert attention_cases.time_interleaved(candidates, 3) == {"a": 2, "b": 7}
    assert "".join(order) == "aab" * 4


def test_it_runs_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = attention.main([*SMALL, "--json", str(tmp_path / "a.json"), "--svg", str(tmp_path / "a.svg")])
    assert code == 0
    found = json.loads((tmp_path / "a.json").read_text())
    for part, num_rates in (("decode", 3), ("prefix", 5)):
        best, *others = found[part]
        assert len(found[part]) == num_rates
        for rate in others:
            assert rate["share"] == pytest.approx(rate["amount"] / best["amount"])
    rates = {(rate["part"], rate["backend"], rate["num_rows"]): rate for rate in found["decode"] + found["prefix"]}
    decode, prefix = rates["decode", "cpu", 3], rates["prefix", "cpu", 5]
    assert decode["amount"] * decode["ms"] == pytest.approx(3 * 40 * 768 / 1e6)
    assert prefix["amount"] * prefix["ms"] == pytest.approx(4 * 5 * 64 * 9 * 64 / 1e6)
    assert len(found["shared"]) == 2 * 2 * 2
    assert "cpu: speed-up of a prefix group" in capsys.readouterr().out
    names = [text.text for text in ElementTree.parse(tmp_path / "a.svg").iter(f"{SVG}text")]
    assert {"cpu, 2 rows", "cpu, 3 rows", "torch, 2 rows", "torch, 3 rows"} <= set(names)


def test_a_missed_limit_makes_the_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MIN_SHARE_OF_GEMM", 1e9)
    arguments = ["prefix", *SMALL, "--backends", "cpu"]
    assert attention.main(arguments) == 0
    assert attention.main([*arguments, "--check"]) == 1


def test_the_numba_kernel_attends_as_plain_torch_does() -> None:
    pytest.importorskip("numba", reason="numba, needed only for a comparison, is not installed")
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 6, 16, generator=generator).bfloat16()
    keys, values = (torch.randn(10, 2, 16, 16, generator=generator).bfloat16() for _ in range(2))
    tables = torch.tensor([[3, 1, 9], [2, 4, 5], [8, 7, 6]], dtype=torch.int32)
    (call,) = attention_cases.make_numba_decode(query, [(keys, values)], tables, num_tokens=37)
    by_sequence = []
    for row, table in zip(query, tables, strict=True):
        key, value = (cache[table].transpose(0, 1).reshape(2, -1, 16)[:, :37].float() for cache in (keys, values))
        by_sequence.append(
            torch.nn.functional.scaled_dot_product_attention(row.float().view(2, 3, 16), key, value).reshape(6, 16)
        )
    torch.testing.assert_close(torch.from_numpy(call()), torch.stack(by_sequence), atol=1e-5, rtol=1e-4)


FEW_SHOT = Batch(num_questions=256, num_samples=4, num_examples=998, num_question=60, num_generated=64)
SMALL_BATCH = Batch(num_questions=5, num_samples=3, num_examples=70, num_question=20, num_generated=9)


def count_reads(batch: Batch, grouping: Grouping) -> int:
    """Counts token by token what each group's rows have in common, in whole blocks, and what each has besides."""
    contexts = [
        [f"example {i}" for i in range(batch.num_examples)]
        + [f"question {question}, {i}" for i in range(batch.num_question)]
        + [f"answer {question}, {sample}, {i}" for i in range(batch.num_generated)]
        for question in range(batch.num_questions)
        for sample in range(batch.num_samples)
    ]
    total = 0
    by_group: dict[int, list[list[str]]] = {}
    for number, context in zip(grouping.group_of_sequence.tolist(), contexts, strict=True):
        if number == 0:
            total += len(context)
        else:
            by_group.setdefault(number, []).append(context)
    for members in by_group.values():
        same = sum(1 for _ in itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*members, strict=True)))
        shared = same // PAGE_SIZE * PAGE_SIZE
        total += shared + sum(len(context) - shared for context in members)
    return total


@pytest.mark.parametrize("batch", [FEW_SHOT, SMALL_BATCH])
def test_tokens_read_are_those_counted_one_by_one(batch: Batch) -> None:
    for grouping in (batch.alone(), batch.by_question(), batch.chosen()):
        assert tokens_read(batch, grouping) == count_reads(batch, grouping)


def test_behind_one_prefix_the_chosen_groups_read_far_less_than_one_group_for_each_question() -> None:
    chosen, by_question = FEW_SHOT.chosen(), FEW_SHOT.by_question()
    assert (chosen.group_of_sequence == 1).all()
    assert count_reads(FEW_SHOT, chosen) < 0.41 * count_reads(FEW_SHOT, by_question)
    assert count_reads(FEW_SHOT, by_question) < 0.3 * count_reads(FEW_SHOT, FEW_SHOT.alone())


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_attention_is_the_same_in_all_groupings(backend: str) -> None:
    groupings = [SMALL_BATCH.alone(), SMALL_BATCH.by_question(), SMALL_BATCH.chosen()]
    calls = attention_cases.grouped_calls(
        backend, 2, SMALL_BATCH.block_tables(), SMALL_BATCH.num_tokens, PAGE_SIZE, groupings
    )
    for alone, *others in zip(*calls, strict=True):
        for other in others:
            torch.testing.assert_close(other(), alone(), atol=5e-3, rtol=2**-6)


def test_prefix_groups_run_from_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--questions", "4", "--samples", "3", "--examples", "40", "--question", "18", "--generated", "5"]
    assert prefix_groups.main([*small, "--layers", "1", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if "none" in line]
    assert f"{12 * 63}" in row
