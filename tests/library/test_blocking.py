"""Clients that end in every other way than by the end of their context."""

import gc
import multiprocessing
import threading
from typing import Any

import pytest

from tests.library.helpers.bulk_server import echo_server
from tokasaurus import Client


def test_closing_ends_the_calls_of_other_threads() -> None:
    with echo_server(delay_s=100) as (server, url):
        client = Client(url)
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.extend(client.generate(["a"])), daemon=True)
        thread.start()
        while not server.times:
            thread.join(0.01)
        client.close()
        thread.join(10)
        assert not thread.is_alive()
    assert str(results[0].error) == "the client is closed"


class _Cycle:
    """Freed by the garbage collection alone."""

    def __init__(self, held: object) -> None:
        self.me = self
        self.held = held


@pytest.mark.parametrize("what", ["client", "stream"])
def test_a_garbage_collection_in_the_thread_of_the_loop_ends_what_it_frees(what: str) -> None:
    with echo_server(delay_s=0.05) as (_, url):
        client = Client(url)
        loop = client._loop
        gc.disable()
        try:
            if what == "client":
                _Cycle(client)
                del client
            else:
                results = client.stream(str(number) for number in range(100_000))
                next(results)
                _Cycle(results)
                del results
            has_collected = threading.Event()
            loop._loop.call_soon_threadsafe(lambda: (gc.collect(), has_collected.set()))
            assert has_collected.wait(10), "it waits for itself"
        finally:
            gc.enable()
        if what == "client":
            loop._thread.join(10)
            assert not loop._thread.is_alive()
        else:
            assert client.generate(["a"])[0].text == "aa"
            client.close()


def test_a_forked_child_can_leave_the_stream_of_its_parent() -> None:
    with echo_server(delay_s=0.05) as (_, url), Client(url) as client:
        results = client.stream(str(number) for number in range(40))
        next(results)

        def leave() -> None:
            results.close()  # type: ignore[attr-defined]
            client.close()

        child = multiprocessing.get_context("fork").Process(target=leave)
        child.start()
        child.join(10)
        if child.is_alive():
            child.kill()
        assert child.exitcode == 0
        assert len(list(results)) == 39
