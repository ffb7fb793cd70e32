"""Real answers of every endpoint of OpenAI's, streamed events included, against the facts of OpenAI's document."""

import copy
import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.small_model import make_served_model
from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, RESPONSES
from tests.server.helpers.fake_engine import FakeEngine, Reply, Script, echo
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.openai_document import (
    EVENTS,
    EXTENSIONS,
    SCHEMAS,
    WRONG_IN_DOCUMENT,
    assert_as_documented,
    violations,
)
from tests.server.helpers.reasoning_templates import QWEN3_TEMPLATE
from tests.server.helpers.tool_answers import LIMITS, TOOLS, say
from tests.server.helpers.tool_templates import save_tokenizer_with
from tests.server.jobs.helpers.uploads import upload
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.tools.formats import HERMES

Answers = list[tuple[str, Any]]
"""(schema, answer)."""

QUESTION = [{"role": "user", "content": "Warm there?"}]
CALL = HERMES.write("get_time", {})
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
RESPONSES_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]


def fail(_request: GenerateRequest, _index: int) -> Reply:
    return Reply([97] * 5, None, "stop", error="NaN", error_code="numerical_error")


CHATS: list[tuple[Script, dict[str, Any]]] = [
    (say("<think>\nIs it?\n</think>\n\nYes."), {}),
    (say("Yes.", "No."), {"n": 2, "logprobs": True, "top_logprobs": 2, "user": "me", "metadata": {"a": "b"}}),
    (say(f"Now\n{CALL}"), {"tools": TOOLS}),
    (say("Yes", finish_reason="length"), {"max_tokens": 3, "service_tier": "auto"}),
]
COMPLETION_BODIES: list[dict[str, Any]] = [
    {},
    {"logprobs": 2, "echo": True, "n": 2},
    {"prompt": ["a", "b"], "logprobs": 0, "user": "me"},
]
RESPONSE_BODIES: list[tuple[Script, dict[str, Any]]] = [
    (say("<think>\nIs it?\n</think>\n\nYes."), {"user": "me", "reasoning": {"effort": "low", "summary": "auto"}}),
    (say("Yes."), {"top_logprobs": 2, "instructions": "Be short.", "metadata": {"a": "b"}}),
    (say(f"Now\n{CALL}"), {"tools": RESPONSES_TOOLS, "tool_choice": "auto"}),
    (
        say(CALL),
        {"tools": RESPONSES_TOOLS, "tool_choice": {"type": "function", "name": "get_time"}, "temperature": 0.5},
    ),
    (say("Yes", finish_reason="length"), {"max_output_tokens": 3, "max_tool_calls": 2, "top_p": 0.5}),
    (say("true"), {"text": {"format": {"type": "json_object"}}}),
    (say("true"), {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}}),
]


def ask_chats(server: LiveServer) -> Answers:
    found: Answers = []
    for script, fields in CHATS:
        server.engine.script = script
        body = {"messages": QUESTION} | fields
        found.append(("CreateChatCompletionResponse", post(server, CHAT, body)))
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        found += [("CreateChatCompletionStreamResponse", chunk) for chunk in stream(server, CHAT, streamed)]
    return found


def ask_completions(server: LiveServer) -> Answers:
    server.engine.script = echo
    found: Answers = []
    for fields in COMPLETION_BODIES:
        body = {"prompt": "hello world", "max_tokens": 9} | fields
        chunks = stream(server, COMPLETIONS, body | {"stream": True})
        found += [("CreateCompletionResponse", one) for one in (post(server, COMPLETIONS, body), *chunks)]
    return found


def ask_responses(server: LiveServer) -> Answers:
    found: Answers = []
    for script, fields in RESPONSE_BODIES:
        server.engine.script = script
        body = {"input": "Warm there?"} | fields
        found.append(("Response", post(server, RESPONSES, body)))
        found += [(EVENTS[event["type"]], event) for event in stream(server, RESPONSES, body | {"stream": True})]
    failed = failed_stream(server, RESPONSES, input="a")
    return found + [(EVENTS[event["type"]], event) for event in failed]


def line(custom_id: str, **body: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body}).encode() + b"\n"


def ask_files_and_batches(server: LiveServer) -> Answers:
    server.engine.script = say("Yes.")

    def get(path: str) -> Any:
        return server.http.get(path).json()

    found: Answers = [("ListFilesResponse", get("/v1/files")), ("ListBatchesResponse", get("/v1/batches"))]
    ids = []
    for content in (line("1", prompt="a") + line("2", prompt=5), b"no line\n"):
        file = upload(server, content)
        body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        batch = post(server, "/v1/batches", body | {"metadata": {"a": "b"}})
        found += [("OpenAIFile", file), ("Batch", batch), ("OpenAIFile", get(f"/v1/files/{file['id']}"))]
        deadline = time.monotonic() + 60
        while batch["status"] not in ("completed", "failed"):
            assert time.monotonic() < deadline, batch
            time.sleep(0.02)
            batch = get(f"/v1/batches/{batch['id']}")
            found.append(("Batch", batch))
        for name in ("output_file_id", "error_file_id"):
            if name in batch:
                lines = server.http.get(f"/v1/files/{batch[name]}/content").text.splitlines()
                found += [("BatchRequestOutput", json.loads(line)) for line in lines]
        ids.append(file["id"])
    assert Counter(schema for schema, _ in found)["BatchRequestOutput"] == 2
    found += [("ListFilesResponse", get("/v1/files")), ("ListBatchesResponse", get("/v1/batches?limit=1"))]
    found.append(("DeleteFileResponse", server.http.delete(f"/v1/files/{ids[0]}").json()))
    return found


def ask_models(server: LiveServer) -> Answers:
    listed = server.http.get("/v1/models").json()
    return [("ListModelsResponse", listed), ("Model", server.http.get("/v1/models/default").json())]


def ask_for_errors(server: LiveServer) -> Answers:
    server.engine.script = fail
    bad = [
        *((route, {}) for route in (CHAT, COMPLETIONS, RESPONSES, "/v1/batches")),
        (CHAT, {"messages": QUESTION, "model": "other"}),
        (COMPLETIONS, {"prompt": "a", "temperature": 9}),
        (COMPLETIONS, {"prompt": "a", "no_such_field": 9}),
        (COMPLETIONS, {"prompt": "a"}),
    ]
    answers = [server.http.post(route, json=body) for route, body in bad]
    answers += [server.http.get(path) for path in ("/v1/files/file-no", "/v1/batches/batch_no", "/v1/no", "/v1/chat")]
    assert [answer.status_code for answer in answers] == [400] * 4 + [404, 400, 400, 500] + [404] * 4
    failed = [event for event in failed_stream(server, COMPLETIONS, prompt="a") if "error" in event]
    assert len(failed) == 1
    return [("ErrorResponse", error) for error in (*(answer.json() for answer in answers), *failed)]


ASKED = [ask_chats, ask_completions, ask_responses, ask_files_and_batches, ask_models, ask_for_errors]


def post(server: LiveServer, route: str, body: dict[str, Any]) -> Any:
    answer = server.http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(server: LiveServer, route: str, body: dict[str, Any]) -> list[Any]:
    answer = server.http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


def failed_stream(server: LiveServer, route: str, **body: Any) -> list[Any]:
    """The events of a stream that fails after it has begun."""
    server.engine.script, server.engine.pause_s = fail, 0.02
    events = stream(server, route, body | {"stream": True})
    server.engine.pause_s = 0
    return events


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Answers]]:
    model = make_served_model(save_tokenizer_with(QWEN3_TEMPLATE, tmp_path_factory.mktemp("tokenizer")))
    engine = FakeEngine(limits=LIMITS)
    engine.delta_size = 3
    with live_server(model, engine, data_dir=tmp_path_factory.mktemp("data")) as server:
        yield {ask.__name__: ask(server) for ask in ASKED}


@pytest.mark.parametrize("asked", [ask.__name__ for ask in ASKED])
def test_answers_are_as_documented(answers: dict[str, Answers], asked: str) -> None:
    for schema, answer in answers[asked]:
        assert_as_documented(schema, answer)


def test_every_schema_and_every_exception_has_an_answer(answers: dict[str, Answers]) -> None:
    everything = [pair for asked in answers.values() for pair in asked]
    found = {line for schema, answer in everything for line in violations(schema, answer)}
    assert found == set(WRONG_IN_DOCUMENT)
    assert {schema for schema, _ in everything} >= set(EVENTS.values())


def test_each_missing_or_wrong_property_is_found(answers: dict[str, Answers]) -> None:
    """The check itself: any property that an answer must have is missed, and any wrong type is seen."""
    asked = {schema: answer for answers_of_one in answers.values() for schema, answer in answers_of_one}
    num_removed = 0
    for schema, answer in asked.items():
        for name, (is_required, type_) in SCHEMAS[schema].items():
            known = set(violations(schema, answer))
            if is_required:
                smaller = {key: value for key, value in answer.items() if key != name}
                assert f"{schema}.{name}: missing" in violations(schema, smaller)
                num_removed += 1
            wrong = copy.deepcopy(answer) | {name: 1.5 if "number" not in type_ else "x"}
            if type_ != "object":
                assert set(violations(schema, wrong)) - known, (schema, name)
    assert num_removed > 60
    assert violations("Model", asked["Model"] | {"other": 1}) == ["Model.other: unknown"]
    assert EXTENSIONS.keys() <= SCHEMAS.keys()
