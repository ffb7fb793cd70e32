"""Ray Serve on two nodes' worth of processes: requests while replicas are killed, leave, and hang."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest

from tests.helpers.processes import assert_all_end
from tests.ray.helpers.app import (
    ENGINE,
    WAIT_S,
    App,
    Received,
    body_of,
    make_model,
    running_app,
    under_load,
    wait_until,
)
from tests.ray.helpers.cluster import actors, family, two_nodes

pytest.importorskip("ray", reason="needs the extra ray")
# A cluster starts a dozen processes. What needs none: test_router.py, test_requests.py, test_broken_streams.py
pytestmark = pytest.mark.long

STREAMED = [(f"{number}: a stream", 400) for number in range(6)]
WHOLE = [(f"{number}: a whole answer", 450) for number in range(18)]
"""So many that some are on each replica, and are not answered before one is killed."""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    model = tmp_path_factory.mktemp("checkpoint") / "tiny-llama"
    oracle = make_model(model)
    with two_nodes() as logs, running_app(model, logs, oracle) as app:
        app.deploy(1)
        yield app


@pytest.fixture
def two_replicas(app: App) -> App:
    app.deploy(2)
    return app


def check(app: App, streams: list[Received], wholes: list[str]) -> int:
    """Every whole answer is right; so is what arrived of each stream, whose end says what happened. Returns the number
    of broken streams."""
    assert wholes == [app.expected(*request) for request in WHOLE]
    for received, request in zip(streams, STREAMED, strict=True):
        expected = app.expected(*request)
        if received.is_whole:
            assert received.text == expected
        else:
            assert received.failure == "engine_died"
            assert expected.startswith(received.text.rstrip("\ufffd"))
    return sum(not received.is_whole for received in streams)


def kill_one(app: App, pick: Callable[[psutil.Process], int]) -> None:
    """Kill a process of one of two replicas under load, check all answers, and wait for the replica's successor.

    pick: the process id to kill."""
    retried = app.num_retried()
    left: list[int] = []

    def kill() -> None:
        victim = actors(ENGINE)[0]
        left.extend(family(victim))
        os.kill(pick(victim), signal.SIGKILL)

    bodies = [body_of(*request) for request in STREAMED], [body_of(*request) for request in WHOLE]
    num_broken = check(app, *asyncio.run(under_load(app, *bodies, kill)))
    assert num_broken > 0
    wait_until(lambda: app.num_retried() > retried)  # some of the whole answers were on the killed one
    assert_all_end(left, WAIT_S)
    app.wait_for(2)


def launcher_of(replica: psutil.Process) -> int:
    """The process that has started the others of toka."""
    return next(child.pid for child in replica.children() if "unix_socket=" in " ".join(child.cmdline()))


def test_answers_are_those_of_the_server(app: App) -> None:
    with httpx.Client(base_url=app.url, timeout=WAIT_S) as client:
        assert client.get("/ready").json() == {"status": "ready", "replicas": 1, "replicas_up": 1}
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny-llama"
        assert client.get("//v1//models/tiny-llama/").json()["id"] == "tiny-llama", "paths as clients write them"
        answer = client.post("/v1/completions", json=body_of("a whole answer", 20)).json()
        assert answer["choices"][0]["text"] == app.expected("a whole answer", 20)
        wrong = client.post("/v1/completions", json={"model": "default", "prompt": "a", "max_tokens": -1})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_tokens")
        wrong = client.post("/v1/messages", json={"model": "default", "messages": []})
        assert (wrong.status_code, wrong.json()["type"]) == (400, "error"), "in Anthropic's form"
        for path in ("/metrics", "/v1/batches", "/v1/bulk"):
            lacking = client.post(path, content=b"{}")
            assert (lacking.status_code, lacking.json()["error"]["code"]) == (404, "not_found")


def test_a_client_that_goes_stops_its_request(app: App) -> None:
    async def leave() -> None:
        async with httpx.AsyncClient(base_url=app.url, timeout=WAIT_S) as client:
            body = body_of("a client that goes", 500, stream=True)
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_bytes():
                    break
            await asyncio.to_thread(wait_until, lambda: not any(app.running()))
            whole = asyncio.ensure_future(client.post("/v1/completions", json=body_of("another one", 500)))
            await asyncio.to_thread(wait_until, lambda: any(app.running()))
            whole.cancel()

    asyncio.run(leave())
    wait_until(lambda: not any(app.running()))


def test_a_killed_replica_breaks_its_streams_and_nothing_else(two_replicas: App) -> None:
    kill_one(two_replicas, lambda replica: replica.pid)


@pytest.mark.parametrize("pick", [lambda replica: replica.pid, launcher_of], ids=["replica", "launcher"])
def test_ten_killed_replicas(two_replicas: App, pick: Callable[[psutil.Process], int]) -> None:
    for _ in range(10):
        kill_one(two_replicas, pick)


def test_a_replica_that_hangs_is_replaced(two_replicas: App) -> None:
    """Its /ready answers no more."""
    victim = actors(ENGINE)[0]
    server = next(child for child in victim.children(recursive=True) if child.name() == "toka-server")
    server.suspend()
    wait_until(lambda: not victim.is_running())
    two_replicas.wait_for(2)


def test_a_replica_that_is_not_needed_any_more_answers_its_requests_first(two_replicas: App) -> None:
    """It does not begin to end before: streams of both replicas are whole."""
    app = two_replicas
    before = actors(ENGINE)
    left = [pid for replica in before for pid in family(replica)]
    bodies = [body_of(*request) for request in STREAMED], [body_of(*request) for request in WHOLE]

    def shrink() -> None:
        assert min(app.running()) > 0
        app.deploy(1)

    assert check(app, *asyncio.run(under_load(app, *bodies, shrink))) == 0
    (stays,) = actors(ENGINE)
    assert stays in before
    assert_all_end([pid for pid in left if pid not in family(stays)], WAIT_S)
