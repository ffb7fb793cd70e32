"""The attention benchmarks: whole and split attention agree, figures are consistent, and they run from end to end."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.kernels import attention, attention_cases

SMALL = ["--sequences", "3", "--tokens", "40", "--rows", "2", "5", "--prefix", "64", "--groups", "2", "3"]
SMALL += ["--prefixes", "32", "64", "--suffix", "20", "--rounds", "1"]
SMALL += ["--window", "20", "--window-sequences", "2", "--contexts", "30", "100"]
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
    assert [(rate["backend"], rate["num_tokens"]) for rate in found["window"]] == [
        *(("cpu", 30), ("cpu", 100), ("torch", 30), ("torch", 100))
    ]
    assert [rate["share"] == 1 for rate in found["window"]] == [True, False] * 2
    assert len(found["shared"]) == 2 * 2 * 2
    assert "cpu: speed-up of a prefix group" in capsys.readouterr().out
    names = [text.text for text in ElementTree.parse(tmp_path / "a.svg").iter(f"{SVG}text")]
    assert {"cpu, 2 rows", "cpu, 3 rows", "torch, 2 rows", "torch, 3 rows"} <= set(names)


def test_a_missed_limit_makes_the_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MIN_SHARE_OF_GEMM", 1e9)
    arguments = ["prefix", *SMALL, "--backends", "cpu"]
    assert attention.main(arguments) == 0
    assert attention.main([*arguments, "--check"]) == 1
