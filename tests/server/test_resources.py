"""Limits of contents, at a real server: what is too large is refused with the name of the flag. Threads and garbage."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, assert_openai_error, minimal_body
from tests.server.helpers.fake_engine import FakeEngine, Reply
from tests.server.helpers.live_server import LiveServer, live_server, wait_until_clean
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.resources import LARGE_SIZE, NUM_SMALL_THREADS, TextThreads
from tokasaurus.server.served_model import ServedModel

LIMITS = {"max_answer_values": 40, "max_tokenize_chars": 200, "max_stop_strings": 2, "max_stop_chars": 5}


@pytest.fixture
def limited(served_model: ServedModel) -> Iterator[LiveServer]:
    with live_server(served_model, FakeEngine(), **LIMITS) as server:
        yield server


def refused(server: LiveServer, route: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.http.post(route, json=body)
    assert response.status_code == 400, response.text
    return assert_openai_error(response.content)


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_stop_strings_are_limited(limited: LiveServer, route: str) -> None:
    allowed = minimal_body(route) | {"stop": ["€" * 5, "b"]}
    assert limited.http.post(route, json=allowed).status_code == 200
    for stop, limit in ((["a", "b", "c"], "at most 2 strings"), ("a" * 6, "of 6 characters: there may be at most 5")):
        error = refused(limited, route, minimal_body(route) | {"stop": stop})
        assert error["param"] == "stop"
        assert limit in error["message"]
    assert len(limited.engine.requests) == 1


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_an_answer_that_grows_too_large_is_cancelled_unless_it_is_streamed(limited: LiveServer, route: str) -> None:
    """One sample fits; the second, of three, is too much, and the third never ends."""

    def script(request: GenerateRequest, index: int) -> Reply | None:
        return None if index == 2 else Reply([97] * 15, [-1.0] * 15 if request.want_logprobs else None)

    limited.engine.script = script
    body = minimal_body(route) | {"n": 3, "max_tokens": 20, "logprobs": 0 if route == COMPLETIONS else True}
    error = refused(limited, route, body)
    assert error["code"] == "answer_too_large"
    assert "40 values, its tokens and log-probabilities" in error["message"]
    assert "stream=true" in error["message"]
    limited.engine.wait_until(lambda engine: len(engine.cancelled) == 1)
    wait_until_clean(limited)

    limited.engine.script = lambda _request, _index: Reply([97] * 15, [-1.0] * 15)
    with limited.http.stream("POST", route, json=body | {"stream": True}) as response:
        assert b"".join(response.iter_raw()).count(b'"finish_reason":"stop"') == 3
    few = body | {"n": 1}
    assert limited.http.post(route, json=few).status_code == 200


def test_characters_for_tokenize_are_limited(limited: LiveServer) -> None:
    assert limited.http.post("/tokenize", json={"prompt": "é" * 200}).status_code == 200
    assert "at most 200 characters" in refused(limited, "/tokenize", {"prompt": "a" * 201})["message"]
    message = {"role": "user", "content": "a" * 60}
    assert limited.http.post("/tokenize", json={"messages": [message]}).status_code == 200
    error = refused(limited, "/tokenize", {"messages": [message] * 4})
    assert error["param"] == "messages"
    assert "at most 200 characters" in error["message"]
    tool = {"type": "function", "function": {"name": "f", "description": "a" * 3000}}
    assert refused(limited, "/tokenize", {"messages": [message], "tools": [tool]})["param"] == "messages"


def test_token_ids_for_detokenize_are_limited(limited: LiveServer) -> None:
    assert limited.http.post("/detokenize", json={"tokens": [97] * 200}).json() == {"prompt": "a" * 200}
    error = refused(limited, "/detokenize", {"tokens": [97] * 201})
    assert error["param"] == "tokens"
    assert "at most 200" in error["message"]


def test_small_work_runs_while_all_threads_for_large_work_are_busy() -> None:
    async def run() -> None:
        threads, released = TextThreads(), threading.Event()
        try:
            large = [asyncio.ensure_future(threads.run(LARGE_SIZE, released.wait, 60)) for _ in range(100)]
            await asyncio.sleep(0)
            small = [threads.run(LARGE_SIZE - 1, str, number) for number in range(NUM_SMALL_THREADS + 1)]
            assert await asyncio.wait_for(asyncio.gather(*small), 30) == ["0", "1", "2", "3", "4"]
            assert not any(task.done() for task in large)
            released.set()
            assert all(await asyncio.wait_for(asyncio.gather(*large), 30))
        finally:
            released.set()
            threads.close()

    asyncio.run(run())


GARBAGE_SCRIPT = """
import gc, time, weakref
from tokasaurus.server import resources

class Node:
    pass

def make_cycle():
    node = Node()
    node.own = node
    return weakref.ref(node)

resources.CHECK_INTERVAL_S = 0.05
idle = False
resources.collect_garbage_when_idle(lambda: idle)
full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
kept = [[] for _ in range(2_000_000)]  # Python would have made several full collections
assert not full, full
idle = True
node = make_cycle()
deadline = time.monotonic() + 60
while node() is not None:
    assert time.monotonic() < deadline
    time.sleep(0.01)
assert full
"""


def test_full_collections_happen_only_when_idle() -> None:
    """In a process of its own, since the settings are the whole process's."""
    done = subprocess.run([sys.executable, "-c", GARBAGE_SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
