"""A client of files and batches, over OpenAI's API."""

import time
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

FINAL_STATUSES = ("failed", "completed", "cancelled", "expired")
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class BatchClient:
    """All methods raise httpx.TransportError while no server answers, and AssertionError for an error of the server."""

    url: str
    """Of the server, without /v1."""

    def upload(self, content: bytes) -> str:
        """The file's id."""
        files = {"file": ("input.jsonl", content, "application/jsonl")}
        answer = httpx.post(f"{self.url}/v1/files", data={"purpose": "batch"}, files=files, timeout=_TIMEOUT_S)
        return str(_object(answer)["id"])

    def create(self, endpoint: str, file_id: str) -> dict[str, Any]:
        body = {"endpoint": endpoint, "input_file_id": file_id, "completion_window": "24h"}
        return _object(httpx.post(f"{self.url}/v1/batches", json=body, timeout=_TIMEOUT_S))

    def read(self, batch_id: str) -> dict[str, Any]:
        return _object(httpx.get(f"{self.url}/v1/batches/{batch_id}", timeout=_TIMEOUT_S))

    def wait(self, batch_id: str, statuses: tuple[str, ...], timeout_s: float) -> dict[str, Any]:
        """The batch, as soon as it has one of the statuses."""
        deadline_s = time.monotonic() + timeout_s
        while (batch := self.read(batch_id))["status"] not in statuses:
            assert time.monotonic() < deadline_s, batch
            time.sleep(0.05)
        return batch

    def results(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """The lines of its output file, then those of its error file."""
        file_ids = [batch.get(name) for name in ("output_file_id", "error_file_id")]
        contents = [self._content(file_id) for file_id in file_ids if file_id is not None]
        return [orjson.loads(line) for content in contents for line in content.splitlines()]

    def _content(self, file_id: str) -> bytes:
        answer = httpx.get(f"{self.url}/v1/files/{file_id}/content", timeout=_TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        return answer.content


def _object(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value
