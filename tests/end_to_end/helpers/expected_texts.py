"""What servers with much room answer in float32, and whether another server's answers are the same but for ties."""

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka
from tokasaurus.checkpoint import resolve_checkpoint
from tokasaurus.model.sampling.noise import gumbel_noise, position_keys, sequence_keys
from tokasaurus.text.tokenizer import Tokenizer

TIE = 1e-3
"""Two texts may part where the two best scores differ by less: float32 sums depend on the order of their terms."""

FLAGS = ("dtype=float32", "max_seqs_per_forward=64")
LARGE = (*FLAGS, "kv_cache_num_tokens=20000")


@dataclass(frozen=True)
class Sample:
    """One of the samples that a chat body asks for, as the server with the large cache gave it.

    token_ids: without the eos.
    """

    body: dict[str, Any]
    index: int
    text: str
    finish_reason: str
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Expected:
    """A model, the flags that serve it, transformers' copy of it, and for each body the samples and their usage."""

    flags: tuple[str, ...]
    tokenizer: Tokenizer
    oracle: PreTrainedModel
    samples: list[list[Sample]]
    usages: list[dict[str, Any]]

    def token_ids(self, choice: dict[str, Any]) -> list[int]:
        """Of a choice with log-probabilities."""
        ids = {self.tokenizer.token_bytes(token_id): token_id for token_id in range(self.tokenizer.vocab_size)}
        return [ids[bytes(token["bytes"])] for token in choice["logprobs"]["content"]]

    def scores(self, sample: Sample, num_tokens: int) -> torch.Tensor:
        """What each of the sample's first `num_tokens` tokens, and the one behind them, was the best of: float32
        [num_tokens + 1, V], the oracle's logits, with the sample's noise where it was drawn at temperature 1."""
        prompt_ids = self.tokenizer.encode_chat(sample.body["messages"])
        with torch.inference_mode():
            logits = self.oracle(torch.tensor([prompt_ids + sample.token_ids[:num_tokens]])).logits[0]
        logits = logits[len(prompt_ids) - 1 :]
        if not sample.body["temperature"]:
            return logits
        keys = sequence_keys(np.array([sample.body["seed"]], np.uint64), np.array([sample.index], np.uint32))
        positions = np.arange(len(prompt_ids), len(prompt_ids) + num_tokens + 1, dtype=np.int32)
        noise_keys = torch.from_numpy(position_keys(keys.repeat(len(positions)), positions).astype(np.int64))
        return logits + gumbel_noise(noise_keys, logits.shape[1])


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    result: dict[str, Any] = answer.json()
    return result


def ask_all_at_once(
    toka: TokaProcess, bodies: list[dict[str, Any]], leave_after: list[int] | None = None
) -> list[dict[str, Any]]:
    """The answers to `bodies`. leave_after: for each body, another client asks the same a moment before, and goes away
    when so many answers have come."""
    answers: list[dict[str, Any]] = [{}] * len(bodies)
    leaving: list[list[asyncio.Task[Any]]] = [[] for _ in range(len(bodies) + 1)]

    async def ask_all() -> None:
        async with httpx.AsyncClient(base_url=toka.url, timeout=240) as client:
            num_answers = 0

            async def ask_for(place: int) -> None:
                nonlocal num_answers
                answers[place] = await ask(client, bodies[place])
                num_answers += 1
                for task in leaving[num_answers]:
                    task.cancel()

            tasks = []
            for place, body in enumerate(bodies):
                if leave_after is not None:
                    leaving[leave_after[place]].append(asyncio.create_task(ask(client, body)))
                tasks.append(asyncio.create_task(ask_for(place)))
            await asyncio.gather(*tasks)
            await asyncio.gather(*itertools.chain(*leaving), return_exceptions=True)

    asyncio.run(ask_all())
    return answers


COUNTERS: dict[str, Callable[[dict[str, Any], int], int]] = {
    "toka_generation_tokens_total": lambda usage, _: usage["completion_tokens"],
    "toka_prompt_tokens_total": lambda usage, _: usage["prompt_tokens"],
    "toka_asked_prompt_tokens_total": lambda usage, n: n * usage["prompt_tokens"],
    "toka_prefix_cache_hit_tokens_total": lambda usage, n: (
        n * usage["prompt_tokens"] - details(usage)["computed_tokens"]
    ),
    "toka_computed_prompt_tokens_total": lambda usage, _: details(usage)["computed_tokens"],
    "toka_shared_prompt_tokens_total": lambda usage, _: details(usage)["shared_tokens"],
    "toka_recomputed_tokens_total": lambda usage, _: details(usage)["recomputed_tokens"],
}
"""What each counter is the sum of, from the usage of an answer with n samples of each prompt."""


def details(usage: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = usage["prompt_tokens_details"]
    return found


def assert_all_done_and_counted(toka: TokaProcess, answers: list[dict[str, Any]]) -> None:
    for name in ("toka_kv_blocks_used", "toka_requests_running", "toka_requests_waiting"):
        assert toka.gauge(name) == 0, name
    assert {name: toka.gauge(name) for name in COUNTERS} == {
        name: sum(count(answer["usage"], len(answer["choices"])) for answer in answers)
        for name, count in COUNTERS.items()
    }


def ask_with_much_room(
    flags: tuple[str, ...], tokenizer: Tokenizer, oracle: PreTrainedModel, bodies: list[dict[str, Any]]
) -> Expected:
    """What a server with `flags` and a large cache answers."""
    with running_toka(*LARGE, *flags) as toka:
        answers = ask_all_at_once(toka, [{**body, "logprobs": True} for body in bodies])
        assert_all_done_and_counted(toka, answers)
        assert toka.gauge("toka_preemptions_total") == 0
        assert toka.stop() == 0
    expected = Expected(flags, tokenizer, oracle, [], [answer["usage"] for answer in answers])
    for body, answer in zip(bodies, answers, strict=True):
        expected.samples.append(
            [
                Sample(
                    body=body,
                    index=choice["index"],
                    text=choice["message"]["content"],
                    finish_reason=choice["finish_reason"],
                    token_ids=expected.token_ids(choice),
                    logprobs=[token["logprob"] for token in choice["logprobs"]["content"]],
                )
                for choice in answer["choices"]
            ]
        )
    return expected


def ask_demo_model(flags: tuple[str, ...], bodies: list[dict[str, Any]]) -> Expected:
    """Real weights and text."""
    checkpoint = resolve_checkpoint(None)
    tokenizer = Tokenizer.load(checkpoint.tokenizer_directory)
    oracle = AutoModelForCausalLM.from_pretrained(checkpoint.directory, dtype=torch.float32).eval()
    return ask_with_much_room(flags, tokenizer, oracle, bodies)


def assert_tokens_are_the_best(expected: Expected, samples: Iterable[Sample]) -> None:
    """Each sample follows the oracle's scores, but for what comes after a tie."""
    for sample in samples:
        scores = expected.scores(sample, len(sample.token_ids))[:-1]
        chosen = scores.gather(1, torch.tensor(sample.token_ids).unsqueeze(1)).squeeze(1)
        behind = (scores.max(dim=1).values - chosen).tolist()
        first = next((place for place, gap in enumerate(behind) if gap > 0), None)
        assert first is None or behind[first] < TIE, f"token {first} is {behind[first]} from the best"


def num_parted(expected: Expected, answers: list[dict[str, Any]]) -> int:
    """Samples whose text is another than it should be."""
    return sum(
        has_parted(expected, sample, choice)
        for samples, answer in zip(expected.samples, answers, strict=True)
        for sample, choice in zip(samples, answer["choices"], strict=True)
    )


def has_parted(expected: Expected, sample: Sample, choice: dict[str, Any]) -> bool:
    """Whether the choice is another than the sample, which it may be after a tie alone."""
    has_same_text = (choice["message"]["content"], choice["finish_reason"]) == (sample.text, sample.finish_reason)
    if "logprobs" in sample.body:
        token_ids = expected.token_ids(choice)
        num_agreed = common_prefix(sample.token_ids, token_ids)
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert logprobs[:num_agreed] == pytest.approx(sample.logprobs[:num_agreed], abs=1e-4)
        if has_same_text:
            assert token_ids == sample.token_ids
    else:
        token_bytes = [expected.tokenizer.token_bytes(token_id) for token_id in sample.token_ids]
        num_same_bytes = common_prefix(b"".join(token_bytes), choice["message"]["content"].encode())
        num_agreed = sum(end <= num_same_bytes for end in itertools.accumulate(map(len, token_bytes)))
    if has_same_text:
        return False
    best = expected.scores(sample, num_agreed)[-1].topk(2).values
    assert best[0] - best[1] < TIE, f"texts part at token {num_agreed}, which is no tie"
    return True


def common_prefix(first: list[int] | bytes, second: list[int] | bytes) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in pairs)
