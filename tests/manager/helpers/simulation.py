"""A slow oracle for what each sequence generates: token by token, without batches, blocks or steps."""

import codecs
import dataclasses
import zlib
from collections.abc import Collection, Container, Iterable, Sequence

import numpy as np

from tests.manager.helpers.fake_grammars import EOS_ID, TOKEN_BYTES, VOCAB_SIZE, allowed_tokens
from tests.manager.helpers.fake_prompt_logprobs import assert_prompt_logprobs_are_true
from tokasaurus.messages.generation import FinishReason, GenerateRequest, SequenceDelta, TopLogprobs
from tokasaurus.text.token_decoder import PromptTail


def decode_text(token_ids: list[int]) -> str:
    """Text of the fake vocabulary: tokens have several characters, characters several tokens, and eos has no text."""
    return b"".join(TOKEN_BYTES[token_id] for token_id in token_ids).decode("utf-8", "replace")


def prompt_tail(prompt_ids: Sequence[int]) -> PromptTail:
    """All of the prompt, and the complete characters of its text."""
    prompt = b"".join(TOKEN_BYTES[token_id] for token_id in prompt_ids)
    return PromptTail(tuple(prompt_ids), len(codecs.getincrementaldecoder("utf-8")("replace").decode(prompt)))


def draw(
    context: list[int],
    seed: int,
    sample_index: int,
    forbidden: Container[int] = (),
    allowed: Collection[int] = range(VOCAB_SIZE),
) -> tuple[int, float]:
    """Returns the token that follows `context` and its fake log-probability. One token in 48 is eos.

    If every allowed token is forbidden, an allowed one is drawn nevertheless."""
    if all(token_id in forbidden for token_id in allowed):
        forbidden = ()
    number = zlib.crc32(np.array([seed, sample_index, *context], np.uint64).tobytes())
    token_id = number % VOCAB_SIZE
    if token_id == EOS_ID and number // VOCAB_SIZE % 4:
        token_id = 1 + number // 1024 % (VOCAB_SIZE - 1)
    while token_id in forbidden or token_id not in allowed:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id, -(number % 1024) / 1024


def most_likely(token_ids: list[int], logprobs: list[float], count: int) -> TopLogprobs:
    """The fake top-k logprobs at each position; the most likely token is the drawn one."""
    shape = len(token_ids), 1
    ids = (np.array(token_ids, np.int32).reshape(shape) + np.arange(count, dtype=np.int32)) % VOCAB_SIZE
    values = np.array(logprobs, np.float32).reshape(shape) - np.arange(count, dtype=np.float32)
    return TopLogprobs(ids.astype(np.int32), values.astype(np.float32))


def simulate(request: GenerateRequest, index: int) -> tuple[list[int], list[float], FinishReason]:
    """Token ids, logprobs and finish reason that one sequence must have."""
    token_ids: list[int] = []
    logprobs: list[float] = []
    if request.max_new_tokens == 0:
        return token_ids, logprobs, "length"
    while True:
        context = [*request.prompt_ids.tolist(), *token_ids]
        ending_ids = {*request.stop_token_ids, *([] if request.ignore_eos else [EOS_ID])}
        forbidden = ending_ids if len(token_ids) < request.min_tokens else ()
        grammar, allowed = request.grammar, set(range(VOCAB_SIZE))
        if grammar:
            allowed = allowed_tokens(grammar, token_ids, request.ignore_eos)
        token_id, logprob = draw(context, request.seed, index, forbidden, allowed)
        token_ids.append(token_id)
        logprobs.append(logprob)
        if token_id in ending_ids or (grammar and token_id == EOS_ID):
            return token_ids, logprobs, "stop"
        if request.stop_strings and _has_stop_string(request, token_ids):
            return token_ids, logprobs, "stop"
        if grammar and allowed_tokens(grammar, token_ids, request.ignore_eos) <= {EOS_ID}:
            return token_ids, logprobs, "stop"
        if len(token_ids) == request.max_new_tokens:
            return token_ids, logprobs, "length"


def _has_stop_string(request: GenerateRequest, token_ids: list[int]) -> bool:
    tail = prompt_tail(request.prompt_ids.tolist())
    text, exempt_text = (
        decode_text([*tail.token_ids, *ids])[tail.num_characters :]
        for ids in (token_ids, token_ids[: request.min_tokens])
    )
    num_exempt = len(exempt_text) if request.min_tokens else 0
    occurrences = [(start, stop) for stop in request.stop_strings for start in range(len(text))]
    return any(text.startswith(stop, start) and start + len(stop) > num_exempt for start, stop in occurrences)


def assert_equals_simulation(deltas: list[SequenceDelta], requests: list[GenerateRequest]) -> None:
    """Every delta is the complete, correct result of a different sequence of `requests`."""
    by_id = {request.request_id: request for request in requests}
    assert len({(delta.request_id, delta.sequence_index) for delta in deltas}) == len(deltas)
    for delta in deltas:
        request = by_id[delta.request_id]
        token_ids, logprobs, finish_reason = simulate(request, delta.sequence_index)
        assert (delta.token_ids, delta.finish_reason) == (token_ids, finish_reason)
        assert delta.logprobs == (logprobs if request.want_logprobs else None)
        assert (delta.prompt_logprobs is not None) == (request.want_prompt_logprobs and delta.sequence_index == 0)
        if delta.prompt_logprobs is not None:
            assert_prompt_logprobs_are_true(
                delta.prompt_logprobs, request.prompt_ids.tolist(), request.num_top_prompt_logprobs
            )


def join(deltas: Iterable[SequenceDelta]) -> list[SequenceDelta]:
    """Merges streamed deltas into one per sequence. No delta may follow a last one."""
    joined: dict[tuple[str, int], SequenceDelta] = {}
    for delta in deltas:
        before = joined.get((delta.request_id, delta.sequence_index))
        if before is not None:
            assert before.finish_reason is None, "a delta after the last one"
            logprobs = None if delta.logprobs is None else [*(before.logprobs or []), *delta.logprobs]
            assert delta.prompt_logprobs is None, "prompt logprobs after the first delta"
            delta = dataclasses.replace(
                delta,
                token_ids=before.token_ids + delta.token_ids,
                logprobs=logprobs,
                prompt_logprobs=before.prompt_logprobs,
            )
        assert delta.logprobs is None or len(delta.logprobs) == len(delta.token_ids)
        joined[delta.request_id, delta.sequence_index] = delta
    return list(joined.values())
