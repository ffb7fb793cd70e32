"""The programs in examples/, run as a user runs them, and those in docs/library.md; on the demo model."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nbclient import NotebookClient

from tests.end_to_end.helpers.toka_process import TokaProcess
from tests.helpers.processes import assert_all_end
from tests.helpers.tiny_model import save_tiny_model
from tokasaurus import AsyncClient, Client, Sampling

FOLDER = Path(__file__).parents[2] / "examples"
GONE_S = 2.0


@pytest.fixture
def toka(demo_model: TokaProcess) -> TokaProcess:
    return demo_model


def run_example(name: str, *arguments: object) -> list[str]:
    """The lines that it prints."""
    command = [sys.executable, str(FOLDER / name), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent), "PYTHONUTF8": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.mark.long
def test_best_of_n(toka: TokaProcess) -> None:
    lines = run_example("best_of_n.py", "--questions", 4, "--n", 4, "--url", toka.url)
    shown = dict(re.fullmatch(r"(.*?) +([\d.]+)%", line).groups() for line in lines)  # type: ignore[union-attr]
    assert list(shown) == ["pass@1", "pass@2", "pass@4", "majority", "most likely"]
    values = [float(shown[f"pass@{k}"]) for k in (1, 2, 4)]
    assert values == sorted(values)
    assert values[-1] in (0, 25, 50, 75, 100)


@pytest.mark.long
def test_rl_in_100_lines(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    arguments = ("--model", tmp_path, "--steps", 2, "--prompts", 2, "--layers", 1)
    lines = run_example("rl_in_100_lines.py", *arguments)
    steps = [re.fullmatch(r"step (\d): mean reward (0\.\d+|1\.000), weights (\d), [\d.]+ s", line) for line in lines]
    assert [(step[1], step[3]) for step in steps if step] == [("1", "1"), ("2", "2")]
    assert len((FOLDER / "rl_in_100_lines.py").read_text().splitlines()) <= 100


@pytest.mark.long
def test_synthetic_data(toka: TokaProcess, tmp_path: Path) -> None:
    output = tmp_path / "people.jsonl"
    lines = run_example("synthetic_data.py", "--rows", 3, "--output", output, "--url", toka.url)
    people = [json.loads(line) for line in output.read_text().splitlines()]
    counts = re.fullmatch(r"(\d+) written, (\d+) duplicates, (\d+) failed", lines[-1])
    assert counts is not None
    assert sum(map(int, counts.groups())) == 3
    assert len(people) == int(counts[1]) > 0
    for person in people:
        assert list(person) == ["name", "age", "profession", "saying"]
        assert re.fullmatch(r"[A-Z][a-z]+ [A-Z][a-z]+", person["name"])
        assert 18 <= person["age"] <= 90


def test_classify(toka: TokaProcess) -> None:
    lines = run_example("classify.py", "--url", toka.url)
    assert len(lines) == 9
    assert re.fullmatch(r"negative  9\d%  The plot is dull and the actors are bored\.", lines[1])
    assert lines[-1] == "7 of 8 as expected"


def test_evaluate(toka: TokaProcess) -> None:
    lines = run_example("evaluate.py", "--questions", 3, "--url", toka.url)
    assert lines[1:3] == [
        "France     Paris      right  The capital of France is Paris.",
        "Turkey     Ankara     wrong  The capital of Turkey is Istanbul.",
    ]
    # Wilson's interval of 2 of 3, from a table
    assert lines[-1] == "2 of 3, 66.7% right; 95 % interval 20.8% to 93.9%"


def test_programs_of_the_library_page_print_what_it_says(
    toka: TokaProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a client in place of an engine; the line of flags is not run."""
    page = (FOLDER.parent / "docs" / "library.md").read_text().partition("## Reference")[0]
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("questions").mkdir()
    pq.write_table(pa.table({"id": [1, 2], "question": ["a", "b"]}), "questions/first.parquet")
    with Client(toka.url) as client:
        names = {"llm": client, "Client": Client, "AsyncClient": AsyncClient, "Sampling": Sampling}
        not_run = []
        for block in blocks:
            if "= LLM(" in block:
                not_run.append(block)
                continue
            code = block.replace("AsyncLLM() as", "AsyncClient() as").replace("LLM() as llm", "Client() as started")
            code = code.replace("results = llm.chat([[", "results = started.chat([[")
            code = code.replace("Client()", f"Client({toka.url!r})").replace("http://127.0.0.1:10210", toka.url)
            code = code.replace("temperature=0.7))", "temperature=0.7, max_tokens=8))")  # of 256
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, names)
            said = re.findall(r"^ *print\(.*\)  # (.*)$", block, flags=re.MULTILINE)
            assert printed.getvalue().splitlines()[: len(said)] == said, block
        assert len(not_run) == 1
    answered = pq.read_table("answers")
    assert answered.column_names == ["id", "question", "answer", "finish_reason", "error"]
    assert [len(answer) for answer in answered["answer"].to_pylist()] == [4, 4]


def read_notebook() -> Any:
    return nbformat.read(FOLDER / "notebook.ipynb", as_version=4)


def run_notebook(notebook: Any) -> dict[str, str]:
    """Cells and what each shows."""
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    return {cell.source: shown_by(cell) for cell in notebook.cells if cell.cell_type == "code"}


def shown_by(cell: Any) -> str:
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)


@pytest.fixture
def _imports_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))


@pytest.mark.usefixtures("_imports_this_package")
@pytest.mark.long
def test_notebook_on_a_server(toka: TokaProcess) -> None:
    """Its cells, with a client in place of an engine, show what is stored beside them."""
    notebook = read_notebook()
    stored = {cell.source: shown_by(cell) for cell in notebook.cells if cell.cell_type == "code"}
    first = notebook.cells[1]
    assert first.source.startswith("from tokasaurus import LLM, Sampling\n\nllm = LLM()")
    first.source = f"from tokasaurus import Client, Sampling\nllm = Client({toka.url!r})"
    shown = run_notebook(notebook)
    greedy = [source for source in stored if "temperature=0)" in source]
    assert len(greedy) == 1
    assert shown[greedy[0]] == stored[greedy[0]] == "'The capital of Germany is Berlin.'"
    assert list(shown)[1:] == list(stored)[1:]


@pytest.mark.long
@pytest.mark.usefixtures("_imports_this_package")
@pytest.mark.parametrize("is_killed", [False, True])
def test_no_process_is_left_of_a_notebook(is_killed: bool) -> None:
    """Without its last cell, which closes the engine: its kernel ends, or is killed."""
    notebook = read_notebook()
    assert notebook.cells.pop().source == "llm.close()"
    client = NotebookClient(notebook, timeout=300, kernel_name="python3")
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        kernel = psutil.Process(client.km.provisioner.pid)
        processes = kernel.children(recursive=True)
        names = {process.name() for process in processes}
        assert {"toka-server", "toka-manager", "toka-worker-0"} <= names
        directory = Path(re.findall(r"ready: unix:(\S+)/socket", shown_by(notebook.cells[1]))[0])
        assert directory.exists()
        assert "\x1b" not in shown_by(notebook.cells[1])
        assert " INFO " not in shown_by(notebook.cells[1])
        if is_killed:
            kernel.send_signal(signal.SIGKILL)
            assert_all_end([process.pid for process in processes], GONE_S)
    assert_all_end([process.pid for process in processes], GONE_S)
    deadline = time.monotonic() + GONE_S
    while directory.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.long
@pytest.mark.parametrize("name", ["best_of_n.py", "synthetic_data.py", "classify.py", "evaluate.py"])
def test_examples_without_a_server(name: str, tmp_path: Path) -> None:
    arguments = {
        "best_of_n.py": ("--questions", 2, "--n", 2),
        "synthetic_data.py": ("--rows", 2, "--output", tmp_path / "people.jsonl"),
        "classify.py": ("--texts", 2),
        "evaluate.py": ("--questions", 2),
    }
    assert run_example(name, *arguments[name])
