"""The demo model in its default dtype, under many requests and through the command line."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import httpx
import openai
import orjson
import pytest

from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka, wait_for

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def toka() -> Iterator[TokaProcess]:
    with running_toka(
        "kv_cache_num_tokens=30000", "max_tokens_per_forward=1024", "max_seqs_per_forward=128"
    ) as process:
        yield process
        assert process.stop() == 0


def test_96_chat_requests_over_48_connections_finish_and_free_their_blocks(toka: TokaProcess) -> None:
    blocks_at_start = toka.gauge("toka_kv_blocks_used")
    tokens_at_start = toka.gauge("toka_generation_tokens_total")

    async def ask_all() -> list[openai.types.chat.ChatCompletion]:
        limits = httpx.Limits(max_connections=48, max_keepalive_connections=48)
        async with openai.AsyncOpenAI(
            base_url=f"{toka.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx.AsyncClient(limits=limits, timeout=300),
        ) as client:
            return await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model="default",
                        messages=[{"role": "user", "content": f"Say something about the number {number}."}],
                        max_tokens=8 + number % 9,
                    )
                    for number in range(96)
                )
            )

    answers = asyncio.run(ask_all())
    for number, answer in enumerate(answers):
        assert answer.choices[0].finish_reason in ("stop", "length")
        assert answer.usage is not None
        assert 1 <= answer.usage.completion_tokens <= 8 + number % 9
        if answer.choices[0].finish_reason == "length":
            assert answer.usage.completion_tokens == 8 + number % 9
    assert toka.gauge("toka_kv_blocks_used") == blocks_at_start
    assert toka.gauge("toka_requests_running") == toka.gauge("toka_requests_waiting") == 0
    generated = sum(answer.usage.completion_tokens for answer in answers if answer.usage)
    assert toka.gauge("toka_generation_tokens_total") == tokens_at_start + generated


def test_bulk_lines_are_answered_and_are_cancelled_when_the_client_disconnects(toka: TokaProcess) -> None:
    blocks_at_start = toka.gauge("toka_kv_blocks_used")
    tokens_at_start = toka.gauge("toka_generation_tokens_total")

    def lines(count: int, max_tokens: int) -> bytes:
        bodies = (
            {"model": "default", "prompt": f"{number} is", "max_tokens": max_tokens, "ignore_eos": True}
            for number in range(count)
        )
        return b"\n".join(
            orjson.dumps({"custom_id": f"line {number}", "url": "/v1/completions", "body": body})
            for number, body in enumerate(bodies)
        )

    answer = httpx.post(f"{toka.url}/v1/bulk", content=lines(60, 6) + b"\n{broken", timeout=300)
    results = {result["custom_id"]: result["response"] for result in map(orjson.loads, answer.content.splitlines())}
    assert results.pop(None)["status_code"] == 400
    assert results.keys() == {f"line {number}" for number in range(60)}
    assert {result["body"]["usage"]["completion_tokens"] for result in results.values()} == {6}
    assert toka.gauge("toka_generation_tokens_total") == tokens_at_start + 60 * 6

    content = lines(1, 2).replace(b"line", b"first") + b"\n" + lines(12, 1500)  # all fit in the cache
    with httpx.stream("POST", f"{toka.url}/v1/bulk", content=content, timeout=300) as stream:
        assert orjson.loads(next(stream.iter_lines()))["custom_id"] == "first 0"
    wait_for(lambda: toka.gauge("toka_requests_running") + toka.gauge("toka_requests_waiting") == 0, 60)
    assert toka.gauge("toka_kv_blocks_used") == blocks_at_start


def test_one_token_is_answered_while_thousands_of_another_clients_samples_wait(toka: TokaProcess) -> None:
    many = {"model": "default", "prompt": "Once", "n": 5000, "max_tokens": 6, "ignore_eos": True, "stream": True}
    one = {"model": "default", "prompt": "The", "max_tokens": 1}
    with httpx.stream("POST", f"{toka.url}/v1/completions", json=many, timeout=300) as stream:
        lines = stream.iter_lines()  # closes the connection when it is dropped
        next(lines)
        answer = httpx.post(f"{toka.url}/v1/completions", json=one, timeout=300)
        assert answer.json()["usage"]["completion_tokens"] == 1
        assert toka.gauge("toka_requests_waiting") > 2500
        assert next(lines) is not None
    wait_for(lambda: toka.gauge("toka_requests_running") + toka.gauge("toka_requests_waiting") == 0, 60)


def test_greedy_chat_knows_the_capital_of_germany(toka: TokaProcess) -> None:
    client = openai.OpenAI(base_url=f"{toka.url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": "What is the capital of Germany?"}], temperature=0
    )
    assert "Berlin" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_a_text_ends_before_its_stop_string(toka: TokaProcess) -> None:
    client = openai.OpenAI(base_url=f"{toka.url}/v1", api_key="none", max_retries=0)
    fields = {"model": "default", "prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 40}
    unstopped = client.completions.create(**fields).choices[0]
    stopped = client.completions.create(**fields, stop=[" 9"]).choices[0]
    assert " 9" in unstopped.text
    assert stopped.text == unstopped.text[: unstopped.text.index(" 9")]
    assert stopped.finish_reason == "stop"


def test_toka_ping_prints_an_answer(toka: TokaProcess) -> None:
    command = [sys.executable, "-m", "tokasaurus", "ping", "prompt=tell me a joke", "max_tokens=32", "chat=True"]
    result = subprocess.run([*command, f"port={toka.port}"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) > 5
