"""A server that is stopped in the middle of batches, and started again: nothing is computed twice, and nothing differs
from a run without a stop."""

import os
import re
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.commands.batch.helpers.request_lines import read_results, text_of
from tests.end_to_end.helpers.batch_client import BatchClient
from tests.end_to_end.helpers.batch_command import BatchCommand
from tests.end_to_end.helpers.mixed_requests import GREEDY, PENALTIES, SEEDED
from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka, wait_for

pytestmark = pytest.mark.long

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 6}},
    "required": ["names"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "names", "schema": SCHEMA}}
KINDS: dict[str, dict[str, Any]] = {
    "sampled, without a seed": {},
    "greedy": {"temperature": 0},
    "seeded, with limits": {"seed": 7, "temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "logprobs": {**SEEDED, "logprobs": 3},
    "logprobs as sampled": {"temperature": 0.7, "logprobs": 2, "logprobs_mode": "sampled"},
    "samples": {"n": 2, "ignore_eos": False, "stop_token_ids": [101, 102]},
    "samples with logprobs": {**SEEDED, "n": 3, "logprobs": 1},
    "two prompts": {"prompt": ["One", "Another"], "n": 2},
    "stop strings": {"stop": ["ab", "qu", "xyz"], "min_tokens": 20},
    "penalties": {**GREEDY, **PENALTIES},
    "sampled, with penalties": PENALTIES,
    "bias": {"logit_bias": {"65": 5, "66": -100}, "min_tokens": 5, "ignore_eos": False},
    "bad words": {"bad_words": ["e", "ab", "the"]},
    "grammar": {"guided_regex": "([a-z]{2,5} )+[0-9]{30}", "temperature": 1},
    "schema": {"response_format": JSON, "logprobs": 1},
    "schema, samples": {"response_format": JSON, "n": 2, "temperature": 0.9},
}
STARTS_OVER: list[dict[str, Any]] = [{**GREEDY, "echo": True}, {**GREEDY, "prompt_logprobs": 2}]
"""Kinds of the last lines, of which nothing is kept. They do not run when the server is stopped."""
NUM_LINES = 16 * len(KINDS)  # 256
NUM_CHATS = 44
NUM_TOKENS = 150
NUM_DONE = 30
"""Lines with results when the server is stopped."""


@contextmanager
def server(model: Path, data_dir: Path, drain_seconds: int = 0) -> Iterator[TokaProcess]:
    sizes = ("kv_cache_num_tokens=8192", "max_seqs_per_forward=16")
    flags = (f"model={model}", "dtype=float32", *sizes, f"data_dir={data_dir}", f"drain_seconds={drain_seconds}")
    with running_toka(*flags) as toka:
        yield toka


def lines_of(endpoint: str, num_lines: int) -> bytes:
    kinds = list(KINDS.values())
    lines = []
    for number in range(num_lines):
        body: dict[str, Any] = {"model": "default", "max_tokens": NUM_TOKENS - number % 60, "ignore_eos": True}
        if endpoint == CHAT:
            body |= {"messages": [{"role": "user", "content": f"Tell {number}"}], "logprobs": True, "top_logprobs": 2}
            body |= {"response_format": JSON} if number % 2 else {}
        else:
            kind = STARTS_OVER[number % 2] if number >= num_lines - 8 else kinds[number % len(kinds)]
            body |= {"prompt": f"Story {number}", **kind}
        lines.append({"custom_id": str(number), "method": "POST", "url": endpoint, "body": body})
    return b"".join(orjson.dumps(line) + b"\n" for line in lines)


def create(toka: TokaProcess, **contents: bytes) -> list[str]:
    """Ids of batches. contents: inputs by endpoint."""
    client = BatchClient(toka.url)
    return [client.create(endpoint, client.upload(content))["id"] for endpoint, content in contents.items()]


def query(data_dir: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(data_dir / "database.sqlite", timeout=20)) as connection, connection:
        return connection.execute(sql).fetchall()


def num_done(data_dir: Path) -> int:
    return int(query(data_dir, "SELECT coalesce(sum(num_completed + num_failed), 0) FROM batches")[0][0])


def copy_unstarted(data_dir: Path, other: Path) -> None:
    """A copy whose batches have no results yet: the same lines with the same seeds."""
    shutil.copytree(data_dir, other)
    for sql in (
        "DELETE FROM kept",
        "DELETE FROM results",
        "UPDATE lines SET state = 0, attempts = 0",
        "UPDATE batches SET num_completed = 0, input_tokens = 0, output_tokens = 0, cached_tokens = 0",
    ):
        query(other, sql)


def finish(toka: TokaProcess, batch_ids: list[str]) -> list[dict[str, Any]]:
    """What is comparable of the results of the batches, when they have completed."""
    client = BatchClient(toka.url)
    batches = [client.wait(batch_id, ("completed",), 240) for batch_id in batch_ids]
    return [comparable(result) for batch in batches for result in client.results(batch)]


def comparable(result: dict[str, Any]) -> dict[str, Any]:
    """A result without what belongs to one run: ids, times, and how much of a prompt was cached."""
    assert result["response"]["status_code"] == 200, result
    body = dict(result["response"]["body"])
    del body["id"], body["created"], body["usage"]["prompt_tokens_details"]
    return {"custom_id": result["custom_id"], "body": body}


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """All is equal, but numbers may be rounded otherwise: KV that is computed again is so in other steps."""
    assert [without_numbers(result) for result in found] == [without_numbers(result) for result in expected]
    for one, other in zip(found, expected, strict=True):
        assert numbers(one) == pytest.approx(numbers(other), abs=1e-4)


def without_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_numbers(one) for one in value]
    return "number" if isinstance(value, float) else value


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for one in value.values() for number in numbers(one)]
    if isinstance(value, list):
        return [number for one in value for number in numbers(one)]
    return [value] if isinstance(value, float) else []


class Totals:
    """The last lines of the log of a server that was stopped."""

    def __init__(self, toka: TokaProcess) -> None:
        wait_for(lambda: "stopped" in toka.lines, 20)
        self.log = "\n".join(toka.lines)
        self.num_answered = self._number(r"^requests: ([\d,]+) answered, 0 aborted, 0 failed$")
        self.num_generated = self._number(r"^tokens: .*, ([\d,]+) generated in ")
        self.num_left = self._number(r"^batches:  ([\d,]+) lines? goe?s? on at the next start")
        self.num_kept = self._number(r"^batches:  .*, with ([\d,]+) tokens that are kept$")

    def _number(self, pattern: str) -> int:
        found = re.search(pattern, self.log, re.MULTILINE)
        return 0 if found is None else int(found[1].replace(",", ""))


def test_two_stops_change_no_result_and_no_token_is_sampled_twice(model: Path, tmp_path: Path) -> None:
    data_dir, undisturbed = tmp_path / "data", tmp_path / "undisturbed"
    inputs = {COMPLETIONS: lines_of(COMPLETIONS, NUM_LINES), CHAT: lines_of(CHAT, NUM_CHATS)}
    num_lines, stops = NUM_LINES + NUM_CHATS, []
    with server(model, data_dir) as toka:
        ids = create(toka, **inputs)
        wait_for(lambda: num_done(data_dir) >= NUM_DONE, 120)
        assert toka.stop() == 0
        stops.append(Totals(toka))
    copy_unstarted(data_dir, undisturbed)
    with server(model, data_dir) as toka:
        wait_for(lambda: num_done(data_dir) >= 4 * NUM_DONE, 120)
        assert toka.stop() == 0
        stops.append(Totals(toka))
    for stop in stops:
        assert stop.num_kept > 0, stop.log
        assert stop.num_left > 0, stop.log
    assert stops[0].num_answered + stops[0].num_left == num_lines
    assert stops[1].num_answered + stops[1].num_left == stops[0].num_left
    assert query(data_dir, "SELECT max(attempts) FROM lines WHERE state = 0") == [(0,)], (
        "a stop is no attempt of a line"
    )
    with server(model, data_dir) as toka:
        found = finish(toka, ids)
        assert query(data_dir, "SELECT count(*) FROM kept") == [(0,)]
        assert toka.stop() == 0
        last = Totals(toka)
    with server(model, undisturbed) as toka:
        expected = finish(toka, ids)
        assert toka.stop() == 0
        whole = Totals(toka)
    assert len(found) == num_lines
    assert_equal(found, expected)
    assert sum(stop.num_generated for stop in stops) + last.num_generated == whole.num_generated
    assert (last.num_left, last.num_kept) == (0, 0)


def test_lines_that_run_may_end_while_the_server_drains_and_a_second_signal_loses_only_their_tokens(
    model: Path, tmp_path: Path
) -> None:
    data_dir, undisturbed, num_lines = tmp_path / "data", tmp_path / "undisturbed", 60
    with server(model, data_dir, drain_seconds=60) as toka:
        ids = create(toka, **{COMPLETIONS: lines_of(COMPLETIONS, num_lines)})
        wait_for(lambda: num_done(data_dir) >= 5, 120)
        assert toka.stop() == 0
        drained = Totals(toka)
    assert drained.num_kept == 0, "all that ran have ended, and the others had not begun"
    assert drained.num_answered == num_done(data_dir) > 5
    assert drained.num_left == num_lines - drained.num_answered > 0
    assert query(data_dir, "SELECT count(*), max(state), min(state) FROM lines WHERE state <> 2")[0][1:] == (0, 0)
    copy_unstarted(data_dir, undisturbed)

    with server(model, data_dir, drain_seconds=60) as toka:
        wait_for(lambda: num_done(data_dir) > drained.num_answered, 120)
        os.kill(toka.children()["toka-manager"], signal.SIGSTOP)
        toka.process.send_signal(signal.SIGTERM)
        wait_for(lambda: any("stopping: " in line for line in toka.lines), 20)
        time.sleep(0.5)  # signals within 0.3 s count as one
        began_s = time.monotonic()
        toka.process.send_signal(signal.SIGTERM)
        toka.process.wait(timeout=20)
        assert time.monotonic() - began_s < 10
    assert query(data_dir, "SELECT count(*) FROM kept") == [(0,)]
    with server(model, data_dir) as toka:
        found = finish(toka, ids)
        assert toka.stop() == 0
    with server(model, undisturbed) as toka:
        assert_equal(found, finish(toka, ids))


def test_an_interrupted_command_goes_on_with_the_tokens_that_it_had(model: Path, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    num_lines, num_tokens = 20, 200
    for directory in (whole, stopped):
        directory.mkdir()
    code, output = BatchCommand(model, whole, num_lines, num_tokens).run()
    assert code == 0, output
    command = BatchCommand(model, stopped, num_lines, num_tokens)
    process = command.start("drain_seconds=0")
    command.wait_for_results(5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    told = re.search(
        r"^toka batch: stopped; (\d+) lines go on at the next start, with ([\d,]+) tokens that are kept; the same "
        r"command continues where it was$",
        output,
        re.MULTILINE,
    )
    assert told is not None, output
    assert int(told[1]) == num_lines - len(command.results())
    assert query(command.data_dir, "SELECT count(*) FROM kept")[0][0] == 4  # max_seqs_per_forward
    code, output = command.run()
    assert code == 0, output
    assert [text_of(result) for result in read_results(command.output)] == [
        text_of(result) for result in read_results(whole / "out.jsonl")
    ]
