"""The real OpenAI client, sync and async, against a real HTTP server; the client's types validate the answers."""

import asyncio
import json
from dataclasses import replace

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from tests.helpers.examples import IS_NIGHTLY
from tests.server.helpers.fake_engine import FakeEngine, Reply, echo
from tests.server.helpers.live_server import LiveServer, live_server, wait_until_ready
from tests.server.helpers.openai_client import (
    assert_exactly_openai_shaped,
    assert_no_extra_fields,
    say_hello,
    sync_client,
)
from tokasaurus import __version__
from tokasaurus.server.served_model import ServedModel


def test_completion(server: LiveServer) -> None:
    server.engine.script = say_hello
    raw = sync_client(server).completions.with_raw_response.create(
        model="org/small", prompt=["abc", "de"], n=2, max_tokens=9, logprobs=0, seed=4
    )
    assert_exactly_openai_shaped(raw.content, Completion)
    answer = raw.parse()
    assert answer.object == "text_completion"
    assert answer.model == "org/small"
    assert answer.system_fingerprint == "fp_test"
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "hello0€"),
        (1, "hello1€"),
        (2, "hello0€"),
        (3, "hello1€"),
    ]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["hello", "1", "�", "�", "�"]
    assert logprobs.token_logprobs == [-0.5] * 5
    assert logprobs.text_offset == [0, 5, 6, 6, 6]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 24, 29)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    our_fields = {"computed_tokens": 4 * 2, "shared_tokens": 4 * 400, "recomputed_tokens": 4 * 30}
    assert answer.usage.prompt_tokens_details.model_extra == our_fields


def test_chat_completion(server: LiveServer) -> None:
    server.engine.script = say_hello
    raw = sync_client(server).chat.completions.with_raw_response.create(
        model="default",
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        n=2,
        logprobs=True,
        max_completion_tokens=9,
        temperature=0,
        stop="€",
        extra_body={"ignore_eos": False},
    )
    assert_exactly_openai_shaped(raw.content, ChatCompletion)
    answer = raw.parse()
    assert answer.object == "chat.completion"
    assert [choice.message.content for choice in answer.choices] == ["hello0", "hello1"]
    assert [choice.message.role for choice in answer.choices] == ["assistant", "assistant"]
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None
    assert [(entry.token, entry.logprob, entry.bytes, entry.top_logprobs) for entry in logprobs.content or []] == [
        ("hello", -0.5, list(b"hello"), []),
        ("1", -0.5, list(b"1"), []),
    ]
    (request,) = server.engine.requests
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(request.prompt_ids)
    assert answer.usage.completion_tokens == 12


def test_logprobs_are_none_unless_requested(server: LiveServer) -> None:
    server.engine.script = say_hello
    client = sync_client(server)
    assert client.completions.create(model="default", prompt="a").choices[0].logprobs is None
    chat = client.chat.completions.create(model="default", messages=[{"role": "user", "content": "hi"}])
    assert chat.choices[0].logprobs is None
    assert [request.want_logprobs for request in server.engine.requests] == [False, False]


def test_async_client_with_many_requests_at_once(shared_server: LiveServer) -> None:
    num_requests = 200 if IS_NIGHTLY else 50

    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        answer = await client.completions.create(model="default", prompt=f"hello {number}", max_tokens=32)
        return answer.choices[0].text

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(num_requests)))

    assert asyncio.run(main()) == [f"hello {number}" for number in range(num_requests)]
    assert shared_server.client.num_pending_requests == 0


def test_thousands_of_prompts_in_one_body_are_answered_in_order(shared_server: LiveServer) -> None:
    prompts = [f"hello world {number}" for number in range(5000 if IS_NIGHTLY else 1000)]
    answer = sync_client(shared_server).completions.create(model="default", prompt=prompts, max_tokens=60)
    assert [choice.text for choice in answer.choices] == prompts


def test_models(shared_server: LiveServer) -> None:
    client = sync_client(shared_server)
    (listed,) = client.models.list().data
    for name in ("org/small", "default"):
        assert client.models.retrieve(name) == listed
    assert (listed.id, listed.object, listed.created) == ("org/small", "model", 1_700_000_000)
    assert_no_extra_fields(listed)
    for name in ("org/other", "None", "null"):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)


@pytest.mark.parametrize("given", ["/models/small", "./models/small", "org/base"])
def test_the_value_of_the_flag_model_is_accepted_as_the_models_name(served_model: ServedModel, given: str) -> None:
    with live_server(replace(served_model, model_flag=given), FakeEngine()) as server:
        client = sync_client(server)
        assert [model.id for model in client.models.list()] == ["org/small"]
        answer = client.completions.create(model=given, prompt="hello")
        assert (answer.model, answer.choices[0].text) == ("org/small", "hello")
        chunks = client.chat.completions.create(model=given, messages=[{"role": "user", "content": "a"}], stream=True)
        assert {chunk.model for chunk in chunks} == {"org/small"}
        assert server.http.post("/tokenize", json={"model": given, "prompt": "a"}).status_code == 200
        line = {"custom_id": "1", "url": "/v1/completions", "body": {"model": given, "prompt": "hello"}}
        assert server.http.post("/v1/bulk", content=json.dumps(line)).json()["error"] is None
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model=f"{given}/", prompt="hello")


def test_errors_raise_the_clients_exceptions_with_param_and_code(shared_server: LiveServer) -> None:
    client = sync_client(shared_server)
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="default", prompt="a", temperature=9)
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="default", prompt="a", max_tokens=100_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt="a")
    assert unknown.value.code == "model_not_found"


def test_internal_error_is_a_500_without_details(served_model: ServedModel, server: LiveServer) -> None:
    # The engine leaves out the logprobs that the request asked for.
    server.engine.script = lambda _request, _index: Reply([1, 2], None)
    response = server.http.post("/v1/completions", json={"model": "default", "prompt": "a", "logprobs": 0})
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["type"] == "server_error"
    assert "logprobs" not in error["message"]
    assert server.client.num_pending_requests == 0
    assert served_model.name not in error["message"]


def test_generation_answers_503_until_the_engine_is_ready(served_model: ServedModel) -> None:
    engine = FakeEngine()
    body = {"model": "default", "prompt": "hello"}
    with live_server(served_model, engine, start_engine=False) as server:
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/ping").json() == {"message": "pong"}
        assert server.http.get("/v1/models").status_code == 200
        for response in (server.http.get("/ready"), server.http.post("/v1/completions", json=body)):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "engine_not_ready"
        assert metric_values(server.http) == {
            "toka_log_records_dropped_total": 0,
            "toka_engine_restarts_total": 0,
            "toka_server_restarts_total": 0,
            "toka_replicas_up": 0,
            "toka_adapters_loaded": 0,
        }, "none of the engine"
        engine.start()
        wait_until_ready(server.http)
        assert server.http.post("/v1/completions", json=body).status_code == 200


def metric_values(http: httpx.Client) -> dict[str, float]:
    """Metric values by name: without those that measure time, the event loop or the process, and those that the server
    itself counts of requests and answers."""
    lines = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    values = {line.split()[0].removesuffix('{replica="0"}'): float(line.split()[1]) for line in lines}
    others = ("_seconds_total", "_sum", "_count", "}")
    left = {name: value for name, value in values.items() if not name.endswith(others)}
    return {name: value for name, value in left.items() if "loop" not in name and not name.startswith("process_")}


def test_metrics_are_exact_as_soon_as_an_answer_arrives(server: LiveServer) -> None:
    at_start = metric_values(server.http)
    assert {name: value for name, value in at_start.items() if value} == {
        "toka_kv_blocks": 64,
        "toka_replicas_up": 1,
    }
    server.engine.script = lambda request, index: replace(echo(request, index), num_cached_tokens=index)
    server.engine.stats = replace(
        server.engine.stats, total_preemptions=2, total_recomputed_tokens=70, manager_busy_fraction=0.125
    )
    at_start |= {"toka_preemptions_total": 2, "toka_recomputed_tokens_total": 70, "toka_manager_busy_fraction": 0.125}
    client = sync_client(server)
    for number in range(1, 10):
        client.completions.create(model="default", prompt=[1, 2, 3], n=3, max_tokens=2)
        counted = {
            "toka_prompt_tokens_total": 3 * number,
            "toka_generation_tokens_total": 6 * number,
            "toka_prefix_cache_hit_tokens_total": (0 + 1 + 2) * number,
        }
        assert metric_values(server.http) == at_start | counted


def test_cached_tokens_count_the_sample_with_the_fewest_for_each_prompt(server: LiveServer) -> None:
    """cached_tokens sums each prompt's smallest count: its two samples find 48 and 32 tokens cached."""
    server.engine.script = lambda request, index: replace(echo(request, index), num_cached_tokens=16 * (3 - index))
    client = sync_client(server)
    for answer in (
        client.completions.create(model="default", prompt=[[1] * 60, [2] * 70], n=2),
        client.chat.completions.create(model="default", messages=[{"role": "user", "content": "a" * 60}], n=2),
    ):
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 32 * len(answer.choices) // 2


def test_cache_salt_reaches_the_engine(server: LiveServer) -> None:
    client = sync_client(server)
    salt: dict[str, object] = {"cache_salt": "tenant 1"}
    client.completions.create(model="default", prompt=["a", "b"], extra_body=salt)
    client.chat.completions.create(model="default", messages=[{"role": "user", "content": "hi"}], extra_body=salt)
    client.completions.create(model="default", prompt="a")
    assert [request.cache_salt for request in server.engine.requests] == ["tenant 1"] * 3 + [""]


def test_version_equals_the_installed_package_version(shared_server: LiveServer) -> None:
    assert shared_server.http.get("/version").json() == {"version": __version__}
