"""The longest request that a server accepts, and what errors say, where each of three limits is the smallest."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.helpers.batch_client import BatchClient
from tests.end_to_end.helpers.toka_process import running_toka
from tests.helpers.examples import few

ROUTES = ("/v1/completions", "/v1/chat/completions")
PROMPT = "a" * 20


def body_of(route: str, **fields: Any) -> dict[str, Any]:
    asked = {"prompt": PROMPT} if route == ROUTES[0] else {"messages": [{"role": "user", "content": PROMPT}]}
    return {"model": "default", "ignore_eos": True, "temperature": 0, **asked, **fields}


def in_bulk(client: httpx.Client, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    line = json.dumps({"custom_id": "1", "url": route, "body": body})
    answer = client.post("/v1/bulk", content=line, headers={"content-type": "application/x-ndjson"})
    response = json.loads(answer.text)["response"]
    return response["status_code"], response["body"]


def in_batch(url: str, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    batches = BatchClient(url)
    line = json.dumps({"custom_id": "1", "method": "POST", "url": route, "body": body})
    batch_id = batches.create(route, batches.upload(line.encode()))["id"]
    (result,) = batches.results(batches.wait(batch_id, ("completed",), timeout_s=60))
    return result["response"]["status_code"], result["response"]["body"]


# The model's context is 512 tokens.
@few(
    1,
    ("flags", "longest", "words", "others"),
    [
        (
            ("kv_cache_num_tokens=2048", "max_num_tokens_per_request=100"),
            *(100, "by its flag max_num_tokens_per_request=", ["kv_cache_num_tokens"]),
        ),
        (("kv_cache_num_tokens=2048",), 512, "is 512 tokens (context", ["kv_cache_num_tokens", "max_num_tokens"]),
        (
            ("kv_cache_num_tokens=240", "max_num_tokens_per_request=400"),
            *(240, "which its flag kv_cache_num_tokens= sets", ["max_num_tokens_per_request"]),
        ),
    ],
)
@pytest.mark.long
def test_the_longest_request_is_served_and_one_token_more_blames_the_limit(
    model: Path, tmp_path: Path, flags: tuple[str, ...], longest: int, words: str, others: list[str]
) -> None:
    common = ("dtype=float32", "cpu_isa=torch", "max_tokens_per_forward=256", "max_seqs_per_forward=4")
    with (
        running_toka(f"model={model}", f"data_dir={tmp_path}", *common, *flags) as toka,
        httpx.Client(base_url=toka.url, timeout=120) as client,
    ):
        shortened = [line for line in toka.lines if "which kv_cache_num_tokens= sets" in line]
        assert len(shortened) == (longest == 240)
        if shortened:
            assert "may have 240 tokens" in shortened[0]
            assert "not 400" in shortened[0]
        (listed,) = client.get("/v1/models").json()["data"]
        assert listed["max_model_len"] == client.get("/v1/models/default").json()["max_model_len"] == longest
        tokenized = client.post("/tokenize", json={"model": "default", "prompt": PROMPT}).json()
        assert tokenized["max_model_len"] == longest
        for route in ROUTES:
            usage = client.post(route, json=body_of(route, max_tokens=1)).raise_for_status().json()["usage"]
            room = longest - usage["prompt_tokens"]
            answer = client.post(route, json=body_of(route, max_tokens=room)).raise_for_status().json()
            assert answer["usage"]["total_tokens"] == longest
            asked = body_of(route, max_tokens=room + 1)
            too_long = body_of(route, **{"prompt": "a" * longest} if route == ROUTES[0] else {})
            if route == ROUTES[1]:
                too_long["messages"] = [{"role": "user", "content": "a" * longest}]
            huge = json.loads(json.dumps(too_long).replace("a" * longest, "a" * 100_000))
            single = [client.post(route, json=body) for body in (asked, too_long, huge, {**asked, "stream": True})]
            refused = [(answer.status_code, answer.json()) for answer in single]
            refused += [in_bulk(client, route, asked), in_batch(toka.url, route, asked)]
            for status, refusal in refused:
                error = refusal["error"]
                assert (status, error["code"]) == (400, "context_length_exceeded")
                assert error["message"].startswith(f"this model's maximum context length is {longest} tokens")
                assert words in error["message"]
                assert not any(other in error["message"] for other in others)
