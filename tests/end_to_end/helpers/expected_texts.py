"""Expected answers, from servers with a large KV cache in float32; other answers may differ from them at ties only."""

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
from tokasaurus.checkpoint import resolve_checkpoint, with_safetensors
from tokasaurus.model.sampling.noise import gumbel_noise, position_keys, sequence_keys
from tokasaurus.text.tokenizer import Tokenizer

TIE = 1e-3
"""Texts may diverge where the two best logits differ by less: float32 sums depend on the order of their terms."""

FLAGS = ("dtype=float32", "max_seqs_per_forward=64")
LARGE = (*FLAGS, "kv_cache_num_tokens=20000")


@dataclass(frozen=True)
class Sample:
    """One of the samples that a chat body requests, as the server with the large cache answered it."""

    body: dict[str, Any]
    index: int
    text: str
    finish_reason: str
    token_ids: list[int]
    """Without the eos."""
    logprobs: list[float]


@dataclass(frozen=True)
class Expected:
    """A model and the expected answers to a list of bodies."""

    flags: tuple[str, ...]
    """Flags of `toka` that serve the model."""
    tokenizer: Tokenizer
    oracle: PreTrainedModel
    """The same weights in transformers."""
    samples: list[list[Sample]]
    """The samples of each body."""
    usages: list[dict[str, Any]]
    """The usage of each body's answer."""

    def token_ids(self, choice: dict[str, Any]) -> list[int]:
        """Token ids of a choice that has logprobs."""
        ids = {self.tokenizer.token_bytes(token_id): token_id for token_id in range(self.tokenizer.vocab_size)}
        return [ids[bytes(token["bytes"])] for token in choice["logprobs"]["content"]]

    def noisy_logits(self, sample: Sample, num_tokens: int) -> torch.Tensor:
        """float32 [num_tokens + 1, V]: the logits whose maxima are the sample's first `num_tokens` tokens and the next.

        They are the oracle's logits, plus the sample's Gumbel noise at temperature 1.
        """
        prompt_ids = self.tokenizer.encode_chat(sample.body["messages"])
        with torch.inference_mode():
            logits: torch.Tensor = self.oracle(torch.tensor([prompt_ids + sample.token_ids[:num_tokens]])).logits[0]
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
    toka: TokaProcess, bodies: list[dict[str, Any]], disconnect_after: list[int] | None = None
) -> list[dict[str, Any]]:
    """The answers to `bodies`.

    disconnect_after: for each body, another client first sends the same request, and disconnects after so many answers.
    """
    answers: list[dict[str, Any]] = [{}] * len(bodies)
    disconnecting: list[list[asyncio.Task[Any]]] = [[] for _ in range(len(bodies) + 1)]

    async def ask_all() -> None:
        async with httpx.AsyncClient(base_url=toka.url, timeout=240) as client:
            num_answers = 0

            async def ask_for(index: int) -> None:
                nonlocal num_answers
                answers[index] = await ask(client, bodies[index])
                num_answers += 1
                for task in disconnecting[num_answers]:
                    task.cancel()

            tasks = []
            for index, body in enumerate(bodies):
                if disconnect_after is not None:
                    disconnecting[disconnect_after[index]].append(asyncio.create_task(ask(client, body)))
                tasks.append(asyncio.create_task(ask_for(index)))
            await asyncio.gather(*tasks)
            await asyncio.gather(*itertools.chain(*disconnecting), return_exceptions=True)

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
"""By how much an answer increases each counter, from its usage and n, the number of samples of each prompt."""


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


def ask_large_cache_server(
    flags: tuple[str, ...], tokenizer: Tokenizer, oracle: PreTrainedModel, bodies: list[dict[str, Any]]
) -> Expected:
    """The answers of a server with `flags` and a large cache."""
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
    """As `ask_large_cache_server`, with the demo model: real weights and text."""
    checkpoint = resolve_checkpoint(None)
    tokenizer = Tokenizer.load(checkpoint.tokenizer_directory)
    oracle = AutoModelForCausalLM.from_pretrained(with_safetensors(checkpoint.directory), dtype=torch.float32).eval()
    return ask_large_cache_server(flags, tokenizer, oracle, bodies)


def assert_tokens_match_oracle(expected: Expected, samples: Iterable[Sample]) -> None:
    """Asserts that each sample's tokens have the best noisy logits, up to the first tie."""
    for sample in samples:
        logits = expected.noisy_logits(sample, len(sample.token_ids))[:-1]
        chosen = logits.gather(1, torch.tensor(sample.token_ids).unsqueeze(1)).squeeze(1)
        gaps = (logits.max(dim=1).values - chosen).tolist()
        first = next((index for index, gap in enumerate(gaps) if gap > 0), None)
        assert first is None or gaps[first] < TIE, f"token {first} is {gaps[first]} below the best"


def num_diverged(expected: Expected, answers: list[dict[str, Any]]) -> int:
    """Number of samples whose text is not the expected one. Asserts that they diverge at ties only."""
    return sum(
        has_diverged(expected, sample, choice)
        for samples, answer in zip(expected.samples, answers, strict=True)
        for sample, choice in zip(samples, answer["choices"], strict=True)
    )


def has_diverged(expected: Expected, sample: Sample, choice: dict[str, Any]) -> bool:
    """Whether the choice differs from the sample. Asserts that it does so only after a tie."""
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
    best = expected.noisy_logits(sample, num_agreed)[-1].topk(2).values
    assert best[0] - best[1] < TIE, f"texts diverge at token {num_agreed}, which is not a tie"
    return True


def common_prefix(first: list[int] | bytes, second: list[int] | bytes) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in pairs)
