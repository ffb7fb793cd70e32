"""Lines in flight over a connection that may be refused, quiet or lost, against the server's own /v1/bulk."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.helpers.toka_process import wait_for
from tests.helpers.limits import join
from tests.library.helpers.bulk_server import echo_server
from tests.library.helpers.cutting_proxy import cutting_proxy
from tokasaurus import AsyncClient, Client, Result
from tokasaurus.library import bulk
from tokasaurus.library.bulk import AsyncBulkSession, Progress
from tokasaurus.messages.status import TimeLeft
from tokasaurus.server.routes import bulk as routes_bulk


def test_what_may_pass_is_tried_again_with_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "_PAUSES_S", (0.01,))
    with echo_server() as (server, url), Client(url) as client:
        results = client.generate(["a", "busy", "never", "b"])
    assert [result.text for result in results] == ["aa", "busybusy", None, "bb"]
    assert str(results[2].error) == "not now"
    assert server.times == {"a": 1, "busy": 3, "never": bulk.MAX_ATTEMPTS, "b": 1}
    assert server.num_connections == 1


def test_a_connection_lost_in_the_pause_before_a_retry_sends_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "_PAUSES_S", (0.5,))
    with echo_server(delay_s=0.1) as (server, url), cutting_proxy(url, []) as proxy, Client(proxy.url) as client:
        cutting = threading.Timer(0.2, proxy.cut)  # while "busy" waits
        cutting.start()
        results = client.generate(["busy", "1"])
    assert [result.text for result in results] == ["busybusy", "11"]
    assert server.times["busy"] == 3


def test_a_row_that_is_too_long_for_the_server_has_an_error() -> None:
    with echo_server(max_line_bytes=1000) as (_, url), Client(url) as client:
        results = client.generate(["a", "x" * 2000, "b"])
    assert [result.text for result in results] == ["aa", None, "bb"]
    assert results[1].error is not None
    assert (results[1].error.code, results[1].error.status) == ("request_too_large", 413)


def test_a_connection_without_lines_may_be_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a program did something else for a long time, between two results or two rows."""
    monkeypatch.setattr(bulk, "_MAX_QUIET_S", 0.2)
    monkeypatch.setattr(bulk, "MAX_SILENCE_S", 0.3)
    texts = []
    with echo_server() as (_, url), Client(url, concurrency=2) as client:
        for result in client.stream(str(number) for number in range(5)):
            texts.append(result.text)
            time.sleep(0.5)
    assert sorted(map(str, texts)) == ["00", "11", "22", "33", "44"]


def test_a_server_that_is_lost_again_and_again_is_not_given_up_while_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each connection answers some lines, and is cut while others are in flight."""
    monkeypatch.setattr(bulk, "MAX_SILENCE_S", 0.6)
    monkeypatch.setattr(bulk, "_PAUSES_S", (0.01,))
    with echo_server(delay_s=0.2) as (_, url), cutting_proxy(url, []) as proxy:

        def cut_again_and_again() -> None:
            for _ in range(6):
                time.sleep(0.3)
                proxy.cut()

        cutting = threading.Thread(target=cut_again_and_again)
        cutting.start()
        with Client(proxy.url, concurrency=4) as client:
            results = client.generate([str(number) for number in range(40)])
        join(cutting)
        assert proxy.num_connections >= 6
    assert [result.text for result in results] == [str(number) * 2 for number in range(40)]


def test_rows_that_take_long_to_read_are_sent_as_they_come() -> None:
    sent: list[int] = []
    with echo_server() as (_, url), Client(url) as client:

        def rows() -> Iterator[str]:
            for number in range(4):
                sent.append(number)
                yield str(number)
                time.sleep(0.3)

        results = client.stream(rows())
        assert next(results).text == "00"
        assert 3 not in sent, "the first result comes before all rows have been read"
        assert len(list(results)) == 3


def test_large_rows_are_read_only_as_fast_as_they_are_sent() -> None:
    num_read = 0

    def rows() -> Iterator[str]:
        nonlocal num_read
        for number in range(200):
            num_read += 1
            yield str(number) + "x" * (1 << 20)

    with echo_server(max_line_bytes=1 << 22) as (_, url), Client(url) as client:
        results = client.stream(rows())
        next(results)
        assert num_read <= 1 + (bulk.MAX_BYTES_IN_FLIGHT + (8 << 20)) // (1 << 20)
        results.close()  # type: ignore[attr-defined]


def test_a_slow_upload_of_one_line_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "_MAX_QUIET_S", 0.5)
    monkeypatch.setattr(bulk, "_SLOW_BYTES_PER_S", 1 << 20)  # far below the proxy, on a busy machine too
    prompt = "x" * (12 << 20)
    with (
        echo_server(max_line_bytes=1 << 24) as (server, url),
        cutting_proxy(url, [], bytes_per_s=6 << 20) as proxy,
        Client(proxy.url) as client,
    ):
        started_s = time.monotonic()
        (result,) = client.generate([prompt])
        assert time.monotonic() - started_s > 1.5, "three times as long as a server may be silent"
    assert result.text == prompt * 2
    assert server.num_connections == 1


def test_answers_that_are_not_taken_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a program took long for each of many large answers."""
    monkeypatch.setattr(bulk, "MAX_BYTES_HELD", 1 << 20)
    monkeypatch.setattr(bulk, "_MAX_QUIET_S", 0.3)
    with echo_server(max_line_bytes=1 << 20) as (server, url), Client(url) as client:
        results = client.stream(str(number) + "x" * 100_000 for number in range(150))
        found = [next(results)]
        (session,) = client._client._sessions
        wait_for(lambda: sum(server.times.values()) == 150, 60)
        time.sleep(0.5)  # longer than a silence may be
        assert 0.9 * (1 << 20) < session._num_held_bytes < 4 << 20
        found += results
    assert sorted(int(result.row.rstrip("x")) for result in found) == list(range(150))
    assert all(result.text == result.row * 2 for result in found)
    assert server.num_connections == 1


def test_closing_ends_the_calls_of_other_tasks() -> None:
    async def call_and_close(url: str) -> list[Result]:
        client = AsyncClient(url)
        calling = asyncio.create_task(client.generate(["a"]))
        while not server.times:  # noqa: ASYNC110  the server has its own loop
            await asyncio.sleep(0.01)
        await client.close()
        return await asyncio.wait_for(calling, 10)

    with echo_server(delay_s=100) as (server, url):
        (result,) = asyncio.run(call_and_close(url))
    assert str(result.error) == "the client is closed"


def test_the_number_of_lines_is_announced_and_after_a_loss_those_that_are_left() -> None:
    rows = [str(number) for number in range(12)]
    with (
        echo_server(delay_s=0.2) as (server, url),
        cutting_proxy(url, []) as proxy,
        Client(proxy.url, concurrency=4) as client,
    ):
        cutting = threading.Timer(0.5, proxy.cut)  # while the second or third four lines are in flight
        cutting.start()
        assert [result.text for result in client.generate(rows)] == [row * 2 for row in rows]
        join(cutting)
        list(client.stream(iter(rows)))
        client.score(["a"] * 3, ["b"] * 3)
    first, second, stream, score = server.num_lines
    assert (first, stream, score) == (12, None, 3)
    assert second is not None
    assert 4 <= second < 12


@pytest.mark.parametrize(
    "added", [{}, {"seconds_left": None}, {"seconds_left": [1.5, 2.5]}], ids=["old", "null", "new"]
)
def test_progress_is_read_also_of_a_server_that_tells_no_time(
    monkeypatch: pytest.MonkeyPatch, added: dict[str, Any]
) -> None:
    monkeypatch.setattr(routes_bulk, "PROGRESS_S", 0.05)
    told = []
    receive = AsyncBulkSession._receive

    def note(session: AsyncBulkSession, content: bytes) -> None:
        receive(session, content)
        told.append(session.progress)

    monkeypatch.setattr(AsyncBulkSession, "_receive", note)
    with echo_server(delay_s=0.3) as (server, url), Client(url) as client:
        server.progress = {"requests": 1, "generated_tokens": 3, "expected_tokens": 5, **added}
        assert client.generate(["a"])[0].text == "aa"
    left = added.get("seconds_left")
    assert told[-1] == Progress(3, 5, None if left is None else TimeLeft(*left))


def test_each_call_tells_the_server_the_program_and_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/home/x/naïve eval.py"])
    with echo_server() as (server, url), Client(url) as client:
        client.generate(["a"], progress=False)
        client.map([{"prompt": "a"}], prompt="prompt", output=tmp_path / "answers.jsonl", progress=False)
        monkeypatch.setattr("sys.argv", ["-c"])
        client.generate(["a"], progress=False)
    assert server.names == ["naïve eval.py: generate", "naïve eval.py: map answers.jsonl", "generate"]
