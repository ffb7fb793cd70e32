"""Servers of several ranks beside a server of one process: flags, requests, and the comparison of their answers."""

import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.helpers.completions import make_body
from tests.end_to_end.helpers.expected_texts import ask_all_at_once, ask_demo_model, num_diverged
from tests.end_to_end.helpers.mixed_requests import SHARED, ask_mixed, ask_plain, assert_same_answers
from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka, wait_for
from tests.helpers.processes import assert_all_end
from tests.helpers.tiny_model import save_tiny_model

FLAGS = ("dtype=float32", "max_seqs_per_forward=16", "max_tokens_per_forward=64", "device=cpu")
LARGE = (*FLAGS, "kv_cache_num_tokens=8192", "use_hydragen=F")
# A cache for one of the longest sequences; the lengths of all are underestimated.
SMALL = (*FLAGS, "kv_cache_num_tokens=352", "early_stopping_init_mean=0.02", "track_early_stopping=F")
GROUPS = ("use_hydragen=T", "hydragen_min_group_size=2", "hydragen_min_prefix_len=16")


def assert_equals_one_process(directory: Path | None, *parallel: str) -> None:
    """Sends the same mixed requests to a server of one process and to another with the flags `parallel`.

    directory: None for the demo model, whose vocabulary is so large that one text may differ at a tie.
    """
    model, max_diverged = (() if directory is None else (f"model={directory}",)), 1 if directory is None else 0
    with running_toka(*model, *LARGE) as toka:
        expected, plain = ask_mixed(toka), ask_plain(toka)
        assert toka.stop() == 0
    with running_toka(*model, *SMALL, *GROUPS, *parallel) as toka:
        assert_same_answers(ask_mixed(toka), expected, max_diverged)
        num_before = toka.gauge("toka_preemptions_total")
        texts = ask_plain(toka)
        assert sum(text != right for text, right in zip(texts, plain, strict=True)) <= max_diverged
        assert toka.gauge("toka_preemptions_total") > num_before
        ask_twice(toka)
        for counter in ("prefix_cache_hit_tokens", "shared_prompt_tokens"):
            assert toka.gauge(f"toka_{counter}_total") > 0, counter
        assert toka.gauge("toka_kv_blocks_used") == 0
        assert toka.gauge("toka_recompiles_total") == 0
        assert toka.stop() == 0


def ask_twice(toka: TokaProcess) -> None:
    """Sends a prompt of several blocks, and when it is answered, once more: the second time it is cached, by whichever
    replica. Prompts that are asked at once need not be: the demo model's have a block at most in common, and which
    replica has it, and for how long, depends on the order in which the others come."""
    body = {"model": "default", "prompt": SHARED * 3, "temperature": 0, "max_tokens": 1}
    texts = []
    for _ in range(2):
        answer = httpx.post(f"{toka.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["text"])
    assert texts[0] == texts[1]


def ask_stories(toka: TokaProcess) -> list[str]:
    """The texts of eight requests, all at once; two samples of each."""

    def ask(number: int) -> list[str]:
        body = make_body(number, n=2, max_tokens=150)
        answer = httpx.post(f"{toka.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return [choice["text"] for choice in answer.json()["choices"]]

    with ThreadPoolExecutor(8) as pool:
        return [text for texts in pool.map(ask, range(8)) for text in texts]


def assert_requests_outlive_deaths(
    directory: Path, monkeypatch: pytest.MonkeyPatch, parallel: str, what: str, ranks: list[int]
) -> None:
    """Kills these ranks one after the other, each under eight requests, and looks for what is left over.

    what: how the mesh is described at the start.
    """
    save_tiny_model(directory / "model", "llama")
    temporary = directory / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with running_toka(f"model={directory / 'model'}", *LARGE) as toka:
        expected = ask_stories(toka)
        assert toka.stop() == 0
    assert not list(temporary.iterdir()), "one rank needs nobody to meet"
    with running_toka(f"model={directory / 'model'}", *LARGE, parallel) as toka, ThreadPoolExecutor(1) as pool:
        assert any(what in line for line in toka.lines)
        assert ask_stories(toka) == expected
        for number, rank in enumerate(ranks, start=1):
            before = toka.children()
            num_tokens = toka.gauge("toka_generation_tokens_total")
            answers: Future[list[str]] = pool.submit(ask_stories, toka)
            wait_for(partial(_has_more_tokens, toka, num_tokens), 20)
            os.kill(before[f"toka-worker-{rank}"], signal.SIGKILL)
            # Nobody waits for the dead rank until a collective's time limit; make torture demands a second.
            assert_all_end([pid for title, pid in before.items() if title != "toka-server"], within_s=20)
            assert answers.result() == expected
            assert toka.gauge("toka_engine_restarts_total") == number
            *_, line = (line for line in toka.lines if line.startswith("toka: "))
            assert line.startswith(f"toka: model worker (rank {rank}) died: killed by signal 9 (SIGKILL); ")
            assert f"; restart {number} of " in line
            after = toka.children()
            assert after.keys() == before.keys() >= {"toka-server", "toka-manager", "toka-worker-0", "toka-worker-1"}
        assert list(temporary.iterdir())
        assert toka.stop() == 0
        assert_all_end(list(after.values()), within_s=0.1)
    assert not list(temporary.iterdir())


def assert_gives_the_demo_models_texts(*parallel: str) -> None:
    """Greedy and seeded, with and without logprobs."""
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
    with running_toka(*FLAGS, "kv_cache_num_tokens=2048", *parallel) as toka:
        assert num_diverged(expected, ask_all_at_once(toka, bodies)) <= 1, "ties are rare"
        assert toka.stop() == 0


def _has_more_tokens(toka: TokaProcess, num_tokens: float) -> bool:
    return toka.gauge("toka_generation_tokens_total") > num_tokens
