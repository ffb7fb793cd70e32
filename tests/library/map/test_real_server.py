"""`Client.map` against a real server: answers equal those of single requests; bad rows are errors, and no more."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel

from tests.end_to_end.helpers.toka_process import TokaProcess
from tests.helpers.examples import few
from tests.helpers.limits import join
from tests.library.map.helpers.finished import read_output
from tokasaurus import Client, JobChanged, MapSummary, Sampling


class Answer(BaseModel):
    yes: bool


def test_greedy_answers_equal_those_of_single_requests(client: Client, tmp_path: Path) -> None:
    rows = [{"id": number, "q": f"{number} {'ab' * (number % 7)}: the answer"} for number in range(60)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    sampling = Sampling(temperature=0, max_tokens=12)
    summary = client.map(
        tmp_path / "in.parquet", tmp_path / "out", prompt="{q}", key="id", sampling=sampling, progress=False
    )
    assert isinstance(summary, MapSummary)
    assert (summary.num_rows, summary.num_errors) == (60, 0)
    single = client.generate([row["q"] for row in rows], sampling)
    assert read_output(tmp_path / "out") == [
        {**row, "answer": result.text, "finish_reason": result.finish_reason, "error": None}
        for row, result in zip(rows, single, strict=True)
    ]
    assert summary.output_tokens == sum(len(result.samples[0].token_ids) for result in single)
    assert summary.prompt_tokens == sum(result.samples[0].prompt_tokens for result in single)
    again = client.map(
        str(tmp_path / "*.parquet"), tmp_path / "out", prompt="{q}", key="id", sampling=sampling, progress=False
    )
    assert (again.num_skipped, again.output_tokens) == (60, 0)
    with pytest.raises(JobChanged, match=r"temperature was 0\.0 and is"):
        client.map(tmp_path / "in.parquet", tmp_path / "out", prompt="{q}", key="id", sampling=Sampling(temperature=1))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("format_name", ["parquet", "jsonl"])
def test_further_columns_are_the_fields_of_samples(client: Client, tmp_path: Path, n: int, format_name: str) -> None:
    rows = [{"id": number, "q": f"{number} the answer"} for number in range(10)] + [{"id": 10, "q": "long " * 600}]
    fields = ["token_ids", "logprobs", "seed", "reasoning"]
    arguments: dict[str, Any] = {"prompt": "{q}", "key": "id", "columns": fields, "progress": False}
    sampling = Sampling(n=n, max_tokens=5, seed=7)
    client.map(rows, tmp_path / "out", sampling=sampling, format=format_name, prefix="m_", **arguments)
    written = sorted(read_output(tmp_path / "out"), key=lambda row: int(row["id"]))
    joined = client.map(rows, sampling=sampling, prefix="m_", **arguments)
    for row, again, result in zip(written, joined, client.generate([row["q"] for row in rows], sampling), strict=True):
        assert list(row) == ["id", "q", "m_answer", "m_finish_reason", "m_error", *(f"m_{name}" for name in fields)]
        floats = "m_logprobs"  # float32 in a file, float64 in memory
        assert {**again, floats: None} == {**row, floats: None}
        if result.error is not None:
            assert [row[f"m_{name}"] for name in fields] == [None] * 4
            continue
        ids = [sample.token_ids.tolist() for sample in result.samples]
        logprobs = [np.asarray(sample.logprobs) for sample in result.samples]
        assert row["m_token_ids"] == (ids if n > 1 else ids[0])
        for found, expected in zip(row["m_logprobs"] if n > 1 else [row["m_logprobs"]], logprobs, strict=True):
            assert found == pytest.approx(expected, rel=1e-5)
        assert (row["m_seed"], row["m_reasoning"]) == (7, [None] * n if n > 1 else None)
    with pytest.raises(JobChanged, match="answer_columns was"):
        client.map(rows, tmp_path / "out", prompt="{q}", key="id", sampling=sampling, format=format_name, prefix="m_")


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.long
def test_the_live_page_has_the_time_left_of_a_map_of_a_known_number_of_rows(
    toka: TokaProcess, client: Client, is_known: bool
) -> None:
    num_rows = 1000  # for several seconds
    rows = [{"q": f"question {number}"} for number in range(num_rows)]

    def call() -> None:
        sampling = Sampling(max_tokens=100, ignore_eos=True)
        client.map(rows if is_known else iter(rows), prompt="q", sampling=sampling, progress=False)

    jobs = []
    with httpx.stream("GET", f"{toka.url}/live", timeout=60) as response:
        calling = threading.Thread(target=call)
        calling.start()
        for line in response.iter_lines():
            jobs += json.loads(line.removeprefix("data: "))["jobs"] if line else []
            if not calling.is_alive():
                break
    join(calling)
    running = [job for job in jobs if job["kind"] == "bulk" and job["state"] == "running"]
    assert running
    assert {job["lines"]["total"] for job in running if job["lines"]["done"] < num_rows} == {
        num_rows if is_known else None
    }
    assert any(job["eta_seconds"] is not None for job in running) == is_known


def test_a_random_seed_in_a_column_gives_the_answer_again(client: Client) -> None:
    (row,) = client.map([{"q": "Once"}], prompt="q", sampling=Sampling(max_tokens=9), columns=["seed"], progress=False)
    (result,) = client.generate(["Once"], Sampling(max_tokens=9, seed=row["seed"]))
    assert result.text == row["answer"]


def test_wrong_columns_and_tools_are_refused_at_once(client: Client, tmp_path: Path) -> None:
    for wrong, error, match in (
        ({"columns": ["ids"]}, ValueError, "columns: 'ids' must be one of token_ids, logprobs"),
        ({"columns": "token_ids"}, TypeError, "columns must be a list of names"),
        ({"tools": [{"type": "function"}]}, ValueError, "tools need messages: chat=True"),
        ({"tools": 5}, TypeError, "tools must be a list"),
    ):
        arguments: dict[str, Any] = {"prompt": "{q}", **wrong}
        with pytest.raises(error, match=match):
            client.map([{"q": "x"}], tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_chats_in_a_frame(client: Client) -> None:
    frame = pandas.DataFrame({"q": [f"What is {number}?" for number in range(10)]})
    sampling = Sampling(temperature=0, max_tokens=9)
    joined = client.map(frame, prompt="{q}", chat=True, sampling=sampling, progress=False)
    single = client.chat([[{"role": "user", "content": q}] for q in frame["q"]], sampling)
    assert joined["answer"].tolist() == [result.text for result in single]
    by_messages = client.map(
        frame, messages=lambda row: [{"role": "user", "content": row["q"]}], sampling=sampling, progress=False
    )
    assert by_messages["answer"].tolist() == joined["answer"].tolist()


def test_samples_with_a_schema_are_json(client: Client) -> None:
    joined = client.map([{"q": "x"}], prompt="q", sampling=Sampling(n=4, max_tokens=64), schema=Answer, progress=False)
    answers = joined[0]["answer"]
    assert len(answers) == 4
    for answer, reason in zip(answers, joined[0]["finish_reason"], strict=True):
        if reason == "stop":
            assert isinstance(Answer.model_validate_json(answer).yes, bool)


def test_bad_rows_have_errors_and_all_others_answers(client: Client, tmp_path: Path) -> None:
    bad: dict[int, Any] = {3: "long " * 100_000, 14: None, 25: "half \ud800 of a pair", 36: 17, 47: [10**9], 58: ""}
    rows: list[dict[str, Any]] = [{"id": number, "q": f"row {number}"} for number in range(60)]
    for number, prompt in bad.items():
        rows[number]["q"] = prompt
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampling = Sampling(max_tokens=4)
    summary = client.map(path, tmp_path / "out", prompt="q", key="id", sampling=sampling, progress=False)
    written = sorted(read_output(tmp_path / "out"), key=lambda row: int(row["id"]))
    assert [row["id"] for row in written if row["error"] is not None] == sorted(bad)
    assert all(isinstance(row["answer"], str) for row in written if row["error"] is None)
    assert summary.num_errors == sum(row["error"] is not None for row in written)
    assert "context length" in written[3]["error"]


# What is wrong with a row → (the row, what its error says). The prompts are those of a function.
BAD: list[tuple[Any, str]] = [
    ({"q": "long " * 600}, "^this model's context length is|context length"),
    ({"q": None}, "^there is no prompt: it is None$"),
    ({"q": "half \ud800 of a pair"}, "surrogates"),
    ({"q": 17}, "^a prompt is a text, a list of token ids or a list of messages, not an int$"),
    ({"q": []}, "^the list of token ids or messages is empty$"),
    ({"q": [1, "a"]}, "^a list of token ids contains a str$"),
    ({"q": [1, 10**6]}, "1000000"),
    ({"q": [2**70]}, str(2**70)),
    ({"q": [{"role": "user", "content": "a"}, "b"]}, "^messages must be a list of dicts, and not all"),
    ({"q": [{"role": "nobody", "content": "a"}]}, "role"),
    ({"q": [{"role": "user", "content": 1j}]}, "^the prompt cannot be sent: Type is not JSON serializable: complex$"),
    ({"fails": True}, r"^the function of prompt= failed: KeyError: 'q'$"),
    ({"q": "x", "id": None}, "has no key: its column 'id' is null$"),
    ({"q": "x", "id": 3}, "its key 3 is that of an earlier row$"),
    ({"q": "x", "level": "high"}, r"its column 'level' is 'high' \(str\), and was int64 so far; .*format='jsonl'"),
    ({"q": "x", "level": 1j}, r"its column 'level' is 1j \(complex\), and was int64 so far"),
    ("no dict", "is not a dict, but str$"),
]


@few(1, "is_stored", [True, False])
def test_among_many_rows_each_bad_one_has_its_reason(client: Client, tmp_path: Path, is_stored: bool) -> None:
    num_rows = 5_000
    bad = {number: BAD[number // 10 % len(BAD)] for number in range(10, num_rows, 10)}

    def rows() -> Iterator[Any]:
        for number in range(num_rows):
            row = bad[number][0] if number in bad else {"q": f"row {number}"}
            yield {"id": number, "number": number, "level": 7, **row} if isinstance(row, dict) else row

    prompts: dict[int, Any] = {number: row["q"] for number, (row, _) in bad.items() if "q" in row}

    # a column of Parquet has one type: the prompts are beside the rows
    def stored_rows() -> Iterator[Any]:
        for row in rows():
            yield {name: value for name, value in row.items() if name != "q"} if isinstance(row, dict) else row

    def prompt(row: dict[str, Any]) -> Any:
        if row["number"] in bad:
            return prompts[row["number"]] if row["number"] in prompts else row["q"]
        return f"row {row['number']}"

    sampling = Sampling(max_tokens=1, temperature=0)
    arguments: dict[str, Any] = {"prompt": prompt, "key": "id", "sampling": sampling, "progress": False}
    if is_stored:
        summary = client.map(stored_rows(), tmp_path / "out", **arguments)
        assert (summary.num_rows, summary.num_errors) == (num_rows, len(bad))
        found = read_output(tmp_path / "out")
        assert len(found) == num_rows
        by_number = {row["number"]: row for row in found}
        without_number = [row for row in found if row["number"] is None]
        assert {row["error"].partition(" is not")[2] for row in without_number} == {" a dict, but str"}
        of_strings = [number for number in bad if not isinstance(bad[number][0], dict)]
        assert len(without_number) == len(of_strings)
        by_number |= dict(zip(of_strings, without_number, strict=True))
    else:
        joined = client.map(stored_rows(), **arguments)
        by_number = dict(enumerate(joined))
    for number in range(num_rows):
        row = by_number[number]
        if number not in bad or (not is_stored and "column 'level'" in bad[number][1]):
            assert (row["error"], row["finish_reason"]) == (None, "length"), row
        else:
            assert row["answer"] is None
            assert re.search(bad[number][1], row["error"]), row


def test_a_schema_that_no_text_matches_is_the_error_of_every_row(client: Client) -> None:
    schema = {"type": "object", "not": {}}
    joined = client.map([{"q": "a"}, {"q": "b"}], prompt="q", schema=schema, progress=False)
    assert ["nsatisfiable" in row["error"] for row in joined] == [True, True]
