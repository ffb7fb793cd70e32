"""Finished sequences → the answer of /inference/v1/generate: tokens, and no text."""

import time
from collections.abc import Sequence

from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.protocol.vllm_rollouts import (
    RankedToken,
    SampledToken,
    TokensAnswer,
    TokensChoice,
    TokensLogprobs,
    TokensRequest,
)
from tokasaurus.server.respond.logprobs import likely_tokens
from tokasaurus.server.respond.whole import build_usage, write_prompt_logprobs
from tokasaurus.server.served_model import ServedModel


def build_tokens_answer(
    body: TokensRequest, prepared: Prepared, results: Sequence[Sequence[FinishedSequence]], model: ServedModel
) -> TokensAnswer:
    """results: the sequences of the only request, in order."""
    (row,) = results
    choices = [
        TokensChoice(index, sequence.token_ids, sequence.finish_reason, _logprobs(sequence))
        for index, sequence in enumerate(row)
    ]
    return TokensAnswer(
        request_id=prepared.response_id if body.request_id is None else body.request_id,
        model=model.name,
        created=int(time.time()),
        choices=choices,
        prompt_logprobs=write_prompt_logprobs(0, prepared, row[0].prompt_logprobs, model),
        prompt_token_ids=prepared.requests[0].prompt_ids.tolist() if body.return_token_ids else None,
        usage=build_usage(prepared, results),
    )


def _logprobs(sequence: FinishedSequence) -> TokensLogprobs | None:
    if sequence.logprobs is None:
        return None
    tops = likely_tokens(sequence.top, len(sequence.token_ids))
    return TokensLogprobs([_sampled(*entry) for entry in zip(sequence.token_ids, sequence.logprobs, tops, strict=True)])


def _sampled(token_id: int, logprob: float, top: Sequence[tuple[int, float]]) -> SampledToken:
    """top: (token id, logprob) of the most likely tokens, most likely first."""
    ranked = [RankedToken(f"token_id:{other}", other, value, rank) for rank, (other, value) in enumerate(top, start=1)]
    rank = next((entry.rank for entry in ranked if entry.token_id == token_id), None)
    return SampledToken(f"token_id:{token_id}", token_id, logprob, rank, ranked)
