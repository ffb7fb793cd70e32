"""`Client.map` against a real server: answers equal those of single requests; bad rows are errors, and no more."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel

from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka
from tests.helpers.tiny_model import save_tiny_model
from tests.library.map.helpers.finished import read_output
from tokasaurus import Client, JobChanged, MapSummary, Sampling


class Answer(BaseModel):
    yes: bool


@pytest.fixture(scope="module")
def toka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokaProcess]:
    directory: Path = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, "llama")
    flags = ("dtype=float32", "device=cpu", "kv_cache_num_tokens=16384", "max_seqs_per_forward=32")
    with running_toka(f"model={directory}", *flags) as process:
        yield process


@pytest.fixture(scope="module")
def client(toka: TokaProcess) -> Iterator[Client]:
    with Client(toka.url) as opened:
        yield opened


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
