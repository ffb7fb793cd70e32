"""Logprobs of echoed prompts, expected and found."""

import dataclasses
from typing import Any

import numpy as np
from openai.types import CompletionChoice

from tests.helpers.small_tokenizer import IM_END
from tests.server.helpers.fake_engine import Reply, prompt_logprobs
from tokasaurus.messages.generation import GenerateRequest, TopLogprobs
from tokasaurus.text.tokenizer import Tokenizer

NEW_TOKENS = [259, *"€".encode(), IM_END]  # "hello€"


CHOSEN = [-0.25, -0.5, -0.75, -1.0, -1.25]


def say_hello(request: GenerateRequest, _index: int) -> Reply:
    count, num_top = request.max_new_tokens, request.num_top_logprobs
    token_ids, logprobs = NEW_TOKENS[:count], CHOSEN[:count]
    ids = np.array([[token_id, *range(97, 96 + num_top)][:num_top] for token_id in token_ids], np.int32)
    values = np.array([value - np.arange(num_top) for value in logprobs], np.float32)
    top = TopLogprobs(ids.reshape(-1, num_top), values.reshape(-1, num_top)) if num_top else None
    reason = "stop" if count >= len(NEW_TOKENS) else "length"
    return Reply(token_ids, logprobs if request.want_logprobs else None, reason, top=top)


def expected_entries(request: GenerateRequest, num_top: int, tokenizer: Tokenizer) -> list[tuple[Any, ...]]:
    """Text, log-probability and likeliest tokens of each token of a prompt, from what the engine says of it."""
    computed = prompt_logprobs(dataclasses.replace(request, num_top_prompt_logprobs=num_top))
    entries: list[tuple[Any, ...]] = []
    for place, token_id in enumerate(request.prompt_ids.tolist()):
        if place == 0:
            entries.append((tokenizer.token_text(token_id), None, None))
            continue
        top: dict[str, float] | None = None
        if num_top:
            assert computed.top is not None
            pairs = list(
                zip(computed.top.token_ids[place].tolist(), computed.top.logprobs[place].tolist(), strict=True)
            )
            pairs.append((token_id, float(computed.logprobs[place])))
            top = {}
            for other_id, value in sorted(pairs, key=lambda pair: pair[1]):  # the likeliest of those alike comes last
                top[tokenizer.token_text(other_id)] = value
        entries.append((tokenizer.token_text(token_id), float(computed.logprobs[place]), top))
    return entries


def entries_of(choice: CompletionChoice) -> list[tuple[Any, ...]]:
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    tops = logprobs.top_logprobs or [None] * len(logprobs.tokens)
    return list(zip(logprobs.tokens, logprobs.token_logprobs or [], tops, strict=True))
