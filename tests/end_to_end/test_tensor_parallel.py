"""Tensor-parallel ranks over gloo, in float32: the texts of one process, also after one of the ranks is killed."""

import json
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.end_to_end.helpers.expected_texts import ask_all_at_once, ask_demo_model, num_diverged
from tests.end_to_end.helpers.mixed_requests import ask_mixed, ask_plain, assert_same_answers
from tests.end_to_end.helpers.toka_process import TokaProcess, free_port, running_toka, starting_toka, wait_for
from tests.helpers.processes import assert_all_end
from tests.helpers.tiny_model import FAMILIES, VOCAB_SIZE, save_tiny_model
from tests.torture.helpers.completions import make_body

FLAGS = ("dtype=float32", "max_seqs_per_forward=16", "max_tokens_per_forward=64", "device=cpu")
LARGE = (*FLAGS, "kv_cache_num_tokens=8192", "use_hydragen=F")
# A cache for one of the longest sequences; the lengths of all are underestimated.
SMALL = (*FLAGS, "kv_cache_num_tokens=352", "early_stopping_init_mean=0.02", "early_stopping_initial_wait=1000000")
GROUPS = ("use_hydragen=T", "hydragen_min_group_size=2", "hydragen_min_prefix_len=16")


def assert_equals_one_process(directory: Path, *parallel: str) -> None:
    """Sends the same mixed requests to a server of one process and to another with the flags `parallel`."""
    with running_toka(f"model={directory}", *LARGE) as toka:
        expected, plain = ask_mixed(toka), ask_plain(toka)
        assert toka.stop() == 0
    with running_toka(f"model={directory}", *SMALL, *GROUPS, *parallel) as toka:
        assert_same_answers(ask_mixed(toka), expected)
        num_before = toka.gauge("toka_preemptions_total")
        assert ask_plain(toka) == plain
        assert toka.gauge("toka_preemptions_total") > num_before
        for counter in ("prefix_cache_hit_tokens", "shared_prompt_tokens"):
            assert toka.gauge(f"toka_{counter}_total") > 0, counter
        assert toka.gauge("toka_kv_blocks_used") == 0
        assert toka.gauge("toka_recompiles_total") == 0
        assert toka.stop() == 0


@pytest.mark.ranks
def test_four_ranks_share_two_kv_heads_and_a_vocabulary_that_does_not_divide(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2", tied=True, vocab_size=VOCAB_SIZE + 3)
    assert_equals_one_process(tmp_path, "tp_size=4")


def test_two_replicas_of_two_ranks(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    assert_equals_one_process(tmp_path, "dp_size=2", "tp_size=2")


@pytest.mark.ranks
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parallel", ["tp_size=2", "tp_size=4", "dp_size=2 tp_size=2", "tp_size=2 torch_compile=T"])
def test_every_family_equals_one_process(family: str, parallel: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family, tied=family == "qwen3", vocab_size=VOCAB_SIZE + 1)
    assert_equals_one_process(tmp_path, *parallel.split())


def ask_stories(toka: TokaProcess) -> list[str]:
    """The texts of eight requests, all at once; two samples of each."""

    def ask(number: int) -> list[str]:
        body = make_body(number, n=2, max_tokens=150)
        answer = httpx.post(f"{toka.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return [choice["text"] for choice in answer.json()["choices"]]

    with ThreadPoolExecutor(8) as pool:
        return [text for texts in pool.map(ask, range(8)) for text in texts]


def test_requests_outlive_the_death_of_a_rank_and_nothing_is_left_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path / "model", "llama")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with running_toka(f"model={tmp_path / 'model'}", *LARGE) as toka:
        expected = ask_stories(toka)
        assert toka.stop() == 0
    assert not list(temporary.iterdir()), "one rank needs nobody to meet"
    with running_toka(f"model={tmp_path / 'model'}", *LARGE, "tp_size=2") as toka, ThreadPoolExecutor(1) as pool:
        assert any("1 replica x 2 tensor-parallel ranks = 2 model workers" in line for line in toka.lines)
        assert ask_stories(toka) == expected
        before = toka.children()
        num_tokens = toka.gauge("toka_generation_tokens_total")
        answers: Future[list[str]] = pool.submit(ask_stories, toka)
        wait_for(lambda: toka.gauge("toka_generation_tokens_total") > num_tokens, 20)
        os.kill(before["toka-worker-1"], signal.SIGKILL)
        assert answers.result() == expected
        assert toka.gauge("toka_engine_restarts_total") == 1
        (line,) = (line for line in toka.lines if line.startswith("toka: "))
        assert line.startswith("toka: model worker (rank 1) died: killed by signal 9 (SIGKILL); restart 1")
        after = toka.children()
        assert after.keys() == before.keys() == {"toka-server", "toka-manager", "toka-worker-0", "toka-worker-1"}
        ended = [pid for title, pid in before.items() if title != "toka-server"]
        assert_all_end(ended, within_s=0.1)
        assert list(temporary.iterdir())
        assert toka.stop() == 0
        assert_all_end(list(after.values()), within_s=0.1)
    assert not list(temporary.iterdir())


def test_a_cache_that_fits_each_worker_but_not_all_ends_the_start_in_one_line(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    bytes_per_token = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * config["head_dim"] * 4
    num_tokens = psutil.virtual_memory().available // 3 // (bytes_per_token // 2)  # each of two ranks has half
    flags = (f"model={tmp_path}", *FLAGS, "dp_size=2", "tp_size=2", f"kv_cache_num_tokens={num_tokens}")
    with starting_toka(free_port(), *flags) as toka:
        assert toka.process.wait(240) == 1
    (line,) = {line for line in toka.lines if line.startswith("toka: ")}
    assert f"kv_cache_num_tokens={num_tokens}: needs " in line
    assert "for each of 4 workers" in line


@pytest.mark.parametrize(
    "parallel",
    ["tp_size=3", *(pytest.param(flags, marks=pytest.mark.ranks) for flags in ("dp_size=2", "dp_size=2 tp_size=3"))],
)
def test_replicas_and_ranks_give_the_demo_models_texts(parallel: str) -> None:
    """Three ranks have three of nine query heads and one of three KV heads each. Greedy and seeded, with and without
    logprobs."""
    question = "Name the largest planet, and say why it is so large."
    bodies = [
        {
            "model": "default",
            "messages": [{"role": "user", "content": f"{question} {number}"}],
            "max_tokens": 16,
            "temperature": number % 2,
            "seed": number,
            "n": 2,
            **({"logprobs": True} if number % 3 == 0 else {}),
        }
        for number in range(4)
    ]
    expected = ask_demo_model((), bodies)
    with running_toka(*FLAGS, "kv_cache_num_tokens=2048", *parallel.split()) as toka:
        assert num_diverged(expected, ask_all_at_once(toka, bodies)) <= 1, "ties are rare"
        assert toka.stop() == 0
