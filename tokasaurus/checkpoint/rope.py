"""Rotary settings in every spelling of config.json, with the precedence that transformers gives them.

transformers 5 writes rope_parameters, 4 wrote rope_theta and, for a scaled model, rope_scaling. A config may have both,
since people add rope_scaling by hand: it then replaces rope_parameters as a whole.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from tokasaurus.checkpoint.json_files import CheckpointError, Fields, flag, json_object, positive_float, positive_int

_KEPT = ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta")
"""Keys of a model's rotary setting that the flag rope_scaling= leaves as they are."""
MAX_CONTEXT = 1 << 24  # float32 has every position up to here
"""Far above every published model; the rotary table takes about 2 GB then."""
_MAX_THETA = 1e15
_DEFAULT_THETA = 10_000.0

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
"""The types that are applied. dynamic scales nothing in sequences of up to max_position_embeddings, and none is longer
here. In transformers longrope changes with each batch's longest sequence; here the longest sequence that the server
takes decides for all."""

ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "rope_type": ROPE_TYPES,
    "type": ROPE_TYPES,
    "rope_theta": ROPE_TYPES,
    "factor": ("linear", "dynamic", "llama3", "yarn", "longrope"),
    "original_max_position_embeddings": ("llama3", "yarn", "longrope"),
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
    "attention_factor": ("yarn", "longrope"),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "mscale": ("yarn",),
    "mscale_all_dim": ("yarn",),
    "truncate": ("yarn",),
    "partial_rotary_factor": (),
    "short_factor": ("longrope",),
    "long_factor": ("longrope",),
    "mrope_section": (),
}
"""Keys of a rotary setting -> the types that apply them. partial_rotary_factor is refused unless it is 1 or the family
applies it; the last one belongs to models with images, and has no effect on others in transformers."""


@dataclass(frozen=True, slots=True)
class RopeInfo:
    """Rotary embedding. Sources: the Llama 3.1 model card's reference code; YaRN, arXiv 2309.00071."""

    theta: float
    scaling_type: str = "default"
    """One of ROPE_TYPES; ROPE_KEYS says which fields it uses."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_context_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Factor of the cosines and sines; 1 but for "yarn" and "longrope"."""
    short_factors: tuple[float, ...] = ()
    """Of "longrope", the divisor of each frequency if no sequence is longer than original_context_length."""
    long_factors: tuple[float, ...] = ()
    """The same if sequences may be longer."""
    partial_factor: float = 1.0
    """The part of each head's channels that is rotated."""
    position_scale: float = 0.0
    """Cosines and sines are multiplied by 1 + position_scale * log(1 + position // original_context_length)."""
    position_offset: int = 0
    """Added to the position there."""

    def num_rotated(self, head_dim: int) -> int:
        """Channels of a head that are rotated."""
        return int(head_dim * self.partial_factor)

    def has_long_factors(self, longest: int) -> bool:
        """Whether the long factors apply. longest: tokens of the longest sequence that is served."""
        return self.scaling_type == "longrope" and longest > self.original_context_length

    def note(self, longest: int) -> str | None:
        """One line for the user where short sequences have other factors than in transformers."""
        if not self.has_long_factors(longest):
            return None
        original = self.original_context_length
        return (
            f"longrope's long factors, for sequences of up to {longest:,} tokens; if {original:,} are enough, "
            f"max_num_tokens_per_request={original} takes the short factors, which are better for these"
        )


def parse_rope(config: Fields, context_length: int, has_partial: bool = False) -> RopeInfo:
    """context_length: max_position_embeddings. has_partial: the family applies partial_rotary_factor. Raises
    CheckpointError, naming the field."""
    fields = rope_setting(config)
    factor = positive_float(fields, "partial_rotary_factor", 1.0, default=1.0)
    if factor != 1 and not has_partial:
        raise CheckpointError(f"partial_rotary_factor {factor!r} is not supported, only 1")
    return replace(_parse(fields, context_length), partial_factor=factor)


def _parse(fields: Fields, context_length: int) -> RopeInfo:
    rope_type = _type_of(fields)
    theta = positive_float(fields, "rope_theta", _MAX_THETA, default=_DEFAULT_THETA)
    if theta <= 1:
        raise CheckpointError(f"rope_theta must be greater than 1, not {theta!r}")
    if rope_type == "default":
        return RopeInfo(theta)
    original = positive_int(fields, "original_max_position_embeddings", MAX_CONTEXT, default=context_length)
    if rope_type == "longrope":
        return _parse_longrope(fields, theta, original, context_length)
    if "factor" not in fields:
        raise CheckpointError(f"factor is missing, which rope type {rope_type!r} needs")
    if rope_type == "dynamic":
        return RopeInfo(theta)
    if rope_type == "linear":
        return RopeInfo(theta, "linear", factor=positive_float(fields, "factor", _MAX_THETA))
    if rope_type == "llama3":
        return _parse_llama3(fields, theta, original)
    return _parse_yarn(fields, theta, original, context_length)


def extended_context_length(config: Fields, rope: RopeInfo, context_length: int) -> int:
    """Tokens of the longest sequence. YaRN is used to go beyond max_position_embeddings, which people leave as it is:
    where the original length is stated, `factor` times as long."""
    if rope.scaling_type != "yarn":
        return context_length
    of_full = json_object(config, "rope_parameters").get("full_attention")
    fields = of_full if isinstance(of_full, dict) else rope_setting(config)
    if fields.get("original_max_position_embeddings") is None:
        return context_length
    return min(max(context_length, int(rope.original_context_length * rope.factor)), MAX_CONTEXT)


def with_rope_scaling(config: Fields, scaling: Fields) -> Fields:
    """`config`, but with the rotary setting of the flag rope_scaling=, and the context length that follows from it: the
    original length times the factor. rope_theta stays unless `scaling` has one.

    The original length is the one that `scaling` states, else the model's own scaling, else max_position_embeddings.
    Raises CheckpointError, naming the key.
    """
    rope_type = _type_of(scaling)
    if rope_type == "dynamic":
        raise CheckpointError("rope type 'dynamic' changes with each sequence's length, which is not supported")
    for key in scaling:
        if rope_type not in ROPE_KEYS.get(key, ()):
            raise CheckpointError(f"{key} is not a setting of rope type {rope_type!r}")
    own = rope_setting(config)
    stated = positive_int(config, "max_position_embeddings", MAX_CONTEXT)
    own_original = positive_int(own, "original_max_position_embeddings", MAX_CONTEXT, default=stated)
    original = positive_int(scaling, "original_max_position_embeddings", MAX_CONTEXT, default=own_original)
    kept: dict[str, Any] = {name: own[name] for name in _KEPT if name in own}
    parameters: dict[str, Any] = {**kept, **scaling}
    factor = 1.0 if rope_type == "default" else positive_float(scaling, "factor", _MAX_THETA)
    longest = min(int(original * factor), MAX_CONTEXT)
    if rope_type in ROPE_KEYS["original_max_position_embeddings"]:
        parameters["original_max_position_embeddings"] = original
        longest = max(longest, stated)  # a model may be used a little beyond its original length, as Qwen3 is
    if longest < 1:
        raise CheckpointError(f"factor {factor!r} of {original} tokens leaves no context")
    replaced = ("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings")
    others = {name: value for name, value in config.items() if name not in replaced}
    new = {**others, "max_position_embeddings": longest, "rope_parameters": parameters}
    _parse(parameters, longest)
    return new


def dropped_theta(config: Fields) -> str | None:
    """One line for the user if rope_scaling replaces rope_parameters with another rope_theta, as in transformers."""
    replaced = json_object(config, "rope_parameters").get("rope_theta")
    if not json_object(config, "rope_scaling") or replaced is None:
        return None
    used = rope_setting(config).get("rope_theta", _DEFAULT_THETA)
    if replaced == used:
        return None
    return f"rope_scaling replaces rope_parameters: rope_theta is {used!r}, not {replaced!r}, as in transformers"


def _type_of(fields: Fields) -> str:
    """Raises CheckpointError if the type is not supported."""
    rope_type = fields["rope_type"] if "rope_type" in fields else fields.get("type", "default")
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(f"rope type {rope_type!r} is not supported, only {', '.join(map(repr, ROPE_TYPES))}")
    return str(rope_type)


def rope_setting(config: Fields) -> dict[str, Any]:
    """One rotary setting; keys beside it fill in what it lacks, or replace it in one case."""
    parameters = json_object(config, "rope_parameters")
    fields = dict(json_object(config, "rope_scaling") or parameters)
    if any(isinstance(value, dict) for value in fields.values()):
        raise CheckpointError("rope_parameters per layer type are not supported")
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in config:
            fields.setdefault(name, config[name])
    if config.get("original_max_position_embeddings") is not None:
        fields["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return fields


def _parse_llama3(fields: Fields, theta: float, original: int) -> RopeInfo:
    rope = RopeInfo(
        theta,
        "llama3",
        factor=positive_float(fields, "factor", _MAX_THETA),
        low_freq_factor=positive_float(fields, "low_freq_factor", _MAX_THETA),
        high_freq_factor=positive_float(fields, "high_freq_factor", _MAX_THETA),
        original_context_length=original,
    )
    if rope.high_freq_factor < rope.low_freq_factor:  # both are 1 in Llama 4 Scout: nothing is between
        raise CheckpointError("high_freq_factor must not be less than low_freq_factor")
    return rope


def _parse_yarn(fields: Fields, theta: float, original: int, context_length: int) -> RopeInfo:
    factor = positive_float(fields, "factor", _MAX_THETA, default=context_length / original)
    if fields.get("attention_factor") is not None:
        attention_factor = positive_float(fields, "attention_factor", _MAX_THETA)
    else:
        # Both are used or neither, and 0 counts as absent.
        both = bool(fields.get("mscale") and fields.get("mscale_all_dim"))
        scale = positive_float(fields, "mscale", _MAX_THETA) if both else 1.0
        scale_all = positive_float(fields, "mscale_all_dim", _MAX_THETA) if both else 0.0
        attention_factor = magnitude(factor, scale) / magnitude(factor, scale_all)
    return RopeInfo(
        theta,
        "yarn",
        factor=factor,
        original_context_length=original,
        # 0 counts as absent
        beta_fast=positive_float({"beta_fast": fields.get("beta_fast") or None}, "beta_fast", _MAX_THETA, 32.0),
        beta_slow=positive_float({"beta_slow": fields.get("beta_slow") or None}, "beta_slow", _MAX_THETA, 1.0),
        # A null is false in transformers.
        truncate="truncate" not in fields or flag(fields, "truncate"),
        attention_factor=attention_factor,
    )


def _parse_longrope(fields: Fields, theta: float, original: int, context_length: int) -> RopeInfo:
    factor = positive_float(fields, "factor", _MAX_THETA, default=context_length / original)
    own = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeInfo(
        theta,
        "longrope",
        factor=factor,
        original_context_length=original,
        attention_factor=positive_float(fields, "attention_factor", _MAX_THETA, default=own),
        short_factors=_factors(fields, "short_factor"),
        long_factors=_factors(fields, "long_factor"),
    )


def _factors(fields: Fields, name: str) -> tuple[float, ...]:
    values = fields.get(name)
    if not isinstance(values, list) or not all(type(each) in (int, float) and each > 0 for each in values):
        raise CheckpointError(f"{name} must be a list of positive numbers, not {values!r}")
    return tuple(float(each) for each in values)


def magnitude(factor: float, scale: float) -> float:
    """YaRN's factor of cosines and sines, for a `scale` called mscale or mscale_all_dim."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
