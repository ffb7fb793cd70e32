"""Prepared requests are final: they contain the validated grammar."""

import asyncio
import socket
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.server.helpers.prepared_requests import LIMITS
from tokasaurus.config import ServerConfig
from tokasaurus.monitoring.metrics import LoopLag
from tokasaurus.server.endpoints import ALL_ENDPOINTS, ENDPOINTS, EndpointUrl
from tokasaurus.server.engine_client.client import EngineClient
from tokasaurus.server.errors import InvalidRequest
from tokasaurus.server.grammars.validator import GrammarChecker
from tokasaurus.server.prepare.requests import Origin, Prepared
from tokasaurus.server.protocol.batches import LINE_URLS
from tokasaurus.server.resources import BodyBytes, TextThreads
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.state import ServerState

CHAT = {"messages": [{"role": "user", "content": "abc"}]}
COMPLETION = {"prompt": ["a", "bc"]}


class Engine(EngineClient):
    limits = LIMITS  # type: ignore[assignment]


def prepare(model: ServedModel, **fields: Any) -> Prepared:
    async def run() -> Prepared:
        with socket.socket() as launcher:
            grammars, threads = GrammarChecker(model), TextThreads()
            engine = Engine(launcher)
            shared = (grammars, threads, BodyBytes(1 << 20), LoopLag(), ServerConfig())
            state = ServerState(model, engine, *shared)
            endpoint = ENDPOINTS["/v1/chat/completions" if "messages" in fields else "/v1/completions"]
            body = endpoint.body_model.model_validate({"model": "default"} | fields)
            try:
                return await endpoint.prepare(state, body, Origin(100, "client"))
            finally:
                threads.close()
                await grammars.close()

    return asyncio.run(run())


@pytest.mark.parametrize("fields", [COMPLETION, CHAT])
def test_every_request_contains_the_validated_grammar(served_model: ServedModel, fields: dict[str, Any]) -> None:
    prepared = prepare(served_model, guided_regex="abc+", **fields)
    assert prepared.grammar_param == "guided_regex"
    assert len(prepared.requests) == len(fields.get("prompt", "1"))
    assert all("abc+" in request.grammar for request in prepared.requests)


@pytest.mark.parametrize("fields", [COMPLETION, CHAT])
def test_requests_without_a_grammar_have_no_grammar_param(served_model: ServedModel, fields: dict[str, Any]) -> None:
    prepared = prepare(served_model, **fields)
    assert prepared.grammar_param is None
    assert not any(request.grammar for request in prepared.requests)


@pytest.mark.parametrize("fields", [COMPLETION, CHAT])
def test_refusal_of_an_invalid_grammar_names_its_field(served_model: ServedModel, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as error:
        prepare(served_model, guided_regex="(?=a)b", **fields)
    assert error.value.param == "guided_regex"


def test_lines_may_have_the_url_of_every_endpoint_and_no_other() -> None:
    for url in ALL_ENDPOINTS:
        assert TypeAdapter(EndpointUrl).validate_python(url) == url
    with pytest.raises(ValidationError):
        TypeAdapter(EndpointUrl).validate_python("/tokenize")


def test_the_paths_that_toka_batch_knows_are_those_of_the_endpoints() -> None:
    assert sorted(LINE_URLS) == sorted(ALL_ENDPOINTS)


@pytest.mark.parametrize("path", ALL_ENDPOINTS)
def test_example_is_a_body_of_its_endpoint(path: str) -> None:
    ALL_ENDPOINTS[path].body_model.model_validate(ALL_ENDPOINTS[path].example)
