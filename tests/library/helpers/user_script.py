"""A user's program over the whole library. It is not run: mypy judges the types that the library gives, and a line with
`type: ignore` that raises no error is an error itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from typing_extensions import assert_type

import tokasaurus
from tokasaurus import (
    LLM,
    AsyncClient,
    AsyncLLM,
    Client,
    EngineError,
    JobChanged,
    MapSummary,
    Result,
    RowError,
    Sample,
    Sampling,
    Score,
)


class City(BaseModel):
    name: str
    inhabitants: int


def rows() -> Iterator[dict[str, Any]]:
    for number in range(10):
        yield {"id": f"row {number}", "prompt": f"{number} + 1 =", "expected": number + 1}


def batch(llm: Client) -> list[str]:
    sampling = Sampling(n=8, temperature=0.7, stop=["\n"], logit_bias={7: -100})
    results = assert_type(llm.generate(["Once", [1, 2, 3]], sampling, structured_outputs={"regex": "a+"}), list[Result])
    texts: list[str] = []
    for result in results:
        if result.error is not None:
            assert_type(result.error, RowError)
            texts.append(f"{result.key}: {result.error.code} {result.error.message}")
            continue
        for sample in result.samples:
            assert_type(sample, Sample)
            assert_type(sample.token_ids, NDArray[np.int32])
            if sample.logprobs is not None:
                texts.append(f"{sample.text} {sample.logprobs.mean():.2f} {sample.finish_reason} {sample.seed}")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    answered = llm.chat([messages], Sampling(max_tokens=64), schema=City, tools=[{"type": "function"}])
    city: City = answered[0].parsed
    assert_type(answered[0].text, str | None)
    texts += [f"{city.name} {call.name}({call.arguments})" for call in answered[0].samples[0].tool_calls]
    texts += [str(result.text) for result in llm.stream(rows(), Sampling(temperature=0), key="id")]
    texts += [str(result.text) for result in llm.stream(["a text", [1, 2], messages])]
    scores = assert_type(llm.score(["2 + 2 ="], [" 4"]), list[Score])
    best = max(scores, key=lambda score: score.total)
    return [*texts, f"{best.total:.2f} {best.logprobs.sum():.2f}"]


async def streamed(llm: AsyncClient) -> AsyncIterator[str]:
    async for result in llm.stream(rows(), Sampling(max_tokens=8), key="id"):
        assert_type(result, Result)
        yield str(result.text)
    results = await llm.generate(["a"])
    scores = await llm.score([[1, 2]], [[3]])
    yield f"{results[0].text} {scores[0].total}"


def data_set(llm: Client, frame: Any) -> MapSummary:
    def ask(row: dict[str, Any]) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"Where is {row['place']}?"}]

    sampling = Sampling(n=4, max_tokens=32)
    summary = llm.map("in/*.parquet", "out", prompt="{question}", key="id", sampling=sampling, schema=City)
    assert_type(summary, MapSummary)
    assert_type(llm.map(frame, messages=ask, progress=False), Any)
    answered: list[dict[str, Any]] = llm.map([{"place": "Rome"}], prompt=lambda row: row["place"], chat=True)
    try:
        return llm.map([Path("a.jsonl")], Path("out"), prompt="text", format="jsonl", prefix="new_", overwrite=True)
    except JobChanged as error:
        print(error, answered)
        raise


def wrong(llm: Client) -> None:
    tokasaurus.Samplng  # type: ignore[attr-defined]  # noqa: B018
    Sampling(temprature=0)  # type: ignore[call-arg]
    Sampling(n="3")  # type: ignore[arg-type]
    llm.generate(["a"], {"n": 3})  # type: ignore[arg-type]
    llm.generate([{"role": "user", "content": "a"}])  # type: ignore[list-item]
    llm.chat(["a"])  # type: ignore[list-item]
    llm.chat([[]], schema="x")  # type: ignore[arg-type]
    llm.stream(["a"], key=3)  # type: ignore[arg-type]
    llm.map("a.csv", "out", prompt=3)  # type: ignore[call-overload]
    llm.map("a.csv", "out", prompt="a", key=3)  # type: ignore[call-overload]
    llm.generate(["a"])[0].txt  # type: ignore[attr-defined]  # noqa: B018
    llm.generate(["a"])[0].text.upper()  # type: ignore[union-attr]


async def main() -> None:
    try:
        with LLM("Qwen/Qwen3-0.6B", kv_cache_num_tokens=100_000, dp_size=2, show=False) as llm:
            print(llm.model, *batch(llm))
    except EngineError as error:
        print(error)
    with Client("http://127.0.0.1:10210", api_key="secret", concurrency=64) as client:
        print(*batch(client))
    async with AsyncLLM() as waiting, AsyncClient() as far:
        print([text async for text in streamed(waiting)], [text async for text in streamed(far)])
