"""Ray Data on two nodes' worth of processes: rows while engines are killed, and jobs that go on after a failure."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer
from typing_extensions import Self

from tests.helpers.limits import join
from tests.helpers.processes import assert_all_end
from tests.helpers.tiny_model import save_tiny_model
from tests.ray.helpers.cluster import TINY_FLAGS, actors, family, num_running, two_nodes
from tokasaurus import Sampling

pytest.importorskip("ray", reason="needs the extra ray")

ENGINE = "MapBatches(MapRows)"
NUM_ROWS = 64
NUM_TOKENS = 100
TOO_LONG = 5
"""The row whose prompt exceeds the context."""
ENDED_S = 10.0
WAIT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint") / "tiny-llama"


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int] | None]:
    """The tokens of each row's answer, by transformers."""
    oracle = save_tiny_model(model, "llama")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    numbers = [number for number in range(NUM_ROWS) if number != TOO_LONG]
    ids = torch.tensor([tokenizer.encode(f"{question(number)}:").ids for number in numbers])
    limits = {"max_new_tokens": NUM_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        made = oracle.generate(ids, do_sample=False, **limits)[:, ids.shape[1] :].tolist()
    answers = dict(zip(numbers, made, strict=True))
    return [answers.get(number) for number in range(NUM_ROWS)]


@pytest.fixture(scope="module")
def cluster(model: Path, expected: list[list[int] | None]) -> Iterator[None]:
    del model, expected  # made before
    with two_nodes():
        from ray.data import DataContext

        DataContext.get_current().enable_progress_bars = False
        yield


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """A directory of files."""
    (tmp_path / "in").mkdir()
    for part in range(8):
        numbers = range(part * NUM_ROWS // 8, (part + 1) * NUM_ROWS // 8)
        table = pa.table({"id": list(numbers), "question": [question(number) for number in numbers]})
        pq.write_table(table, tmp_path / "in" / f"{part}.parquet")
    return str(tmp_path / "in")


def question(number: int) -> str:
    return f"{number:02}: where is it" * (40 if number == TOO_LONG else 1)


def processor_of(model: Path, tp_size: int = 1, **arguments: Any) -> Any:
    from tokasaurus.ray import build_processor

    return build_processor(
        {**TINY_FLAGS, "model": str(model), "tp_size": tp_size},
        prompt="{question}:",
        sampling=Sampling(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
        columns=["token_ids"],
        batch_size=8,
        batches_at_once=2,
        num_cpus=tp_size,
        **arguments,
    )


def check(answered: list[dict[str, Any]], expected: list[list[int] | None]) -> None:
    """Every row is there once, with its answer, or with the reason why it has none."""
    assert sorted(row["id"] for row in answered) == list(range(NUM_ROWS))
    for row in answered:
        tokens = expected[row["id"]]
        assert row["question"] == question(row["id"])
        if tokens is None:
            assert "context length" in row["error"]
            assert row["answer"] is row["token_ids"] is row["finish_reason"] is None
        else:
            assert (row["error"], row["finish_reason"], list(row["token_ids"])) == (None, "length", tokens)


class Killer:
    """Kills an engine whenever it answers rows, until it has killed so many."""

    def __init__(self, num_kills: int) -> None:
        self.left: list[int] = []
        """Processes of what it has killed."""
        self.num_killed = 0
        self._num_kills = num_kills
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        join(self._thread)

    def _run(self) -> None:
        while self.num_killed < self._num_kills and not self._is_over.wait(0.02):
            for actor in actors(ENGINE):
                if num_running(actor) > 0:
                    self.left += family(actor)
                    actor.kill()
                    self.num_killed += 1
                    break


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("num_kills", [1, 10])
@pytest.mark.long
def test_every_row_is_answered_once_though_engines_are_killed(
    model: Path, expected: list[list[int] | None], rows: str, num_kills: int
) -> None:
    import ray

    process = processor_of(model, postprocess=lambda row: {**row, "number": row["id"]})
    with Killer(num_kills) as killer:
        answered = process(ray.data.read_parquet(rows)).take_all()
    assert killer.num_killed == num_kills
    check(answered, expected)
    assert all(row["number"] == row["id"] for row in answered)
    assert_all_end(killer.left, ENDED_S)


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_two_engines_of_two_ranks_each(model: Path, expected: list[list[int] | None], rows: str) -> None:
    import ray

    process = processor_of(model, tp_size=2, num_engines=2)
    check(process(ray.data.read_parquet(rows)).take_all(), expected)


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_a_job_that_failed_goes_on_with_the_rows_that_it_has_not_written(
    model: Path, expected: list[list[int] | None], rows: str, tmp_path: Path
) -> None:
    """Ray's own checkpoints."""
    import ray
    from ray.data import DataContext
    from ray.data.checkpoint import CheckpointConfig

    asked, fails, out = tmp_path / "asked", tmp_path / "fails", tmp_path / "out"
    fails.touch()

    def note(row: dict[str, Any]) -> dict[str, Any]:
        with asked.open("a") as file:
            file.write(f"{row['id']}\n")
        return row

    def fail_late(row: dict[str, Any]) -> dict[str, Any]:
        if fails.exists() and row["id"] == NUM_ROWS - 1:
            deadline = time.monotonic() + WAIT_S
            while not list(out.glob("*.parquet")) and time.monotonic() < deadline:
                time.sleep(0.1)
            raise ValueError("a job that fails")
        return row

    context = DataContext.get_current()
    context.checkpoint_config = CheckpointConfig(id_column="id", checkpoint_path=str(tmp_path / "checkpoint"))
    try:
        process = processor_of(model, preprocess=note, postprocess=fail_late)
        with pytest.raises(Exception, match="a job that fails"):
            process(ray.data.read_parquet(rows)).write_parquet(str(out))
        num_written = pq.read_table(out).num_rows
        assert 0 < num_written < NUM_ROWS
        asked.unlink()
        fails.unlink()
        process(ray.data.read_parquet(rows)).write_parquet(str(out))
    finally:
        context.checkpoint_config = None
    assert len(asked.read_text().splitlines()) == NUM_ROWS - num_written
    check(pq.read_table(out).to_pylist(), expected)


@pytest.mark.long
def test_an_actor_ends_with_an_engine_that_is_not_started_again(model: Path, expected: list[list[int] | None]) -> None:
    """Else all its further rows would be errors."""
    del expected  # which makes the model
    script = f"""
import os, signal, pyarrow as pa
from tests.library.helpers.engine_scripts import launcher_of
from tokasaurus.library import engine
from tokasaurus.ray.data import MapRows
engine.MAX_RESTARTS = 0
answer = MapRows({TINY_FLAGS | {"model": str(model)}!r}, {{"prompt": "{{question}}"}})
rows = pa.table({{"question": ["a", "b"]}})
print(answer(rows)["error"].null_count, flush=True)
os.kill(launcher_of(answer._llm._llm._engine), signal.SIGKILL)
answer(rows)
print("goes on")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (1, "2\n"), done.stderr
    assert "died again after 0 restarts" in done.stderr


@pytest.mark.long
def test_an_actor_answers_every_row_of_a_block(model: Path, expected: list[list[int] | None]) -> None:
    """What Ray calls, without a cluster."""
    from tokasaurus.ray.data import MapRows

    arguments = {"prompt": "{question}:", "columns": ["token_ids"]}
    sampling = Sampling(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    actor = MapRows({**TINY_FLAGS, "model": str(model)}, {**arguments, "sampling": sampling})
    rows = pa.table({"id": range(NUM_ROWS), "question": [question(number) for number in range(NUM_ROWS)]})
    check(actor(rows).to_pylist(), expected)


def test_columns_that_are_null_keep_their_types() -> None:
    """Else the files that blocks are written to could not be read together."""
    from tokasaurus.ray.data import apply_to_table

    table = pa.table({"id": [1, 2], "error": pa.array([None, None], pa.string()), "ids": pa.array([[1], None])})
    made = apply_to_table(lambda row: {**row, "twice": 2 * row["id"], "ids": None, "id": str(row["id"])}, table)
    expected = {
        "id": pa.array(["1", "2"]),
        "error": pa.array([None, None], pa.string()),
        "ids": pa.array([None, None], pa.list_(pa.int64())),
        "twice": [2, 4],
    }
    assert made == pa.table(expected)
    assert apply_to_table(lambda row: {"a": row["id"]} if row["id"] == 1 else {}, table) == pa.table({"a": [1, None]})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"output": "out"}, "output"),
        ({"prompt": None}, "prompt= or messages="),
        ({"messages": "question"}, "prompt= or messages="),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_starts(arguments: dict[str, Any], said: str) -> None:
    from tokasaurus.ray import build_processor

    with pytest.raises(TypeError, match=said):
        build_processor({}, **{"prompt": "{question}", **arguments})
