"""Results are merged into the order of the input."""

import hashlib
import json
import random
from io import BytesIO
from pathlib import Path

import pytest

from tests.batch_command.helpers.request_lines import request_line
from tests.helpers.examples import seeds
from tokasaurus.batch_command.errors import CommandError
from tokasaurus.batch_command.outcome import Outcome
from tokasaurus.batch_command.results import OutputFile, merge_results


def result(custom_id: str) -> bytes:
    return json.dumps({"custom_id": custom_id, "response": {"body": f"of {custom_id}"}}).encode()


def merge(tmp_path: Path, asked: list[str], *files: bytes, is_complete: bool = True) -> tuple[bytes, str]:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(request_line(custom_id) for custom_id in asked))
    with OutputFile(tmp_path / "out.jsonl", "batch_1") as output:
        digest = merge_results(source, [BytesIO(file) for file in files], output, Outcome(), is_complete)
        output.commit()
    return (tmp_path / "out.jsonl").read_bytes(), digest


def test_line_ends_that_another_server_has_left_in_are_escaped(tmp_path: Path) -> None:
    line = json.dumps({"custom_id": "a\u2028", "response": "\u2029\x85"}, ensure_ascii=False).encode()
    written, _ = merge(tmp_path, ["a\u2028"], line)
    assert len(written.decode().splitlines()) == 1
    assert json.loads(written) == json.loads(line)


@pytest.mark.parametrize("seed", seeds(10))
def test_any_order_in_any_file_becomes_the_order_of_the_input(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    asked = [f"é{chance.getrandbits(40)}" for _ in range(chance.randint(1, 200))]
    shuffled = chance.sample(asked, len(asked))
    cut = chance.randint(0, len(asked))
    files = [b"\n".join(map(result, part)) for part in (shuffled[:cut], shuffled[cut:])]
    written, digest = merge(tmp_path, asked, *files, b"\r\n")
    assert written == b"".join(result(custom_id) + b"\n" for custom_id in asked)
    assert digest == hashlib.sha256(written).hexdigest()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([result("a")], "no result of the line with the custom_id 'b'"),
        ([result("a") + b"\n" + result("b"), result("a")], "two results of the line with the custom_id 'a'"),
        ([b"\n".join(map(result, "abc"))], "a result of 'c', which is no custom_id of the input"),
        ([b"{}"], "a line of the server's results has no custom_id"),
        ([b"{"], "a line of the server's results has no custom_id"),
    ],
)
def test_without_exactly_one_result_for_each_line_there_is_no_output(
    tmp_path: Path, files: list[bytes], message: str
) -> None:
    with pytest.raises(CommandError, match=message):
        merge(tmp_path, ["a", "b"], *files)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_an_incomplete_batch_gives_the_results_there_are_in_the_order_of_the_input(tmp_path: Path) -> None:
    files = result("d") + b"\n" + result("a"), result("c")
    written, _ = merge(tmp_path, ["a", "b", "c", "d"], *files, is_complete=False)
    assert written == b"".join(result(custom_id) + b"\n" for custom_id in "acd")


def test_no_file_of_the_users_is_touched_before_the_commit_and_a_killed_run_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    precious = tmp_path / "out.jsonl.part"
    for file in (path, precious):
        file.write_bytes(b"precious")
    OutputFile(path, "batch_1").write(b"killed here")
    with OutputFile(path, "batch_1") as output:
        output.write(b"not committed")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {
        "out.jsonl": b"precious",
        "out.jsonl.part": b"precious",
    }
