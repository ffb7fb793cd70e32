"""A user's program over the whole library. It is not run: mypy judges the types that the library gives, and a line with
`type: ignore` that raises no error is an error itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
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
    Results,
    RowError,
    RowsFailed,
    Sample,
    Sampling,
    Score,
)


class City(BaseModel):
    name: str
    inhabitants: int


@dataclass
class Place:
    name: str


def rows() -> Iterator[dict[str, Any]]:
    for number in range(10):
        yield {"id": f"row {number}", "prompt": f"{number} + 1 =", "expected": number + 1}


def batch(llm: Client) -> list[str]:
    sampling = Sampling(n=8, temperature=0.7, stop=["\n"], logit_bias={7: -100})
    results = llm.generate(["Once", [1, 2, 3]], sampling, structured_outputs={"regex": "a+"}, user="a")
    assert_type(results, Results[Any])
    same: list[Result] = results
    assert_type(same[0].parsed, Any | None)
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
    assert_type(answered, Results[City])
    assert_type(answered[0].samples, tuple[Sample[City], ...])
    assert_type(answered[0].parsed, City | None)
    assert_type(answered[0].text, str | None)
    assert_type(llm.generate("Once", schema=Place)[0].parsed, Place | None)
    assert_type(llm.generate("Once", schema={"type": "object"}, raise_on_error=True)[0].parsed, Any | None)
    assert_type(next(llm.stream(rows(), schema=City, enable_thinking=False)).parsed, City | None)
    city = answered[0].parsed
    assert city is not None, answered[0].samples[0].parse_error
    texts += [f"{city.name} {call.name}({call.arguments})" for call in answered[0].samples[0].tool_calls]
    texts += [str(result.text) for result in llm.stream(rows(), Sampling(temperature=0), key="id")]
    texts += [str(result.text) for result in llm.stream(["a text", [1, 2], messages])]
    scores = assert_type(llm.score(["2 + 2 ="], [" 4"]), list[Score])
    best = max(scores, key=lambda score: score.total)
    return [*texts, f"{best.total:.2f} {best.logprobs.sum():.2f}"]


async def streamed(llm: AsyncClient) -> AsyncIterator[str]:
    async for result in llm.stream(rows(), Sampling(max_tokens=8), key="id"):
        assert_type(result, Result[Any])
        yield str(result.text)
    results = await llm.generate("a")
    assert_type(await llm.chat(["a", [{"role": "user", "content": "b"}]], schema=Place), Results[Place])
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
    llm.chat([1])  # type: ignore[list-item]
    llm.chat([[]], schema="x")  # type: ignore[arg-type]
    llm.stream(["a"], key=3)  # type: ignore[arg-type]
    llm.map("a.csv", "out", prompt=3)  # type: ignore[call-overload]
    llm.map("a.csv", "out", prompt="a", key=3)  # type: ignore[call-overload]
    llm.generate(["a"], temperature=0)  # type: ignore[call-arg]
    llm.generate(["a"], enable_thinking=False)  # type: ignore[call-arg]
    llm.chat("a", reasoning_effort="huge")  # type: ignore[arg-type]
    llm.generate("a", schema=City)[0].parsed.nam  # type: ignore[union-attr]  # noqa: B018
    LLM(kv_cache_num_token=1)  # type: ignore[call-arg]
    LLM(kv_cache_num_tokens=[1])  # type: ignore[arg-type]
    LLM(dtype="bf17")  # type: ignore[arg-type]
    LLM(port=1)  # type: ignore[call-arg]
    llm.generate(["a"])[0].txt  # type: ignore[attr-defined]  # noqa: B018
    llm.generate(["a"])[0].text.upper()  # type: ignore[union-attr]


async def main() -> None:
    read: dict[str, Any] = {"dtype": "bf16"}
    try:
        with LLM("Qwen/Qwen3-0.6B", kv_cache_num_tokens=100_000, dtype="half", show=False, **read) as llm:
            print(llm.model, *batch(llm))
            print(llm.generate(["a"]).to_pandas(), llm.generate("a")[0].to_dict()["samples"])
    except RowsFailed as failed:
        print(failed, failed.results)
    except EngineError as error:
        print(error)
    with Client("http://127.0.0.1:10210", api_key="secret", concurrency=64) as client:
        print(*batch(client))
    async with AsyncLLM() as waiting, AsyncClient() as far:
        print([text async for text in streamed(waiting)], [text async for text in streamed(far)])
