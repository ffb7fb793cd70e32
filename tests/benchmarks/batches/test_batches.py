"""Runs against a server of this project with a scripted engine, and against a real server; and the store alone."""

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.batches import __main__ as batches
from benchmarks.batches import first_token
from benchmarks.batches.__main__ import Measured, print_rows
from benchmarks.batches.store import INPUT_FILE, main, write_input
from benchmarks.server.own_server import ServerWatch
from tests.helpers.tiny_model import save_tiny_model
from tests.server import conftest as fixtures
from tests.server.helpers.fake_engine import FakeEngine, Reply
from tests.server.helpers.live_server import LiveServer, live_server
from tokasaurus.commands.bench.client import ServerError
from tokasaurus.commands.bench.workloads import OfferedRequest
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.jobs.store.data_dir import DataDir
from tokasaurus.server.served_model import ServedModel

served_model = fixtures.served_model
tokenizer_directory = fixtures.tokenizer_directory

NUM_REQUESTS = 8


def answer_in_full(request: GenerateRequest, _index: int) -> Reply:
    return Reply([97] * request.max_new_tokens, finish_reason="length")


@pytest.fixture
def server(served_model: ServedModel, tmp_path: Path) -> Iterator[LiveServer]:
    with live_server(served_model, FakeEngine(answer_in_full), data_dir=tmp_path) as server:
        yield server


@pytest.mark.parametrize("way", ["live", "batch"])
def test_both_ways_send_the_same_requests(server: LiveServer, way: str) -> None:
    requests = batches.short_requests(NUM_REQUESTS, 0)
    ask = batches.ask_live if way == "live" else batches.ask_batch
    began_s = time.perf_counter()
    seconds = asyncio.run(ask(f"{server.url}/v1", requests, "salt"))
    assert 0 < seconds <= time.perf_counter() - began_s
    sent = server.engine.requests
    assert sorted(request.max_new_tokens for request in sent) == sorted(request.max_tokens for request in requests)
    assert {request.is_background for request in sent} == {way == "batch"}


@pytest.mark.parametrize("load", first_token.LOADS)
def test_probes_are_sent_beside_the_load(server: LiveServer, load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_probes(request: GenerateRequest, index: int) -> Reply:
        is_probe = request.max_new_tokens == 4
        num_running = sum(one.max_new_tokens != 4 for one in server.engine.requests)
        server.engine.stats = replace(server.engine.stats, num_running=num_running)
        return answer_in_full(request, index) if is_probe else Reply([97], finish_reason=None)

    monkeypatch.setattr(server.engine, "script", answer_probes)
    monkeypatch.setattr(first_token, "PROBES_PER_S", 100)
    requests = [OfferedRequest({"prompt": "x"}, 1, 100, 0.0, True)] * NUM_REQUESTS
    times = asyncio.run(first_token.first_token_times(f"{server.url}/v1", load, requests, NUM_REQUESTS, 0))
    assert len(times) == first_token.NUM_PROBES
    assert all(0 < seconds < 5 for seconds in times)
    lengths = [request.max_new_tokens for request in server.engine.requests]
    assert lengths.count(4) == 1 + first_token.NUM_PROBES
    assert lengths.index(4) == NUM_REQUESTS, "the load comes first"
    assert len(lengths) == 1 + first_token.NUM_PROBES + NUM_REQUESTS


def test_a_load_that_does_not_run_whole_is_an_error(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.engine, "script", lambda *_: Reply([97], finish_reason=None))
    monkeypatch.setattr(first_token, "SETTLE_TIMEOUT_S", 0.5)
    requests = [OfferedRequest({"prompt": "x"}, 1, 100, 0.0, True)] * NUM_REQUESTS
    with pytest.raises(ServerError, match="0 of 8 requests of the load run"):
        asyncio.run(first_token.first_token_times(f"{server.url}/v1", "live", requests, NUM_REQUESTS, 0))


@pytest.mark.long
def test_large_files_are_measured_in_a_real_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    monkeypatch.setattr(batches, "WORDS_PER_PROMPT", {"short": 3})
    monkeypatch.setattr(batches, "RUN_S", 0.2)
    flags = [f"model={tmp_path}", "dtype=float32", "kv_cache_num_tokens=4096", "max_seqs_per_forward=8"]
    rows = {row.what.partition("): ")[2]: row for row in batches.measure_large_files(flags, 3000)}
    validation = rows["validation"]
    assert validation.passed
    assert 0 < float(validation.value.split()[0]) < 10
    assert any("longest" in what for what in rows)
    assert rows["peak memory of the server, growth"].passed


def test_missed_targets_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    watch = ServerWatch([(1.0, 0.01), (2.0, 0.4), (9.0, 3.0)], 50_000_000, 0)
    rows = batches.large_rows("file", {"upload": (0.0, 1.5), "validation": (1.5, 3.0)}, watch)
    assert [row.passed for row in rows] == [None, None, True, False, True, None]
    print_rows([*rows, Measured("x", "1")], Console(width=200))
    assert capsys.readouterr().out.count("NO") == 1


@pytest.mark.parametrize(("num_lines", "num_bytes"), [(100, 100_000), (1000, 4_000_000)])
def test_the_stores_input_file_has_its_size(tmp_path: Path, num_lines: int, num_bytes: int) -> None:
    data_dir = DataDir(tmp_path)
    data_dir.open("a test")
    write_input(data_dir, num_lines, num_bytes)
    content = data_dir.content_path(INPUT_FILE).read_bytes()
    data_dir.close()
    assert content.count(b"\n") == num_lines
    assert 0.95 < len(content) / num_bytes < 1.05


def test_each_part_of_the_store_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--lines", "3000", "--file-mb", "1", "--result-bytes", "200", "--directory", str(tmp_path)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"│ (\w+) +│ +(\d+) │ +([\d.]+) │ +([\d.]+) │ +([\d.]+) │", printed)
    assert [(part, lines) for part, lines, *_ in rows] == [
        ("validate", "3000"),
        ("record", "3000"),
        ("finalize", "3000"),
    ]
    assert all(0 < float(us_per_line) < 10_000 for *_, us_per_line in rows)
    assert "process that reads the file: CPU" in printed
    assert list(tmp_path.iterdir()) == []
