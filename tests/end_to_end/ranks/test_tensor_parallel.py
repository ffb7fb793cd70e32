"""Tensor-parallel ranks over gloo, in float32: the texts of one process, also after one of the ranks is killed."""

import json
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.helpers.one_process import (
    FLAGS,
    assert_equals_one_process,
    assert_gives_the_demo_models_texts,
    assert_requests_outlive_deaths,
)
from tests.end_to_end.helpers.toka_process import free_port, starting_toka
from tests.helpers.tiny_model import (
    FAMILIES,
    OPTIONS,
    VOCAB_SIZE,
    option_config,
    save_random_model,
    save_tiny_model,
)


@pytest.mark.long
def test_four_ranks_share_two_kv_heads_and_a_vocabulary_that_does_not_divide(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2", tied=True, vocab_size=VOCAB_SIZE + 3)
    assert_equals_one_process(tmp_path, "tp_size=4")


@pytest.mark.long
def test_two_replicas_of_two_ranks(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    assert_equals_one_process(tmp_path, "dp_size=2", "tp_size=2")


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        (family, parallel)
        for family in FAMILIES
        for parallel in ("tp_size=2", "tp_size=4", "dp_size=2 tp_size=2", "tp_size=2 torch_compile=T")
    ],
)
def test_every_family_equals_one_process(family: str, parallel: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family, tied=family == "qwen3", vocab_size=VOCAB_SIZE + 1)
    assert_equals_one_process(tmp_path, *parallel.split())


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "parallel"), [(each, f"{'tp' if i % 2 else 'pp'}_size=2") for i, each in enumerate(OPTIONS)]
)
def test_every_family_of_the_table_equals_one_process(family: str, parallel: str, tmp_path: Path) -> None:
    save_random_model(tmp_path, option_config(family, 0, vocab_size=VOCAB_SIZE + 1))
    assert_equals_one_process(tmp_path, parallel)


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("qwen3_moe", "tp_size=2 ep=T"),
        pytest.param("qwen2_moe", "tp_size=2 pp_size=2 ep=T", marks=pytest.mark.long),
        pytest.param("gpt_oss", "tp_size=4 ep=T", marks=pytest.mark.long),
        pytest.param("qwen3_moe", "tp_size=2 ep=T torch_compile=T", marks=pytest.mark.long),
    ],
)
def test_whole_experts_by_rank_equal_one_process(family: str, parallel: str, tmp_path: Path) -> None:
    save_random_model(tmp_path, option_config(family, 0))
    assert_equals_one_process(tmp_path, *parallel.split())


@pytest.mark.long
def test_requests_outlive_the_death_of_a_rank_and_nothing_is_left_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = "1 replica x 2 tensor-parallel ranks = 2 model workers"
    assert_requests_outlive_deaths(tmp_path, monkeypatch, "tp_size=2", what, [1])


@pytest.mark.long
def test_a_cache_that_fits_each_worker_but_not_all_ends_the_start_in_one_line(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    bytes_per_token = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * config["head_dim"] * 4
    num_tokens = psutil.virtual_memory().available // 3 // (bytes_per_token // 2)  # each of two ranks has half
    flags = (f"model={tmp_path}", *FLAGS, "dp_size=2", "tp_size=2", f"kv_cache_num_tokens={num_tokens}")
    with starting_toka(free_port(), *flags) as toka:
        assert toka.process.wait(240) == 2
    (line,) = {line for line in toka.lines if line.startswith("toka: ")}
    assert f"kv_cache_num_tokens={num_tokens}: needs " in line
    assert "on 4 workers together" in line


@pytest.mark.parametrize(
    "parallel",
    ["tp_size=3", "dp_size=2", "dp_size=2 tp_size=3"],
)
@pytest.mark.long
def test_replicas_and_ranks_give_the_demo_models_texts(parallel: str) -> None:
    """Three ranks have three of nine query heads and one of three KV heads each."""
    assert_gives_the_demo_models_texts(*parallel.split())
