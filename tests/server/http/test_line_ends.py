"""No body has a raw line end of Unicode, which readers take for the end of a line or of an event."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS
from tests.server.helpers.fake_engine import FakeEngine, Reply
from tests.server.helpers.live_server import LiveServer, live_server
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.served_model import ServedModel

LINE_ENDS = "\u2028\u2029\x85"
TEXT = f"a{LINE_ENDS}b“{LINE_ENDS * 2}”\\"


def say_line_ends(_request: GenerateRequest, _index: int) -> Reply:
    token_ids = list(TEXT.encode())
    return Reply(token_ids, [-0.5] * len(token_ids))


@pytest.fixture(scope="module")
def server(served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(served_model, FakeEngine(say_line_ends), data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


def check_lines(body: str, num_lines: int) -> list[Any]:
    """The JSON of each line, as a reader sees it that uses str.splitlines()."""
    assert not set(body) & set(LINE_ENDS)
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line]
    assert len(lines) == num_lines or num_lines < 0
    return [json.loads(line) for line in lines if line != "[DONE]"]


FIELDS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": TEXT}),
    (COMPLETIONS, {"prompt": TEXT, "echo": True, "logprobs": 1}),
    (COMPLETIONS, {"prompt": list(TEXT.encode()), "logprobs": 2, "n": 2}),
    (CHAT, {"messages": [{"role": "user", "content": TEXT}]}),
    (CHAT, {"messages": [{"role": "user", "content": TEXT}], "logprobs": True}),
]


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice of either route, whole or streamed."""
    part = choice.get("message", choice.get("delta", choice))
    return str(part.get("content", part.get("text")) or "")


@pytest.mark.parametrize(("path", "fields"), FIELDS)
def test_answers_and_streams(server: LiveServer, path: str, fields: dict[str, Any]) -> None:
    expected = (TEXT if fields.get("echo") else "") + TEXT
    body = {"model": "default", "max_tokens": 100, **fields}
    (whole,) = check_lines(server.http.post(path, json=body).text, 1)
    assert {text_of(choice) for choice in whole["choices"]} == {expected}
    chunks = check_lines(server.http.post(path, json={**body, "stream": True}).text, -1)
    texts = ["".join(text_of(c) for chunk in chunks for c in chunk["choices"] if c["index"] == i) for i in range(2)]
    assert texts[: len(whole["choices"])] == [expected] * len(whole["choices"])


def test_errors(server: LiveServer) -> None:
    body = {"model": f"x{LINE_ENDS}", "prompt": "a"}
    for fields in ({}, {"stream": True}, {f"y{LINE_ENDS}": 1}):
        answer = server.http.post(COMPLETIONS, json=body | fields)
        assert answer.status_code in (400, 404)
        check_lines(answer.text, 1)


def test_bulk(server: LiveServer) -> None:
    bodies = [(path, {"model": "default", **fields}) for path, fields in FIELDS] + [(COMPLETIONS, {"model": TEXT})]
    lines = [{"custom_id": f"{index}{LINE_ENDS}", "url": url, "body": body} for index, (url, body) in enumerate(bodies)]
    content = b"\n".join(orjson.dumps(line) for line in lines)
    results = check_lines(server.http.post("/v1/bulk", content=content).text, len(lines))
    assert sorted(result["custom_id"] for result in results) == [line["custom_id"] for line in lines]


def test_output_and_error_files_of_batches(server: LiveServer, tmp_path: Path) -> None:
    lines = [{"custom_id": f"{n}{LINE_ENDS}", "method": "POST", "url": COMPLETIONS} for n in range(4)]
    bodies = [{"model": "default", "prompt": TEXT}, {"model": TEXT, "prompt": "a"}]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps({**line, "body": bodies[n % 2]}) for n, line in enumerate(lines)))
    with path.open("rb") as content:
        uploaded = server.http.post("/v1/files", data={"purpose": "batch"}, files={"file": (path.name, content)})
    (file,) = check_lines(uploaded.text, 1)
    metadata = {"note": LINE_ENDS}
    new = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h", "metadata": metadata}
    (batch,) = check_lines(server.http.post("/v1/batches", json=new).text, 1)
    deadline = time.monotonic() + 60
    while batch["status"] not in ("completed", "failed"):
        assert time.monotonic() < deadline
        (batch,) = check_lines(server.http.get(f"/v1/batches/{batch['id']}").text, 1)
    assert (batch["status"], batch["metadata"]) == ("completed", metadata)
    for file_id, parity in ((batch["output_file_id"], 0), (batch["error_file_id"], 1)):
        content = server.http.get(f"/v1/files/{file_id}/content").content.decode()
        ids = [result["custom_id"] for result in check_lines(content, 2)]
        assert sorted(ids) == [line["custom_id"] for line in lines[parity::2]]


def test_token_routes(server: LiveServer) -> None:
    (answer,) = check_lines(server.http.post("/detokenize", json={"tokens": list(TEXT.encode())}).text, 1)
    assert answer["prompt"] == TEXT
    check_lines(server.http.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True}).text, 1)
    check_lines(server.http.get("/tokenizer_info").text, 1)
