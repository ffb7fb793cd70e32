"""The demo model behind a real server, in float32, against transformers."""

import asyncio
import http.client
import json
from contextlib import closing
from typing import Any, Literal

import httpx
import jsonschema_rs
import openai
import pydantic
import pytest
from openai.types.chat.chat_completion import Choice

from tests.end_to_end.helpers.demo_model_texts import assert_greedy_text_and_logprobs_match_transformers
from tests.end_to_end.helpers.toka_process import TokaProcess, wait_for
from tests.helpers.examples import IS_NIGHTLY, few
from tests.helpers.random_schemas import random_schema
from tokasaurus.checkpoint import resolve_checkpoint
from tokasaurus.text.tokenizer import Tokenizer

NUM_PROMPTS = 24 if IS_NIGHTLY else 3


@pytest.fixture
def toka(demo_model: TokaProcess) -> TokaProcess:
    return demo_model


def test_greedy_text_and_logprobs_match_transformers(toka: TokaProcess) -> None:
    assert_greedy_text_and_logprobs_match_transformers(toka, NUM_PROMPTS)


def test_a_seeded_request_gives_the_same_text_alone_and_among_others(toka: TokaProcess) -> None:
    body = {"model": "default", "prompt": "Once upon a time", "max_tokens": 16, "temperature": 1.0, "top_p": 0.95}

    async def ask(client: httpx.AsyncClient, **fields: object) -> list[str]:
        answer = await client.post("/v1/completions", json={**body, **fields})
        answer.raise_for_status()
        return [choice["text"] for choice in answer.json()["choices"]]

    num_others = 12 if IS_NIGHTLY else 4

    async def ask_all() -> tuple[list[str], list[str], list[list[str]]]:
        async with httpx.AsyncClient(base_url=toka.url, timeout=120) as client:
            alone = await ask(client, seed=5, n=4)
            other_requests = [ask(client, n=2) for _ in range(num_others)]
            among_others, *others = await asyncio.gather(ask(client, seed=5, n=4), *other_requests)
            return alone, among_others, others

    alone, among_others, others = asyncio.run(ask_all())
    assert among_others == alone
    assert len(set(alone)) == 4, "samples of one request differ"
    assert len({text for texts in others for text in texts}) == 2 * num_others, "unseeded requests differ"


def test_a_request_without_sampling_parameters_has_those_of_the_models_makers(toka: TokaProcess) -> None:
    def text(**fields: object) -> str:
        body = {"prompt": "Once upon a time", "max_tokens": 30, "seed": 2, **fields}
        answer = httpx.post(f"{toka.url}/v1/completions", json=body, timeout=120).raise_for_status()
        return str(answer.json()["choices"][0]["text"])

    (line,) = [line for line in toka.lines if "sampling_defaults" in line]
    assert line.strip().endswith(" temperature 0.2, top_p 0.9, the model's defaults (sampling_defaults=neutral)")
    assert text() == text(temperature=None, top_p=None) == text(temperature=0.2, top_p=0.9)
    assert len({text(), text(temperature=1), text(temperature=1, top_p=1)}) == 3


@few(1, ("stop", "logprobs"), [([" and", "\n"], True), (None, True), ([" the", "s a"], False)])
def test_a_streamed_answer_equals_the_unstreamed_one(toka: TokaProcess, stop: list[str] | None, logprobs: bool) -> None:
    client = openai.OpenAI(base_url=f"{toka.url}/v1", api_key="none", max_retries=0, timeout=120)
    fields: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": "Write emoji like 😀🎉 and 日本語, then explain them."}],
        "seed": 7,
        "n": 2,
        "stop": stop,
        "logprobs": logprobs,
        "top_logprobs": 3 if logprobs else None,
        "max_tokens": 40 if IS_NIGHTLY else 20,
    }
    client.chat.completions.create(**fields | {"max_tokens": 1})  # then both answers find the same tokens cached
    unstreamed = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
        num_chunks = sum(event.type == "chunk" for event in stream)
        collected = stream.current_completion_snapshot  # get_final_completion() may reject finish_reason "length"
    assert len(collected.choices) == 2
    for choice, expected in zip(collected.choices, unstreamed.choices, strict=True):
        assert choice.finish_reason == expected.finish_reason
        assert choice.message.content == expected.message.content
        assert logprobs_of(choice) == pytest.approx(logprobs_of(expected), abs=1e-4)
    assert collected.usage is not None
    assert collected.usage == unstreamed.usage
    assert num_chunks > collected.usage.completion_tokens / 4, "tokens are sent in many chunks"


def logprobs_of(choice: Choice) -> list[float]:
    """For each token: its logprob, then the logprobs of the three most likely tokens at its position."""
    entries = [] if choice.logprobs is None else choice.logprobs.content or []
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    return [value for entry in entries for value in (entry.logprob, *(other.logprob for other in entry.top_logprobs))]


@pytest.mark.long
def test_penalised_and_limited_requests_give_the_same_text_alone_and_among_others(toka: TokaProcess) -> None:
    common = {"model": "default", "prompt": "The sun is", "max_tokens": 24, "seed": 7, "n": 2, "ignore_eos": True}
    bodies = [
        {**common, "top_k": 20, "min_p": 0.02},
        {**common, "presence_penalty": 1.5, "frequency_penalty": 1.0},
        {**common, "repetition_penalty": 1.3, "top_p": 0.9, "temperature": 0.8},
        {**common, "logit_bias": {"260": 8, "28": -100}},
    ]

    async def ask_all(client: httpx.AsyncClient, bodies: list[dict[str, object]]) -> list[list[str]]:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        return [[choice["text"] for choice in answer.raise_for_status().json()["choices"]] for answer in answers]

    async def ask() -> tuple[list[list[str]], list[list[str]]]:
        async with httpx.AsyncClient(base_url=toka.url, timeout=120) as client:
            alone = [(await ask_all(client, [body]))[0] for body in bodies]
            return alone, await ask_all(client, bodies * 3)

    alone, together = asyncio.run(ask())
    assert together == alone * 3
    assert len({text for texts in alone for text in texts}) == 2 * len(bodies)


def test_logit_bias_stop_token_ids_and_min_tokens_take_effect(toka: TokaProcess) -> None:
    tokenizer = Tokenizer.load(resolve_checkpoint(None).tokenizer_directory)
    (the,), (dot,) = (tokenizer.encode(text, add_special_tokens=False) for text in (" the", "."))
    client = openai.OpenAI(base_url=f"{toka.url}/v1", api_key="none", max_retries=0, timeout=300)

    def complete(logit_bias: dict[str, int], **extra: object) -> tuple[str, str, int]:
        answer = client.completions.create(
            model="default",
            prompt="Once upon",
            max_tokens=12,
            temperature=0,
            logit_bias=logit_bias,
            extra_body=extra,
        )
        assert answer.usage is not None
        return answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.completion_tokens

    assert complete({str(the): 100}) == (" the" * 12, "length", 12)
    text, reason, count = complete({str(the): 100, str(dot): 60}, min_tokens=3, stop_token_ids=[the])
    assert (text, reason, count) == ("...", "stop", 4)
    assert complete({str(the): 100}, stop_token_ids=[the]) == ("", "stop", 1)
    assert complete({str(the): 100}, stop=["the the"], min_tokens=2) == (" the ", "stop", 3)


TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
ENDS: dict[str, dict[str, Any]] = {
    "stop string inside a token": {"logit_bias": {"260": 50}, "stop": ["e t"]},
    "end token": {"logit_bias": {"2": 100}, "min_tokens": 3},
    "grammar": {"guided_regex": "(yes|no|never) it is"},
    "stop token id": {"logit_bias": {"260": 100}, "stop_token_ids": [260], "min_tokens": 3},
    "length": {"ignore_eos": True},
    "tool call": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60},
}


@few(1, "end", ENDS)
def test_token_ids_and_logprobs_are_parallel_for_every_end_and_form_of_answer(toka: TokaProcess, end: str) -> None:
    """As trainers read them. Their values are those of an echo of the same ids, the end token's too."""
    common = {"model": "default", "max_tokens": 16, "n": 2, "seed": 3, "return_token_ids": True, **ENDS[end]}
    bodies = {"/v1/chat/completions": {**common, "messages": [{"role": "user", "content": "Is it?"}], "logprobs": True}}
    if end != "tool call":
        bodies["/v1/completions"] = {**common, "prompt": "Once upon a time", "logprobs": 0}
    with httpx.Client(base_url=toka.url, timeout=120) as client:
        lines = [{"custom_id": path, "url": path, "body": body} for path, body in bodies.items()]
        content = "\n".join(map(json.dumps, lines))
        bulk = client.post("/v1/bulk", content=content, headers={"content-type": "application/x-ndjson"})
        in_bulk = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, bulk.text.splitlines())}
        for path, body in bodies.items():
            answer = client.post(path, json=body).raise_for_status().json()
            streamed = client.post(path, json={**body, "stream": True}).raise_for_status().text
            events = [json.loads(event.removeprefix("data: ")) for event in streamed.split("\n\n")[:-2]]
            chunks = [choice for event in events for choice in event["choices"] if "token_ids" in choice]
            assert all(len(values_of(choice)) == len(choice["token_ids"]) for choice in chunks)
            prompt_ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
            for index, choice in enumerate(answer["choices"]):
                own_chunks = [chunk for chunk in chunks if chunk["index"] == index]
                joined_ids = [token_id for chunk in own_chunks for token_id in chunk["token_ids"]]
                joined_values = [value for chunk in own_chunks for value in values_of(chunk)]
                bulk_choice = in_bulk[path]["choices"][index]
                assert choice["token_ids"] == joined_ids == bulk_choice["token_ids"]
                text = {"prompt": [*prompt_ids, *joined_ids], "max_tokens": 0, "echo": True, "logprobs": 0}
                echo = client.post("/v1/completions", json={"model": "default", **text}).raise_for_status().json()
                expected = values_of(echo["choices"][0])[len(prompt_ids) :]
                for values in (values_of(choice), joined_values, values_of(bulk_choice)):
                    assert values == pytest.approx(expected, abs=1e-3)
                assert (joined_ids[-1] == 2) == (end == "end token") or end in ("grammar", "tool call")
            num_tokens = sum(len(choice["token_ids"]) for choice in answer["choices"])
            assert answer["usage"]["completion_tokens"] == in_bulk[path]["usage"]["completion_tokens"] == num_tokens


def values_of(choice: dict[str, Any]) -> list[float]:
    """The logprobs of a choice, in the format of either route; empty if it has none."""
    logprobs = choice["logprobs"] or {"token_logprobs": []}
    if "content" in logprobs:
        return [entry["logprob"] for entry in logprobs["content"]]
    return list(logprobs["token_logprobs"])


@pytest.mark.long
def test_random_schemas_are_followed_and_do_not_change_a_plain_request(toka: TokaProcess) -> None:
    """All run together, sampled at temperature 1 from a small model; an independent validator checks the texts."""
    schemas = [random_schema(seed) for seed in range(30)]
    plain = {"model": "default", "prompt": "The capital of France", "max_tokens": 40, "temperature": 0}
    common = {"model": "default", "messages": [{"role": "user", "content": "Some JSON, please."}], "max_tokens": 80}
    formats = [{"type": "json_schema", "json_schema": {"name": "made_up", "schema": schema}} for schema in schemas]
    shaped = [common | {"seed": seed, "response_format": form} for seed, form in enumerate(formats)]
    lines = [{"custom_id": str(seed), "url": "/v1/chat/completions", "body": body} for seed, body in enumerate(shaped)]
    lines.append({"custom_id": "plain", "url": "/v1/completions", "body": plain})

    alone = httpx.post(f"{toka.url}/v1/completions", json=plain, timeout=120).json()["choices"][0]["text"]
    content = "\n".join(json.dumps(line) for line in lines)
    headers = {"content-type": "application/x-ndjson"}
    answer = httpx.post(f"{toka.url}/v1/bulk", content=content, headers=headers, timeout=120)
    results = {line["custom_id"]: line["response"] for line in map(json.loads, answer.text.splitlines())}
    assert results.pop("plain")["body"]["choices"][0]["text"] == alone
    num_finished = 0
    for seed, schema in enumerate(schemas):
        assert results[str(seed)]["status_code"] == 200, results[str(seed)]
        (choice,) = results[str(seed)]["body"]["choices"]
        if choice["finish_reason"] == "stop":
            value = json.loads(choice["message"]["content"])
            assert jsonschema_rs.Draft202012Validator(schema, validate_formats=True).is_valid(value), (schema, value)
            num_finished += 1
    assert num_finished >= 8, "not all are cut at max_tokens"


class Country(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    continent: Literal["Africa", "America", "Asia", "Europe", "Oceania"]
    population: int = pydantic.Field(ge=1000, le=2_000_000_000)


def test_openai_client_parses_answers_into_a_pydantic_model(toka: TokaProcess) -> None:
    client = openai.OpenAI(base_url=f"{toka.url}/v1", api_key="none", max_retries=0, timeout=120)
    answer = client.chat.completions.parse(
        model="default",
        messages=[{"role": "user", "content": "Name a country, its continent and its population, as JSON."}],
        response_format=Country,
        max_tokens=80,
        n=3,
        seed=1,
    )
    assert all(isinstance(choice.message.parsed, Country) for choice in answer.choices)


@pytest.mark.long
def test_required_calls_follow_random_parameter_schemas(toka: TokaProcess) -> None:
    """All run together, sampled at temperature 1; the last is streamed as well."""
    schemas = [schema for schema in map(random_schema, range(40)) if schema.get("type") == "object"][4:8]

    def make_body(index: int) -> dict[str, Any]:
        return {
            "model": "default",
            "messages": [{"role": "user", "content": "Call it, please."}],
            "tools": [{"type": "function", "function": {"name": "made_up", "parameters": schemas[index]}}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 100,
            "seed": 4 + index,
        }

    async def stream(client: openai.AsyncOpenAI, index: int) -> Any:
        async with client.chat.completions.stream(**make_body(index)) as chunks:
            return await chunks.get_final_completion()

    async def ask_all() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{toka.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            unstreamed = [client.chat.completions.create(**make_body(index)) for index in range(4)]
            return await asyncio.gather(*unstreamed, stream(client, 3))

    choices = [answer.choices[0] for answer in asyncio.run(ask_all())]
    arguments = ["".join(call.function.arguments for call in choice.message.tool_calls or []) for choice in choices]
    assert (arguments[3], choices[3].finish_reason) == (arguments[4], choices[4].finish_reason)
    num_finished = 0
    for choice, text, schema in zip(choices, arguments, schemas, strict=False):
        assert choice.finish_reason in ("tool_calls", "length")
        if choice.finish_reason == "tool_calls":
            value = json.loads(text)
            assert jsonschema_rs.Draft202012Validator(schema, validate_formats=True).is_valid(value), (schema, value)
            num_finished += 1
    assert num_finished >= 2, "not all are cut at max_tokens"


def test_blocks_are_freed_when_the_client_disconnects(toka: TokaProcess) -> None:
    body = {"model": "default", "prompt": "Count:", "max_tokens": 4000, "n": 2, "ignore_eos": True}

    with closing(http.client.HTTPConnection("127.0.0.1", toka.port)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        wait_for(lambda: toka.gauge("toka_requests_running") == 2, timeout_s=60)
        assert toka.gauge("toka_kv_blocks_used") > 0
    wait_for(lambda: toka.gauge("toka_requests_running") == 0, timeout_s=60)
    assert toka.gauge("toka_kv_blocks_used") == 0
