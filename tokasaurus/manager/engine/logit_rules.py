"""Build the logit rules for the worker: biases, penalties and tokens that are forbidden at first."""

from collections.abc import Iterable

import numpy as np

from tokasaurus.manager.state.sequence import Sequence
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.messages.slots import LogitRules

_NO_END = np.iinfo(np.int32).max
"""End of a bias that applies to every token of the sequence."""


def build_logit_rules(sequences: Iterable[Sequence], eos_ids: frozenset[int]) -> LogitRules | None:
    """Rules for the sequences with logit biases, penalties or min_tokens; None if there are none.

    Precondition: every sequence has a slot.
    """
    ruled = [s for s in sequences if s.request.sampling.has_penalties or s.request.logit_bias or s.request.min_tokens]
    if not ruled:
        return None
    biases = [_biases(sequence.request, eos_ids) for sequence in ruled]
    flat = [bias for own in biases for bias in own]
    return LogitRules(
        slots=np.array([sequence.slot for sequence in ruled], np.int32),
        num_request_tokens=np.array([len(sequence.request.prompt_ids) for sequence in ruled], np.int32),
        bias_counts=np.array([len(own) for own in biases], np.int32),
        bias_ids=np.array([token_id for token_id, _, _ in flat], np.int32),
        bias_values=np.array([value for _, value, _ in flat], np.float32),
        bias_ends=np.array([end for _, _, end in flat], np.int32),
    )


def _biases(request: GenerateRequest, eos_ids: frozenset[int]) -> list[tuple[int, float, int]]:
    """(token id, bias, end) each: a bias applies while prompt and completion together have fewer than `end` tokens."""
    biases = [(token_id, value, _NO_END) for token_id, value in request.logit_bias]
    if request.min_tokens:
        end_ids = {*request.stop_token_ids, *(() if request.ignore_eos else eos_ids)}
        end = len(request.prompt_ids) + request.min_tokens
        biases += [(token_id, -np.inf, end) for token_id in sorted(end_ids)]
    return biases
