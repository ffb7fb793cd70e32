"""`toka batch` with a server of its own: whole processes, which are interrupted, killed and started again."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.commands.batch.helpers.request_lines import read_results, text_of
from tests.end_to_end.helpers.batch_client import FINAL_STATUSES, BatchClient
from tests.end_to_end.helpers.batch_command import FLAGS, BatchCommand, processes_below
from tests.end_to_end.helpers.toka_process import running_toka
from tests.helpers.examples import IS_NIGHTLY
from tests.helpers.processes import assert_all_end

NUM_LINES, NUM_TOKENS = (60 if IS_NIGHTLY else 40), 40


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """(custom id, text) of each line of the output of a run."""
    directory = tmp_path_factory.mktemp("undisturbed")
    command = BatchCommand(model, directory, NUM_LINES, NUM_TOKENS)
    code, output = command.run()
    assert code == 0, output
    num_tokens = f"{NUM_LINES * NUM_TOKENS:,}"
    cut = rf"\({NUM_LINES} cut by length\)"
    assert re.search(rf"^{NUM_LINES} lines completed {cut}, 0 failed, {num_tokens} tokens, ", output, re.MULTILINE)
    assert output.splitlines()[-1] == f"the results are in {command.output}"
    assert re.search(r"^ *toka +find model +[\d.]+ s", output, re.MULTILINE)
    assert re.search(r"^ready: unix:\S+ serves \S+; KV cache ", output, re.MULTILINE)
    assert sorted(path.name for path in directory.iterdir()) == ["in.jsonl", "out.jsonl"]
    return texts(command)


def texts(command: BatchCommand) -> list[tuple[str, str]]:
    return [(result["custom_id"], text_of(result)) for result in read_results(command.output)]


def test_the_output_has_the_order_of_the_input(undisturbed: list[tuple[str, str]]) -> None:
    assert [custom_id for custom_id, _ in undisturbed] == [f"c{index}" for index in range(NUM_LINES)]
    assert len({text for _, text in undisturbed}) > NUM_LINES // 2  # short random texts may be equal


@pytest.mark.long
def test_an_interrupted_and_killed_run_ends_as_an_undisturbed_one(
    model: Path, tmp_path: Path, undisturbed: list[tuple[str, str]]
) -> None:
    command = BatchCommand(model, tmp_path, NUM_LINES, NUM_TOKENS)
    stored: dict[str, bytes] = {}
    for victim, number, code, words in (
        ("command", signal.SIGINT, 130, "the same command continues where it was"),
        ("command", signal.SIGKILL, -signal.SIGKILL, ""),
        ("server", signal.SIGKILL, 1, "the server has ended: killed by signal 9"),
    ):
        process = command.start()
        command.wait_for_results(len(stored) + 1)
        pids = processes_below(process.pid)
        command.wait_for_results(len(stored) + 6)
        assert len(pids) >= 4  # launcher, server, manager, worker
        os.kill(process.pid if victim == "command" else pids[0], number)
        output, _ = process.communicate(timeout=90)
        assert process.returncode == code
        assert words in output
        assert_all_end(pids, within_s=30)
        before, stored = stored, command.results()
        assert before.items() <= stored.items()
        assert len(stored) < NUM_LINES
        assert not command.output.exists()
    assert f"in_progress  {len(stored)} of {NUM_LINES} lines done, 0 failed" in command.of_stored("list")

    content = command.source.read_bytes()
    command.source.write_bytes(content + b"\n")
    code, output = command.run()
    assert (code, "was changed since its batch was begun" in output) == (1, True)
    command.source.write_bytes(content)

    code, output = command.run()
    assert code == 0, output
    told = re.search(rf"^continuing \w+: (\d+) of {NUM_LINES} lines are done already$", output, re.MULTILINE)
    assert told is not None
    assert len(stored) <= int(told[1]) <= NUM_LINES  # the refused run may have done more
    lines = {json.loads(line)["custom_id"]: line for line in command.output.read_bytes().splitlines(keepends=True)}
    assert stored.items() <= lines.items()  # ids of answers are random: a line that ran again would have others
    assert texts(command) == undisturbed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.long
def test_a_run_is_cancelled_over_its_data_directory(model: Path, tmp_path: Path) -> None:
    num_lines = 400
    command = BatchCommand(model, tmp_path, num_lines, 200)  # minutes, were it not cancelled
    process = command.start()
    command.wait_for_results(3)
    batch_id = command.of_stored("list").split()[0]
    assert command.of_stored("cancel", batch_id) == f"{batch_id} is cancelling\n"
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 1
    assert f"toka batch: {batch_id} is cancelled, with " in output
    partial = tmp_path / "out.jsonl.partial"
    assert f"; its results are in {partial}; delete {command.data_dir} to begin again" in output
    results = read_results(partial)
    assert [result["custom_id"] for result in results] == [f"c{index}" for index in range(num_lines)]
    assert sum(result["error"] is None for result in results) >= 3
    shown = json.loads(command.of_stored("show", batch_id, "json=T"))
    assert shown["status"] == "cancelled"
    assert sum(shown["request_counts"][kind] for kind in ("completed", "failed")) == num_lines
    assert not command.output.exists()


@pytest.mark.long
def test_progress_counts_tokens_of_lines_that_run_and_expects_what_they_will_have(model: Path, tmp_path: Path) -> None:
    """Lines end at max_tokens, so the expectation is exact before one of them has ended."""
    num_lines, num_tokens = 12, 250
    command = BatchCommand(model, tmp_path, num_lines, num_tokens)
    with running_toka(f"model={model}", f"data_dir={tmp_path / 'data'}", *FLAGS) as toka:
        batches = BatchClient(toka.url)
        batch_id = batches.create("/v1/completions", batches.upload(command.source.read_bytes()))["id"]
        views = []
        while (batch := batches.read(batch_id))["status"] not in FINAL_STATUSES:
            views.append(batch)
            time.sleep(0.02)
    generated = [batch["progress"]["generated_tokens"] for batch in views if "progress" in batch]
    finished = [batch["usage"]["output_tokens"] for batch in views if "progress" in batch]
    expected = {
        batch["progress"]["expected_tokens"] for batch in views if "expected_tokens" in batch.get("progress", {})
    }
    assert expected == {num_lines * num_tokens}
    assert any(0 == done < tokens < num_tokens * 4 for done, tokens in zip(finished, generated, strict=True))
    assert all(done <= tokens <= num_lines * num_tokens for done, tokens in zip(finished, generated, strict=True))
    assert "progress" not in batch
    assert batch["usage"]["output_tokens"] == num_lines * num_tokens


def test_a_server_that_cannot_start_is_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = BatchCommand(tmp_path / "absent", tmp_path, NUM_LINES, NUM_TOKENS)
    code, output = command.run()
    assert code == 2
    assert output.splitlines()[-1].startswith("toka batch: the server did not start: ")
    assert str(tmp_path / "absent") in output.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
