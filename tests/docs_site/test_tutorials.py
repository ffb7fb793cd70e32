"""The tutorials of docs, run as printed, against a real server.

With the demo model, texts are those of the page. With a tiny one, which needs no download, words and figures are
others; commands, programs and the form of what they print are the same.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.docs_site.helpers.tutorial import ROOT, Tutorial, server_flags
from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka
from tokasaurus.checkpoint import resolve_checkpoint, with_safetensors

SERVE = ROOT / "docs" / "tutorial_serve.md"
DATASET = ROOT / "docs" / "tutorial_dataset.md"
ROLLOUTS = ROOT / "docs" / "tutorial_rollouts.md"
SMALL = ("kv_cache_num_tokens=16384", "max_tokens_per_forward=64", "max_seqs_per_forward=64")
FLAGS = ("dtype=float32", "rl=T")
NUM_ROWS = 40
NUM_TOKENS = 48
"""Of an answer in place of 6: a tiny model would have answered all questions before it is killed."""
SAID_BY_SERVE = (
    "SmolLM2-135M-Instruct",
    ", the city of Nova Haven was a thriving metropolis, with towering skyscrapers and bustling streets. But as the "
    "years went by",
    *("The capital of Germany is Berlin.", "The capital of Japan is Tokyo.", "The capital of France is Paris."),
    *("4 lines completed", "The capital of Egypt is Cairo.", "' Berlin'", "' Hamburg'"),
)
SAID_BY_DATASET = ("=  122 expected", "=  98 expected", "=  127 expected")


@pytest.fixture(scope="module")
def tiny_server(model: Path) -> Iterator[TokaProcess]:
    """Shared by the pages: `rl=T` adds routes."""
    with running_toka(f"model={model}", *FLAGS, *SMALL) as process:
        yield process
        assert process.stop() == 0


def tutorial(page: Path, folder: Path, toka: TokaProcess, said: tuple[str, ...] | None = None) -> Tutorial:
    return Tutorial(page, folder, toka.port, toka.lines, {"TOKA_PORT": str(toka.port)}, said)


def without_engine(toka: TokaProcess, code: str) -> str:
    """Programs of the data set's page ask the server in place of an engine of their own."""
    code = code.replace("max_tokens=6", f"max_tokens={NUM_TOKENS}").replace("import LLM,", "import Client,")
    code = code.replace("toka map ", f"toka map base_url={toka.url}/v1 ")
    return re.sub(r"LLM\(.*show=False\)", f"Client({toka.url!r})", code)


def has_some_rows(folder: Path) -> bool:
    """At least three are done."""
    return sum(len(path.read_bytes().splitlines()) for path in folder.glob("answers.toka/journal-*")) >= 3


def assert_answered(folder: Path) -> None:
    """Each row once, though the job was killed."""
    rows = pq.read_table(folder / "answers").to_pylist()
    assert sorted(row["id"] for row in rows) == list(range(NUM_ROWS))
    assert {len(row["answer"]) for row in rows} == {16}


@pytest.mark.long
def test_serve_and_ask(demo_model: TokaProcess, tmp_path: Path) -> None:
    assert server_flags(SERVE) == {"dtype=float32"}, "the flags of the server that tests share"
    tutorial(SERVE, tmp_path, demo_model).run()


@pytest.mark.long
def test_serve_and_ask_with_a_tiny_model(tiny_server: TokaProcess, tmp_path: Path) -> None:
    tutorial(SERVE, tmp_path, tiny_server, SAID_BY_SERVE).run()


@pytest.mark.long
def test_a_data_set_with_a_tiny_model(tiny_server: TokaProcess, tmp_path: Path) -> None:
    run = tutorial(DATASET, tmp_path, tiny_server, SAID_BY_DATASET)
    run.change = partial(without_engine, tiny_server)
    run.is_time_to_kill = has_some_rows
    run.run()
    assert_answered(tmp_path)


@pytest.mark.long
def test_a_data_set(tmp_path: Path) -> None:
    """As printed: each program has an engine of its own."""
    Tutorial(DATASET, tmp_path, is_time_to_kill=has_some_rows).run()
    assert_answered(tmp_path)


@pytest.mark.long
def test_rollouts_with_a_tiny_model(model: Path, tiny_server: TokaProcess, tmp_path: Path) -> None:
    assert server_flags(ROLLOUTS) == set(FLAGS)
    run = tutorial(ROLLOUTS, tmp_path, tiny_server, ())
    run.environment["MODEL"] = str(model)
    run.run()


@pytest.mark.long
def test_rollouts(tmp_path: Path) -> None:
    directory = with_safetensors(resolve_checkpoint(None).directory)
    with running_toka(f"model={directory}", *server_flags(ROLLOUTS), "kv_cache_num_tokens=16384") as toka:
        run = tutorial(ROLLOUTS, tmp_path, toka)
        run.environment["MODEL"] = str(directory)
        run.run()
