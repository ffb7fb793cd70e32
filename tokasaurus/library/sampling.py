"""How completions are sampled: the fields of the API's bodies as one value, checked when it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError

from tokasaurus.messages.generation import LogprobsMode
from tokasaurus.messages.sampling import CLIENT_PARAMETERS
from tokasaurus.server.protocol.known_fields import KNOWN_FIELDS, advice
from tokasaurus.server.protocol.sampling_fields import SamplingFields
from tokasaurus.server.value_words import told_together, words_for

AnyClass = TypeVar("AnyClass")


def _telling_names(made: type[AnyClass]) -> type[AnyClass]:
    """The same class, which says what a keyword that there is not may mean."""
    initialise: Any = made.__init__
    names = [field.name for field in dataclasses.fields(made) if field.init]  # type: ignore[arg-type]

    @wraps(initialise)
    def checked(self: AnyClass, *args: Any, **fields: Any) -> None:
        for name in fields:
            if name not in names:
                known = KNOWN_FIELDS.get(name)
                meant = f": {known.instead}" if known is not None and known.instead else advice(name, names)
                raise TypeError(f"{made.__name__} has no field {name!r}{meant}")
        initialise(self, *args, **fields)

    setattr(made, "__init__", checked)  # noqa: B010  (mypy allows no assignment)
    return made


@_telling_names
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sampling:
    """How completions are sampled. The fields mean what they mean in the HTTP API. None means the model's default, if
    its files have one and the server applies it (sampling_defaults=), else the neutral value.

    A wrong keyword raises TypeError, a wrong value raises ValueError that names it.
    """

    n: int = 1
    """Independent samples of each prompt."""
    temperature: float | None = None
    """From 0, which always takes the most likely token, to 2; neutral is 1."""
    top_p: float | None = None
    """Keep the most likely tokens that together have this probability."""
    top_k: int | None = None
    """Keep only this many most likely tokens; -1: all."""
    min_p: float | None = None
    """Keep tokens that are at least this many times as likely as the most likely one."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the completion already contains; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that the completion contains the token; -2 to 2."""
    repetition_penalty: float | None = None
    """Divides the logits of tokens of the prompt and the completion; negative ones are multiplied."""
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Added to the logits of these token ids; -100 to 100."""
    max_tokens: int | None = None
    """Most tokens of a completion. None: 256 for prompts, and for chats what the model's context leaves."""
    min_tokens: int = 0
    """Fewest tokens of a completion."""
    stop: str | Sequence[str] = ()
    """Strings before which the text ends."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the text, beside the model's own end token."""
    ignore_eos: bool = False
    """The model's end token does not end the text."""
    seed: int | None = None
    """From 0 to 2**64 - 1. None: a random one for each prompt, which each sample tells."""
    logprobs: bool = True
    """Whether samples have log-probabilities."""
    top_logprobs: int = 0
    """How many of the most likely tokens at each position samples have, with their log-probabilities."""
    logprobs_mode: LogprobsMode | None = None
    """Of which distribution: "raw", the model's own, or "sampled", the one that the token was drawn from. None: as the
    server's flag says."""
    priority: int = 0
    """Of one client's waiting requests, lower values start first. Each call is a client, unless the server has several
    keys."""
    adapter: str | None = None
    """Name of the adapter that answers; None: the model itself."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.generic):
                object.__setattr__(self, field.name, value.item())
        problems = list(self._problems())
        if problems:
            raise ValueError(f"Sampling: {told_together(problems)}")

    def __repr__(self) -> str:
        given = {name: getattr(self, name) for name in _DEFAULTS if getattr(self, name) != _DEFAULTS[name]}
        return f"Sampling({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def _problems(self) -> Iterator[str]:
        if type(self.logprobs) is not bool:
            yield f"logprobs must be True or False, not {self.logprobs!r}"
        if type(self.top_logprobs) is not int or self.top_logprobs < 0:
            yield f"top_logprobs must be a whole number from 0, not {self.top_logprobs!r}"
        elif self.top_logprobs and not self.logprobs:
            yield "top_logprobs goes with logprobs=True"
        if self.adapter is not None and not (isinstance(self.adapter, str) and self.adapter):
            yield f"adapter must be a name, not {self.adapter!r}"
        if self.seed is not None and not (type(self.seed) is int and 0 <= self.seed < 1 << 64):
            yield f"seed must be a whole number from 0 to 2**64 - 1, not {self.seed!r}"
        fields = self._written_fields()  # with the defaults, since True equals 1
        if isinstance(self.logit_bias, Mapping):
            fields["logit_bias"] = _written_biases(self.logit_bias)
        else:
            yield f"logit_bias must map token ids to numbers, not {self.logit_bias!r}"
        try:
            SamplingFields.model_validate({"model": "default", **fields})
        except ValidationError as error:
            for details in error.errors(include_url=False):
                yield f"{details['loc'][0]} {words_for(details)}, not {details['input']!r}"
            return
        if min(self.stop_token_ids, default=0) < 0:
            yield f"stop_token_ids: {min(self.stop_token_ids)} is no token id"
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            yield f"min_tokens must be at most max_tokens={self.max_tokens}, not {self.min_tokens}"

    def shared_fields(self) -> dict[str, Any]:
        """The fields of bodies that differ from their defaults and that both endpoints have; without the seed, which
        is no part of what is asked if it is random."""
        fields = {name: value for name, value in self._written_fields().items() if value != _WRITTEN_DEFAULTS[name]}
        if self.logit_bias:
            fields["logit_bias"] = _written_biases(self.logit_bias)
        if self.seed is not None:
            fields["seed"] = self.seed
        return fields

    def _written_fields(self) -> dict[str, Any]:
        # Equal requests are written equally, since `map` compares them.
        return {
            field.name: _written(getattr(self, field.name), _USUAL.get(field.name, field.default))
            for field in dataclasses.fields(self)
            if field.name not in _OWN_FIELDS
        }


def _written_biases(biases: Mapping[int, float]) -> dict[str, float]:
    return {str(token_id): bias for token_id, bias in biases.items()}


def _written(value: object, default: object) -> object:
    """A field's value as JSON has it, if it is of a type that is allowed."""
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if isinstance(default, tuple):
        if isinstance(value, set | frozenset):
            return sorted(value, key=str)
        return [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else value
    return value


_DEFAULTS = {
    field.name: {} if field.default is dataclasses.MISSING else field.default for field in dataclasses.fields(Sampling)
}
_USUAL = {name: parameter.default for name, parameter in CLIENT_PARAMETERS.items()}
# Written in another way, or into each body.
_OWN_FIELDS = ("logprobs", "top_logprobs", "logit_bias", "seed", "adapter")
_WRITTEN_DEFAULTS = {field.name: _written(field.default, field.default) for field in dataclasses.fields(Sampling)}
