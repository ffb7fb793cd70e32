"""Runs against a server of this project with a fake engine that echoes prompts."""

import re
import time
from collections.abc import Iterator

import pytest

from benchmarks.server import cpu as server_cpu
from tests.server import conftest as fixtures
from tests.server.helpers.fake_engine import FakeEngine, Reply, echo
from tests.server.helpers.live_server import LiveServer, live_server
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.served_model import ServedModel

served_model = fixtures.served_model
tokenizer_directory = fixtures.tokenizer_directory


@pytest.fixture(scope="module")
def server(served_model: ServedModel) -> Iterator[LiveServer]:
    with live_server(served_model, FakeEngine(), api_key="secret") as server:
        yield server


@pytest.mark.parametrize("way", server_cpu.WAYS)
def test_every_request_is_sent_once_and_the_servers_time_is_counted(server: LiveServer, way: str) -> None:
    server.engine.requests.clear()
    before = time.process_time()  # server and client share this process
    cost = server_cpu.measure(way, server_cpu.Target(f"{server.url}/v1", "secret"), 30)
    spent_s = time.process_time() - before
    assert (cost.way, cost.num_requests, cost.num_failed) == (way, 30, 0)
    assert 0.6 * spent_s < cost.server_cpu_s <= spent_s
    assert cost.ms_per_request == pytest.approx(1000 * cost.server_cpu_s / 30)
    server.engine.wait_until(lambda engine: len(engine.requests) == 30)
    assert len({request.prompt_ids.tobytes() for request in server.engine.requests}) == 30
    assert {request.max_new_tokens for request in server.engine.requests} == {1}


@pytest.mark.parametrize("way", server_cpu.WAYS)
def test_answers_without_a_token_are_failures(
    server: LiveServer, way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def empty_for_some(request: GenerateRequest, index: int) -> Reply:
        last_digit = chr(request.prompt_ids[-2])
        return Reply([], finish_reason="length") if last_digit in "013" else echo(request, index)

    monkeypatch.setattr(server.engine, "script", empty_for_some)
    command = [way, "--base-url", f"{server.url}/v1", "--api-key", "secret", "--requests", "12"]
    assert server_cpu.main(command) == 1
    assert re.search(rf"{way} .* 12 .* 5 ", capsys.readouterr().out)  # 0, 1, 3, 10, 11


def test_a_wrong_key_is_an_error(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert server_cpu.main(["--base-url", f"{server.url}/v1", "--api-key", "wrong", "--requests", "2"]) == 1
    assert "401" in capsys.readouterr().err
