"""A client of files and batches, over OpenAI's API, and the input files that it sends."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from tokasaurus.commands.bench.client import UNREACHABLE, ServerError
from tokasaurus.commands.bench.workloads import DATA, OfferedRequest, load_jsonl

ENDPOINT = "/v1/completions"
_POLL_S = 0.05
_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class BatchClient:
    """Create it with `open_batch_client`. All methods raise ServerError if the server fails or cannot be reached."""

    session: aiohttp.ClientSession
    base_url: str
    """Up to and including /v1."""

    async def upload(self, path: Path) -> str:
        """The file's id."""
        with path.open("rb") as content:
            form = aiohttp.FormData({"purpose": "batch"})
            form.add_field("file", content, filename=path.name)
            return str((await self._ask("POST", "/files", data=form))["id"])

    async def create(self, file_id: str) -> str:
        """The batch's id."""
        body = {"endpoint": ENDPOINT, "input_file_id": file_id, "completion_window": "24h"}
        return str((await self._ask("POST", "/batches", json=body))["id"])

    async def read(self, batch_id: str) -> dict[str, Any]:
        return await self._ask("GET", f"/batches/{batch_id}")

    async def cancel(self, batch_id: str) -> None:
        await self._ask("POST", f"/batches/{batch_id}/cancel")

    async def wait(self, batch_id: str, status: str) -> dict[str, Any]:
        """The batch, when it has this status."""
        while (batch := await self.read(batch_id))["status"] != status:
            if batch["status"] not in ("validating", "in_progress", "finalizing", "cancelling"):
                raise ServerError(f"the batch is {batch['status']}: {batch.get('errors')}")
            await asyncio.sleep(_POLL_S)
        return batch

    async def num_lines(self, file_id: str) -> int:
        """Lines of a file."""
        async with self.session.get(f"{self.base_url}/files/{file_id}/content") as answer:
            return sum([part.count(b"\n") async for part in answer.content.iter_any()])

    async def _ask(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        try:
            async with self.session.request(method, f"{self.base_url}{path}", **arguments) as answer:
                text = await answer.read()
        except UNREACHABLE as error:
            raise ServerError(f"{path}: {error!r}") from None
        if answer.status != 200:
            raise ServerError(f"{path}: HTTP {answer.status}: {text[:300].decode(errors='replace')}")
        value: dict[str, Any] = orjson.loads(text)
        return value


@asynccontextmanager
async def open_batch_client(base_url: str) -> AsyncIterator[BatchClient]:
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield BatchClient(session, base_url)


def write_requests(path: Path, requests: Sequence[OfferedRequest], model: str, cache_salt: str) -> None:
    """The requests as an input file. They share cached prompts only with requests of the same cache_salt."""
    with path.open("wb") as file:
        for number, request in enumerate(requests):
            body = {
                "model": model,
                **request.content,
                "n": request.num_samples,
                "max_tokens": request.max_tokens,
                "temperature": request.temperature,
                "ignore_eos": request.ignore_eos,
                "cache_salt": cache_salt,
            }
            line = {"custom_id": str(number), "method": "POST", "url": ENDPOINT, "body": body}
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def write_large_file(path: Path, num_lines: int, num_words: int) -> None:
    """Lines that ask for one token each, so that results come soon. num_words: of each prompt, five bytes each."""
    words = " ".join(line["question"] for line in load_jsonl(DATA / "gsm8k_test_200.jsonl")).split()
    rng = random.Random(0)
    with path.open("wb", buffering=1 << 20) as file:
        for number in range(num_lines):
            prompt = f"Story {number}: {' '.join(rng.choices(words, k=num_words))}"
            body = {"model": "default", "prompt": prompt, "max_tokens": 1}
            line = {"custom_id": f"line {number}", "method": "POST", "url": ENDPOINT, "body": body}
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
