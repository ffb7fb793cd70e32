"""What the worker is told to do to the logits of sequences that ask for it."""

from collections.abc import Iterable

import numpy as np

from tokasaurus.manager.state.sequence import Sequence
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.messages.slots import LogitRules

_ALWAYS = np.iinfo(np.int32).max


def build_logit_rules(sequences: Iterable[Sequence], eos_ids: frozenset[int]) -> LogitRules | None:
    """For those of the sequences, which have slots, that have biases, penalties, or tokens that may not come yet. None
    where there are none."""
    ruled = [s for s in sequences if s.request.sampling.changes_logits or s.request.min_tokens]
    if not ruled:
        return None
    sampling = [sequence.request.sampling for sequence in ruled]
    biases = [_biases(sequence.request, eos_ids) for sequence in ruled]
    flat = [bias for own in biases for bias in own]
    return LogitRules(
        slots=np.array([sequence.slot for sequence in ruled], np.int32),
        num_request_tokens=np.array([len(sequence.request.prompt_ids) for sequence in ruled], np.int32),
        presence=np.array([params.presence_penalty for params in sampling], np.float32),
        frequency=np.array([params.frequency_penalty for params in sampling], np.float32),
        repetition=np.array([params.repetition_penalty for params in sampling], np.float32),
        bias_counts=np.array([len(own) for own in biases], np.int32),
        bias_ids=np.array([token_id for token_id, _, _ in flat], np.int32),
        bias_values=np.array([value for _, value, _ in flat], np.float32),
        bias_ends=np.array([end for _, _, end in flat], np.int32),
    )


def _biases(request: GenerateRequest, eos_ids: frozenset[int]) -> list[tuple[int, float, int]]:
    """(token, value, tokens with which it ends to act) of each."""
    biases = [(token_id, value, _ALWAYS) for token_id, value in request.sampling.logit_bias]
    if request.min_tokens:
        enders = {*request.stop_token_ids, *(() if request.ignore_eos else eos_ids)}
        end = len(request.prompt_ids) + request.min_tokens
        biases += [(token_id, -np.inf, end) for token_id in sorted(enders)]
    return biases
