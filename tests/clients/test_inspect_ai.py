"""Inspect by a model's name and a base URL: `openai/`, with /v1/responses too, and `openai-api/`."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.clients.animal import QUESTION, Animal
from tests.clients.conftest import PlainPost

WHALES = "What do whales eat?"
NAMES = {"openai/default": {}, "openai/default, responses": {"responses_api": True}, "openai-api/toka/default": {}}


@pytest.fixture(scope="module")
def inspect_ai() -> Any:
    return pytest.importorskip("inspect_ai", reason="inspect-ai is not installed: `make test-clients` has it")


@pytest.fixture(params=list(NAMES))
def model(request: pytest.FixtureRequest, inspect_ai: Any, base_url: str) -> Any:
    from inspect_ai.model import GenerateConfig

    name = request.param.partition(",")[0]
    config = GenerateConfig(max_tokens=80, temperature=0, max_retries=0)
    return inspect_ai.model.get_model(name, base_url=base_url, api_key="none", config=config, **NAMES[request.param])


def test_an_evaluation_records_the_answer_of_the_chat(
    inspect_ai: Any, model: Any, plain_post: PlainPost, tmp_path: Path
) -> None:
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes

    fields = {"messages": [{"role": "user", "content": WHALES}], "max_tokens": 80, "temperature": 0}
    expected = plain_post("chat/completions", fields)
    text = expected["choices"][0]["message"]["content"]
    task = inspect_ai.Task(dataset=[Sample(input=WHALES, target=text[-12:])], scorer=includes())
    (log,) = inspect_ai.eval(task, model=model, log_dir=str(tmp_path), display="none")
    assert log.status == "success"
    assert log.samples[0].output.completion == text
    assert log.results.scores[0].metrics["accuracy"].value == 1
    (usage,) = log.stats.model_usage.values()
    prompt_tokens = usage.input_tokens + (usage.input_tokens_cache_read or 0)  # it tells cached ones apart
    assert prompt_tokens == expected["usage"]["prompt_tokens"]
    assert usage.output_tokens == expected["usage"]["completion_tokens"]


def test_a_tool_is_called_and_its_result_can_be_sent_back(model: Any) -> None:
    from inspect_ai.model import ChatMessageTool, ChatMessageUser
    from inspect_ai.tool import ToolInfo, ToolParams

    schema = Animal.model_json_schema()
    tool = ToolInfo(name="animal", description="Stores an animal.", parameters=ToolParams(**schema))

    async def run() -> tuple[Any, str]:
        question = ChatMessageUser(content=QUESTION)
        first = await model.generate([question], tools=[tool], tool_choice="any")
        (call,) = first.message.tool_calls[:1]
        results = [
            ChatMessageTool(content="Stored.", tool_call_id=each.id, function=each.function)
            for each in first.message.tool_calls
        ]
        second = await model.generate([question, first.message, *results], tools=[tool], tool_choice="none")
        return call, second.completion

    call, text = asyncio.run(run())
    assert call.function == "animal"
    Animal.model_validate(call.arguments)
    assert text
