"""instructor, which parses answers into pydantic models. Every answer must parse at the first attempt."""

import asyncio
from typing import Any

import openai
import pytest

from tests.clients.animal import QUESTION, Animal

instructor = pytest.importorskip("instructor", reason="instructor is not installed: `make test-clients` has it")

ASKED: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": QUESTION}],
    "response_model": Animal,
    "max_retries": 1,
    "max_tokens": 80,
    "temperature": 0,
}
MODES = ["JSON_SCHEMA", "TOOLS"]


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_is_parsed_into_the_model(base_url: str, mode: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    animal = instructor.from_openai(client, mode=instructor.Mode[mode]).chat.completions.create(**ASKED)
    assert isinstance(animal, Animal)

    async def ask() -> Animal:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as other:
            patched = instructor.from_openai(other, mode=instructor.Mode[mode])
            answer: Animal = await patched.chat.completions.create(**ASKED)
            return answer

    assert asyncio.run(ask()).model_dump() == animal.model_dump()


@pytest.mark.parametrize("mode", MODES)
def test_a_streamed_partial_model_gains_fields_up_to_the_unstreamed_one(base_url: str, mode: str) -> None:
    client = instructor.from_openai(
        openai.OpenAI(base_url=base_url, api_key="none", max_retries=0), mode=instructor.Mode[mode]
    )
    unstreamed = client.chat.completions.create(**ASKED)
    partials = list(client.chat.completions.create_partial(**ASKED))
    assert partials[-1].model_dump() == unstreamed.model_dump()
    filled = [sum(value is not None for value in partial.model_dump().values()) for partial in partials]
    assert filled == sorted(filled)
    assert filled[0] < 3
