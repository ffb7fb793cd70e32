"""Sampling parameters: the one list of them, with types and defaults, for every process."""

from typing import NamedTuple, get_type_hints

import numpy as np


class SamplingParams(NamedTuple):
    """How a sequence's tokens are sampled. The defaults sample from the model's own distribution.

    A request carries one; the worker has one per slot, as a row of SAMPLING_DTYPE. Two readers give a field its effect:
    model/sampling for torch, by name, and csrc/sampling for the CPU, whose struct SamplingParams has the same fields.

    Filters apply in the order min_p, top_k, top_p. Penalties apply to greedy sampling too, after logit biases, with
    vLLM's formulas and order.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keeps the most likely tokens that together reach this share of the remaining probability; 1 keeps all."""
    top_k: int = 0
    """Keeps this many of the most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keeps tokens whose probability is at least min_p times the most likely token's; 0 keeps all."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token generated so far."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it was generated."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or generated so far."""

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


SAMPLING_DTYPE = np.dtype(
    [(name, {float: np.float32, int: np.int32}[kind]) for name, kind in get_type_hints(SamplingParams).items()]
)
"""SamplingParams as a row of an array: np.array(list of SamplingParams, SAMPLING_DTYPE). Every field has 4 bytes."""
