"""The state of a run: whole or absent, and one process's at a time."""

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from tokasaurus.commands.batch.errors import CommandError
from tokasaurus.commands.batch.state_file import (
    RunState,
    StateFile,
    directory_of_run,
    path_with_base_url,
    path_with_own_server,
)

STATE = RunState(3, "abc", base_url="http://x/v1", file_id="file-1")


@pytest.fixture(params=[path_with_base_url, path_with_own_server])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return request.param(tmp_path / "out.jsonl")


def test_what_is_saved_is_read_again(path: Path) -> None:
    first = StateFile(path)
    assert first.read() is None
    first.save(STATE)
    assert first.read() == STATE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    changed = replace(STATE, batch_id="batch_1", output_sha256="d")
    first.save(changed)
    first.close()
    second = StateFile(path)
    assert second.read() == changed
    assert second.read() == changed
    second.close()
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_one_process_holds_it_also_after_it_has_been_replaced(path: Path) -> None:
    first = StateFile(path)
    for _ in range(2):
        with pytest.raises(CommandError, match="another toka batch is at work on this output"):
            StateFile(path)
        first.save(STATE)
    first.close()
    StateFile(path).close()


def test_removing_it_removes_what_the_run_has_stored_but_nothing_of_the_users(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    directory = directory_of_run(output)
    state_file = StateFile(path_with_own_server(output))
    (directory / "files").mkdir()
    for name in ("files/file-1", "database.sqlite", "mine.txt"):
        (directory / name).touch()
    state_file.remove()
    state_file.close()
    assert [one.name for one in directory.iterdir()] == ["mine.txt"]
    (directory / "mine.txt").unlink()
    StateFile(path_with_own_server(output)).remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"{", b"[]", b"3", b"{}", b'{"unknown": 1}'])
def test_a_damaged_file_is_named(path: Path, content: bytes) -> None:
    StateFile(path).close()
    path.write_bytes(content)
    state_file = StateFile(path)
    with pytest.raises(CommandError, match=r"is damaged, or of another version: delete it to begin again$"):
        state_file.read()
    state_file.close()


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="No such file or directory"):
        StateFile(path_with_own_server(tmp_path / "absent" / "out.jsonl"))
