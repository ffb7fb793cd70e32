"""Logprob entries of echoed prompts: the expected entries, and the entries of an answer."""

import dataclasses
from typing import Any

import numpy as np
from openai.types import CompletionChoice

from tests.helpers.small_tokenizer import IM_END
from tests.server.helpers.fake_engine import Reply, prompt_logprobs
from tokasaurus.messages.generation import FinishReason, GenerateRequest, TopLogprobs
from tokasaurus.text.tokenizer import Tokenizer

NEW_TOKENS = [259, *"€".encode(), IM_END]  # "hello€"


CHOSEN = [-0.25, -0.5, -0.75, -1.0, -1.25]


def say_hello(request: GenerateRequest, _index: int) -> Reply:
    count, num_top = request.max_new_tokens, request.num_top_logprobs
    token_ids, logprobs = NEW_TOKENS[:count], CHOSEN[:count]
    ids = np.array([[token_id, *range(97, 96 + num_top)][:num_top] for token_id in token_ids], np.int32)
    values = np.array([value - np.arange(num_top) for value in logprobs], np.float32)
    top = TopLogprobs(ids.reshape(-1, num_top), values.reshape(-1, num_top)) if num_top else None
    reason: FinishReason = "stop" if count >= len(NEW_TOKENS) else "length"
    return Reply(token_ids, logprobs if request.want_logprobs else None, reason, top=top)


def expected_entries(request: GenerateRequest, num_top: int, tokenizer: Tokenizer) -> list[tuple[Any, ...]]:
    """(text, logprob, top-k logprobs by text) of each prompt token, from the fake engine's prompt logprobs."""
    computed = prompt_logprobs(dataclasses.replace(request, num_top_prompt_logprobs=num_top))
    entries: list[tuple[Any, ...]] = []
    for position, token_id in enumerate(request.prompt_ids.tolist()):
        if position == 0:
            entries.append((tokenizer.token_text(token_id), None, None))
            continue
        pairs = [(token_id, float(computed.logprobs[position]))]
        if num_top:
            assert computed.top is not None
            rows = (computed.top.token_ids[position].tolist(), computed.top.logprobs[position].tolist())
            pairs += zip(*rows, strict=True)
        # Ascending: of tokens with the same text, the most likely is kept.
        top = {tokenizer.token_text(other_id): value for other_id, value in sorted(pairs, key=lambda pair: pair[1])}
        entries.append((tokenizer.token_text(token_id), float(computed.logprobs[position]), top))
    return entries


def entries_of(choice: CompletionChoice) -> list[tuple[Any, ...]]:
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    return list(zip(logprobs.tokens, logprobs.token_logprobs or [], logprobs.top_logprobs or [], strict=True))
