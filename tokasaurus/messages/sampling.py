"""The sampling parameters, for every process and every way to give them. Imports little: the help of flags reads it."""

import math
from dataclasses import dataclass
from typing import NamedTuple


class SamplingParams(NamedTuple):
    """How a sequence's tokens are sampled. The defaults sample from the model's own distribution.

    A request carries one; the worker has one per slot, as a row of SAMPLING_DTYPE. RULES in model/sampling/rules.py
    says in which order they apply. Two readers give a field its effect: model/sampling for torch, by name, and
    csrc/sampling for the CPU, whose struct SamplingParams has the same fields. Penalties have vLLM's formulas, and
    apply to greedy sampling too.
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
        return any(getattr(self, name) != self._field_defaults[name] for name in PENALTIES)


NEUTRAL = SamplingParams()
"""Changes nothing."""

GENERATE_TOKENS = 256
"""Most tokens of a completion without a chat template, where a program's call leaves it open."""

LIMITS = ("min_p", "top_k", "top_p")
"""The fields that exclude unlikely tokens, in this order. A value other than its default switches one on."""

MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The fields for which a model's files may have a value, where a request has none. These are also the ones that vLLM
reads from them."""

PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
"""The fields that make tokens of the context less likely. The same holds for their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientParameter:
    """A sampling parameter as clients give it: in a body, as a field of the library's Sampling, as a flag; with values
    that have an effect, for examples in the docs, the warm-up, checks of a start and tests."""

    default: float
    meaning: str
    """What it does, after its name."""
    minimum: float
    excludes_minimum: bool = False
    maximum: float | None = None

    strong: float
    """A value that changes most tokens."""
    weak: float
    """A value that changes few tokens: a limit leaves many of them, which takes a sampler the most work."""

    def allows(self, value: float) -> bool:
        """Whether a number is in the range."""
        is_above = value > self.minimum if self.excludes_minimum else value >= self.minimum
        return is_above and value <= (math.inf if self.maximum is None else self.maximum) and not math.isinf(value)

    @property
    def range(self) -> str:
        """The allowed values, in words."""
        number = "a whole number" if isinstance(self.default, int) else "a number"
        lowest = f"greater than {self.minimum:g}" if self.excludes_minimum else f"from {self.minimum:g}"
        return f"{number} {lowest}{'' if self.maximum is None else f', at most {self.maximum:g}'}"


CLIENT_PARAMETERS = {
    "temperature": ClientParameter(
        default=NEUTRAL.temperature,
        meaning="divides logits; 0 always takes the most likely token",
        minimum=0,
        maximum=2,
        strong=0.3,
        weak=0.9,
    ),
    "top_p": ClientParameter(
        default=NEUTRAL.top_p,
        meaning="keeps the most likely tokens that together have this probability",
        minimum=0,
        excludes_minimum=True,
        maximum=1,
        strong=0.3,
        weak=0.9,
    ),
    "top_k": ClientParameter(
        default=-1, meaning="keeps this many most likely tokens; -1 keeps all", minimum=-1, strong=2, weak=2000
    ),
    "min_p": ClientParameter(
        default=NEUTRAL.min_p,
        meaning="keeps tokens at least this many times as likely as the most likely one",
        minimum=0,
        maximum=1,
        strong=0.5,
        weak=0.01,
    ),
    "presence_penalty": ClientParameter(
        default=NEUTRAL.presence_penalty,
        meaning="is subtracted from the logit of tokens that the answer has already",
        minimum=-2,
        maximum=2,
        strong=-2.0,
        weak=0.5,
    ),
    "frequency_penalty": ClientParameter(
        default=NEUTRAL.frequency_penalty,
        meaning="is subtracted for each time that the answer has the token",
        minimum=-2,
        maximum=2,
        strong=2.0,
        weak=0.5,
    ),
    "repetition_penalty": ClientParameter(
        default=NEUTRAL.repetition_penalty,
        meaning="divides the logits of tokens of prompt and answer",
        minimum=0,
        excludes_minimum=True,
        strong=2.0,
        weak=1.2,
    ),
}
"""Each field of SamplingParams, by its name."""


def show_changed(params: SamplingParams) -> str:
    """The fields that are not at their defaults, as `temperature 0.2, top_p 0.9`; "" if all are."""
    changed = (name for name in params._fields if getattr(params, name) != params._field_defaults[name])
    return ", ".join(f"{name} {getattr(params, name):g}" for name in changed)
