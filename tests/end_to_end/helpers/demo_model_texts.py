"""Compares greedy texts of the demo model: a server against transformers."""

import json
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.end_to_end.helpers.toka_process import TokaProcess
from tests.helpers.examples import IS_NIGHTLY
from tokasaurus.checkpoint import resolve_checkpoint, with_safetensors
from tokasaurus.commands.bench.workloads import DATA
from tokasaurus.text.tokenizer import Tokenizer

NUM_TOKENS = 40 if IS_NIGHTLY else 12


QUESTIONS = DATA / "gsm8k_test_200.jsonl"


TIE = 1e-3
"""Texts may diverge where the two best logits differ by less: float32 sums depend on the order of their terms."""


def read_questions(num_questions: int) -> list[str]:
    return [json.loads(line)["question"] for line in QUESTIONS.read_text().splitlines()[:num_questions]]


def assert_greedy_text_and_logprobs_match_transformers(toka: TokaProcess, num_prompts: int) -> None:
    questions = read_questions(num_prompts)
    client = openai.OpenAI(base_url=f"{toka.url}/v1", api_key="none", max_retries=0, timeout=300)
    # One request with a list of prompts puts all of them in flight together.
    answer = client.completions.create(
        model="default",
        prompt=questions,
        max_tokens=NUM_TOKENS,
        temperature=0,
        logprobs=2,
        extra_body={"ignore_eos": True},
    )
    checkpoint = resolve_checkpoint(None)
    tokenizer = Tokenizer.load(checkpoint.tokenizer_directory)
    model = AutoModelForCausalLM.from_pretrained(with_safetensors(checkpoint.directory), dtype=torch.float32).eval()
    expected_ids, logits = generate(model, [tokenizer.encode(text, add_special_tokens=True) for text in questions])
    num_diverged = 0
    for choice, ids, row in zip(answer.choices, expected_ids, logits, strict=True):
        expected = [tokenizer.token_text(token_id) for token_id in ids]
        answered = choice.logprobs
        assert answered is not None
        assert answered.tokens is not None
        assert answered.token_logprobs is not None
        tokens, token_logprobs = answered.tokens, answered.token_logprobs
        assert len(tokens) == NUM_TOKENS
        num_agreed = next((i for i in range(NUM_TOKENS) if tokens[i] != expected[i]), NUM_TOKENS)
        logprobs = row.log_softmax(dim=-1)
        chosen = logprobs[range(num_agreed), ids[:num_agreed]].tolist()
        assert token_logprobs[:num_agreed] == pytest.approx(chosen, abs=1e-4)
        assert answered.top_logprobs is not None
        for value, top, best in zip(token_logprobs[:num_agreed], answered.top_logprobs, logprobs, strict=False):
            assert value == max(top.values()), "the sampled token is the most likely one, with an identical float"
            if len(top) == 2:  # otherwise both tokens have the same text
                assert sorted(top.values(), reverse=True) == pytest.approx(best.topk(2).values.tolist(), abs=1e-4)
        if num_agreed < NUM_TOKENS:
            best = row[num_agreed].topk(2).values
            assert best[0] - best[1] < TIE, f"texts diverge at token {num_agreed}, which is not a tie"
            num_diverged += 1
    assert num_diverged <= 2, "ties are rare"


def generate(model: Any, prompts: list[list[int]]) -> tuple[list[list[int]], torch.Tensor]:
    """transformers' greedy generate for all prompts, padded on the left -> token ids, logits [prompts, tokens, V]."""
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    result = model.generate(
        padded,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return result.sequences[:, longest:].tolist(), torch.stack(result.logits, dim=1)
