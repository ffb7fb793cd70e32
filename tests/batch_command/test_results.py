"""Results are merged into the order of the input."""

import hashlib
import json
import random
from io import BytesIO
from pathlib import Path

import pytest

from tests.batch_command.helpers.request_lines import request_line
from tokasaurus.batch_command.errors import CommandError
from tokasaurus.batch_command.results import merge_results
from tokasaurus.server.batches.store.data_dir import NewContent


def result(custom_id: str) -> bytes:
    return json.dumps({"custom_id": custom_id, "response": {"body": f"of {custom_id}"}}).encode()


def merge(tmp_path: Path, asked: list[str], *files: bytes) -> tuple[bytes, str]:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(request_line(custom_id) for custom_id in asked))
    output = NewContent(tmp_path / "out.jsonl")
    try:
        digest = merge_results(source, [BytesIO(file) for file in files], output)
        output.commit()
    finally:
        output.discard()
    return (tmp_path / "out.jsonl").read_bytes(), digest


@pytest.mark.parametrize("seed", range(10))
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
