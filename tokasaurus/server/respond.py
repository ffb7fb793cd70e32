"""Finished sequences → OpenAI's completion objects. Plain functions, no server; they detokenize."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tokasaurus.messages.generation import FinishReason, GenerateRequest
from tokasaurus.server.engine_client import FinishedSequence
from tokasaurus.server.logprobs import build_chat_logprobs, build_completion_logprobs, token_offsets
from tokasaurus.server.prepare import Prepared
from tokasaurus.server.protocol.chat import AssistantMessage, ChatChoice, ChatCompletion, ChatLogprobs
from tokasaurus.server.protocol.completions import Completion, CompletionChoice, CompletionLogprobs
from tokasaurus.server.protocol.usage import PromptTokensDetails, Usage
from tokasaurus.server.served_model import ServedModel
from tokasaurus.text.stop_strings import find_first_stop


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the client sees of one sequence.

    token_ids: those whose text is returned, at least in part; neither eos nor what follows a stop string's start.
    logprobs, offsets: one per token; None where log-probabilities were not asked.
    """

    text: str
    finish_reason: FinishReason
    token_ids: list[int]
    logprobs: list[float] | None
    offsets: list[int] | None


def build_completion(
    prepared: Prepared, results: Sequence[Sequence[FinishedSequence]], model: ServedModel
) -> Completion:
    """results: the sequences of each of `prepared.requests`."""
    answers = _all_answers(prepared, results, model)
    return Completion(
        id=prepared.response_id,
        object="text_completion",
        created=int(time.time()),
        model=model.name,
        system_fingerprint=model.system_fingerprint,
        choices=[
            CompletionChoice(index, answer.text, _completion_logprobs(answer, model), answer.finish_reason)
            for index, answer in enumerate(answers)
        ],
        usage=build_usage(prepared, results),
    )


def build_chat_completion(
    prepared: Prepared, results: Sequence[Sequence[FinishedSequence]], model: ServedModel
) -> ChatCompletion:
    """results: the sequences of each of `prepared.requests`."""
    answers = _all_answers(prepared, results, model)
    return ChatCompletion(
        id=prepared.response_id,
        object="chat.completion",
        created=int(time.time()),
        model=model.name,
        system_fingerprint=model.system_fingerprint,
        choices=[
            ChatChoice(index, AssistantMessage(answer.text), _chat_logprobs(answer, model), answer.finish_reason)
            for index, answer in enumerate(answers)
        ],
        usage=build_usage(prepared, results),
    )


def build_usage(prepared: Prepared, results: Sequence[Sequence[FinishedSequence]]) -> Usage:
    prompt_tokens = sum(len(request.prompt_ids) for request in prepared.requests)
    all_sequences = [sequence for sequences in results for sequence in sequences]
    completion_tokens = sum(len(sequence.token_ids) for sequence in all_sequences)
    # Each sequence computes its prompt from its first token that is not cached: the one that read the fewest computed
    # all that had to be, and what its siblings read of that was no saving of an earlier request's.
    cached_tokens = sum(min(sequence.num_cached_tokens for sequence in sequences) for sequences in results)
    details = PromptTokensDetails(
        cached_tokens,
        computed_tokens=sum(sequence.num_computed_tokens for sequence in all_sequences),
        shared_tokens=sum(sequence.num_shared_tokens for sequence in all_sequences),
        recomputed_tokens=sum(sequence.num_recomputed_tokens for sequence in all_sequences),
    )
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


def without_end_token(token_ids: list[int], request: GenerateRequest, model: ServedModel) -> list[int]:
    """token_ids: the last of a sequence that has ended, without the eos or stop token id that ended it: no text."""
    ends = request.stop_token_ids if request.ignore_eos else (*request.stop_token_ids, *model.eos_ids)
    return token_ids[:-1] if token_ids and token_ids[-1] in ends else token_ids


def num_exempt_characters(token_ids: list[int], request: GenerateRequest, model: ServedModel) -> int:
    """Of the text of a sequence's tokens, those in which no stop string counts."""
    return len(model.tokenizer.decode(token_ids[: request.min_tokens])) if request.min_tokens else 0


def _all_answers(
    prepared: Prepared, results: Sequence[Sequence[FinishedSequence]], model: ServedModel
) -> list[_Answer]:
    return [
        _answer(sequence, request, model)
        for request, sequences in zip(prepared.requests, results, strict=True)
        for sequence in sequences
    ]


def _answer(sequence: FinishedSequence, request: GenerateRequest, model: ServedModel) -> _Answer:
    token_ids = without_end_token(sequence.token_ids, request, model)
    text = model.tokenizer.decode(token_ids)
    finish_reason = sequence.finish_reason
    stop = None
    if request.stop_strings:
        num_exempt = num_exempt_characters(token_ids, request, model)
        stop = find_first_stop(text, request.stop_strings, num_exempt)
    if stop is not None:
        text = text[: stop[0]]
        finish_reason = "stop"
    if not request.want_logprobs:
        return _Answer(text, finish_reason, token_ids, None, None)
    assert sequence.logprobs is not None, "the engine returns log-probabilities where they are asked"
    offsets = token_offsets(token_ids, model.tokenizer)
    if stop is not None:
        offsets = [offset for offset in offsets if offset < stop[0]]  # offsets never fall
        token_ids = token_ids[: len(offsets)]
    return _Answer(text, finish_reason, token_ids, sequence.logprobs[: len(token_ids)], offsets)


def _completion_logprobs(answer: _Answer, model: ServedModel) -> CompletionLogprobs | None:
    if answer.logprobs is None or answer.offsets is None:
        return None
    return build_completion_logprobs(answer.token_ids, answer.logprobs, answer.offsets, model.tokenizer)


def _chat_logprobs(answer: _Answer, model: ServedModel) -> ChatLogprobs | None:
    if answer.logprobs is None:
        return None
    return build_chat_logprobs(answer.token_ids, answer.logprobs, model.tokenizer)
