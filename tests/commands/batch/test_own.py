"""The batch of a run without `base_url=`: stored by the command, run by processes that are not started here."""

import os
import sys
from pathlib import Path
from typing import cast

import pytest

from tests.commands.batch.helpers.request_lines import COMPLETIONS, request_line, write_requests
from tokasaurus.commands.batch.errors import CommandError, InputRefused
from tokasaurus.commands.batch.input_file import InputLimits, fingerprint
from tokasaurus.commands.batch.own import OwnBatch, OwnServer, store_batch
from tokasaurus.messages.status import BatchTokens
from tokasaurus.server.jobs.store.ledger import pending_lines, record_results
from tokasaurus.server.jobs.store.records import LineResult
from tokasaurus.server.jobs.store.store import open_store

LIMITS = InputLimits((COMPLETIONS,), 30_000, 1000)
NUM_LINES = 25_000
"""More than one transaction stores."""


class IdleServer:
    """Stands in for the processes."""

    tokens = BatchTokens(70, 500)

    def wait(self, seconds: float) -> None: ...


def store(root: Path, source: Path, max_bytes: int = 1 << 30) -> str:
    return store_batch(root, source, str(source), LIMITS, max_bytes, "2h")


def open_batch(root: Path, batch_id: str, source: Path) -> OwnBatch:
    batch = OwnBatch(root, batch_id, source, fingerprint(source))
    batch.run_by(cast(OwnServer, IdleServer()))
    return batch


def test_each_line_is_stored_with_its_place_in_the_input(tmp_path: Path) -> None:
    source, root = write_requests(tmp_path / "in.jsonl", NUM_LINES), tmp_path / "run"
    store(root, write_requests(tmp_path / "other.jsonl", 3))  # a call that was killed before its batch was written down
    batch_id = store(root, source)
    batch = open_batch(root, batch_id, source)
    view = batch.view()
    assert (view.status, view.num_lines, view.completion_window) == ("in_progress", NUM_LINES, "2h")
    assert (view.num_generated, view.num_expected, view.has_results) == (70, 500, False)
    with open_store(root, "a server") as opened:
        database = opened.database
        lines = database.submit(lambda connection: pending_lines(connection, 1, 0, 2 * NUM_LINES)).result()
        content = opened.data_dir.open_content("file-input").read()
        results = [LineResult(line.number, False, b"%d\n" % line.number, 1, 0, 40) for line in lines[:3]]
        database.submit(lambda connection: record_results(connection, 1, results)).result()
        assert batch.read_results(1) == [b"1\n", b"2\n"]
        assert (batch.view().num_done, batch.view().num_generated) == (3, 120)
    assert [line.custom_id for line in lines] == [f"c{number}" for number in range(NUM_LINES)]
    assert [content[line.start : line.start + line.size] for line in lines] == source.read_bytes().splitlines()
    assert len({line.seed for line in lines}) == NUM_LINES
    batch.close()


def test_an_input_that_is_written_to_or_replaced_by_another_ends_the_run(tmp_path: Path) -> None:
    source, other, root = tmp_path / "in.jsonl", tmp_path / "other.jsonl", tmp_path / "run"
    batch_id = store(root, write_requests(source, 5))
    content = source.read_bytes()
    batch = open_batch(root, batch_id, source)
    other.write_bytes(content)
    other.replace(source)  # as an editor saves a file: its content is the same
    batch.wait(0)
    other.write_bytes(content.replace(b"c3", b"d3"))
    other.replace(source)
    with pytest.raises(CommandError, match="was changed while the batch ran"):
        batch.wait(0)
    batch.close()
    with pytest.raises(CommandError, match="was changed while the batch ran"):
        OwnBatch(root, batch_id, source, fingerprint(write_requests(other, 5)))
    batch = open_batch(root, batch_id, write_requests(source, 5))
    os.utime(source, (1, 1))  # the server cannot know that nothing was written
    with pytest.raises(CommandError, match="was changed while the batch ran"):
        batch.wait(0)
    source.unlink()
    with pytest.raises(CommandError, match="No such file or directory"):
        batch.wait(0)
    batch.close()


def test_an_input_that_the_server_would_refuse_is_not_stored(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(request_line("a") + request_line("a"))
    with pytest.raises(InputRefused, match="line 2: custom_id is also that of line 1"):
        store(tmp_path / "run", source)
    with pytest.raises(InputRefused, match=rf"{source}: has more than 100 bytes \(max_file_bytes\)"):
        store(tmp_path / "run", source, max_bytes=100)


def test_the_server_imports_no_module_of_the_users_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("multiprocessing", "orjson", "queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(77)\n")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    server = OwnServer([f"model={tmp_path}"], tmp_path / "run", 0.0, print)
    with pytest.raises(CommandError, match=f"^the server did not start: .*{tmp_path}"), server:
        pass
