"""Two replicas behind one port: they give one replica's texts, and one of them may die under load."""

import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.end_to_end.helpers.replica_kills import NUM_STREAMS, engine_processes, kill_once, learn_texts
from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka, wait_for
from tests.helpers.leftovers import watched_leftovers
from tests.helpers.processes import assert_all_end

FLAGS = ("dtype=float32", "kv_cache_num_tokens=32768", "max_tokens_per_forward=256", "max_seqs_per_forward=32")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[str]:
    """Each request's text on a server with one replica."""
    with running_toka(f"model={model}", *FLAGS) as toka:
        return learn_texts(toka.port)


@pytest.fixture
def toka(model: Path) -> Iterator[TokaProcess]:
    with running_toka(f"model={model}", *FLAGS, "dp_size=2") as toka:
        yield toka


@pytest.mark.long
def test_a_killed_replica_fails_alone_and_comes_back(toka: TokaProcess, expected: list[str]) -> None:
    assert learn_texts(toka.port) == expected
    assert httpx.get(f"{toka.url}/ready").json() == {"status": "ready", "replicas": 2, "replicas_up": 2}
    processes = engine_processes(toka)
    assert sorted(process.name() for process in processes) == [
        *("toka-manager0", "toka-manager1"),
        *("toka-worker0-0", "toka-worker1-0"),
    ]
    report = kill_once(toka, expected, random.Random(1))
    assert not report.faults
    assert report.num_ended_streams + report.num_whole_streams == NUM_STREAMS
    assert report.told_s < 10, "also on a busy machine; make torture measures a free one"
    wait_for(lambda: toka.gauge("toka_kv_blocks_used") == 0, 60)
    assert learn_texts(toka.port) == expected
    children = [child.pid for child in psutil.Process(toka.process.pid).children()]
    assert toka.stop() == 0
    assert_all_end(children, within_s=0.1)


@pytest.mark.long
def test_a_killed_rank_ends_its_replica_alone(model: Path) -> None:
    """Short texts, since four ranks on few cores are slow."""
    flags = (f"model={model}", *FLAGS)
    with running_toka(*flags) as toka:
        expected = learn_texts(toka.port, 60)
    with watched_leftovers() as leftovers:
        with running_toka(*flags, "dp_size=2", "tp_size=2") as toka:
            pids = [process.pid for process in engine_processes(toka)]
            assert len(pids) == 6
            rng = random.Random(1)
            for _ in range(2):
                report = kill_once(toka, expected, rng, 60, titles=("toka-worker",))
                assert not report.faults
                assert report.told_s < 10, "also on a busy machine; make torture measures a free one"
            assert learn_texts(toka.port, 60) == expected
            pids += [process.pid for process in engine_processes(toka)]
            assert toka.stop() == 0
        assert_all_end(pids, within_s=0.1)
        assert leftovers.found(toka.port) == []


@pytest.mark.long
def test_chats_return_to_the_replica_that_has_their_turns(toka: TokaProcess) -> None:
    """Six chats of four turns, each turn of all chats at once. They take turns to be the first, so that each would
    change its replica if only the load counted."""
    chats = [f"Chat {number}: " + f"{number} " * 40 for number in range(6)]
    for turn in range(4):
        body = {"model": "default", "prompt": chats, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{toka.url}/v1/completions", json=body, timeout=240).json()
        details = answer["usage"]["prompt_tokens_details"]
        if turn:
            # all but the last block of each earlier turn, and what this turn adds
            assert details["cached_tokens"] >= answer["usage"]["prompt_tokens"] - len(chats) * (16 + 20 + 20)
        chats = [
            chat + choice["text"] + f" and {turn} more." for chat, choice in zip(chats, answer["choices"], strict=True)
        ]
        chats = chats[1:] + chats[:1]
