"""Prepared requests are ready for the engine: they contain the validated grammar."""

import asyncio
from typing import Any

import pytest

from tests.server.helpers.prepared_requests import LIMITS
from tokasaurus.server.errors import InvalidRequest
from tokasaurus.server.prepare.requests import Origin, Prepared, prepare_chat, prepare_completion
from tokasaurus.server.protocol.chat import ChatCompletionRequest
from tokasaurus.server.protocol.completions import CompletionRequest
from tokasaurus.server.resources.text_threads import TextThreads
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.structured_output.validator import GrammarChecker

CHAT = {"messages": [{"role": "user", "content": "abc"}]}
COMPLETION = {"prompt": ["a", "bc"]}


def prepare(model: ServedModel, **fields: Any) -> Prepared:
    async def run() -> Prepared:
        grammars, threads = GrammarChecker(model), TextThreads()
        try:
            if "messages" in fields:
                chat = ChatCompletionRequest.model_validate({"model": "default"} | fields)
                return await prepare_chat(chat, model, LIMITS, grammars, threads, Origin(100, "client"))
            completion = CompletionRequest.model_validate({"model": "default"} | fields)
            return await prepare_completion(completion, model, LIMITS, grammars, threads, Origin(100, "client"))
        finally:
            threads.close()
            await grammars.close()

    return asyncio.run(run())


@pytest.mark.parametrize("fields", [COMPLETION, CHAT])
def test_every_request_contains_the_validated_grammar(served_model: ServedModel, fields: dict[str, Any]) -> None:
    prepared = prepare(served_model, guided_regex="[ab]+", **fields)
    assert prepared.grammar_param == "guided_regex"
    assert len(prepared.requests) == len(fields.get("prompt", "1"))
    assert all("[ab]+" in request.grammar for request in prepared.requests)


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
