"""Fields shared by completions and chat bodies, and the validators both use.

Null means the default for every optional field: OpenAI's clients send it. An unimplemented field is declared with
`Only(...)`: neutral values are accepted, any other value is refused with an error that names the field.
Token ids are compared with the vocabulary later.
"""

import re
from typing import Annotated, Any

import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from tokasaurus.messages.generation import MAX_STOP_TOKEN_IDS
from tokasaurus.server.protocol.grammar_fields import (
    GuidedChoice,
    GuidedGrammar,
    GuidedJson,
    GuidedRegex,
    ResponseFormat,
    StructuredOutputs,
)


class StrictObject(BaseModel):
    """Types are strict; an unknown field is refused with an error that names it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_field(cls, value: object) -> object:
        """Drop the others: pydantic would create an error for each, and there may be a million."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        unknown = next(name for name in value if name not in cls.model_fields)
        return {name: value[name] for name in (*cls.model_fields, unknown) if name in value}


MAX_CACHE_SALT_BYTES = 1024  # in UTF-8
MAX_LOGIT_BIASES = 1024
_LARGEST_BIAS = 100

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)  # exactly one spelling of each id


def value_error(message: str) -> PydanticCustomError:
    """For validators. message: follows the field's name, such as "must not be empty"; must not contain braces."""
    return PydanticCustomError("value_not_allowed", message)


class Only:
    """Metadata of an unimplemented field: accepts only these neutral values (same type, same value)."""

    def __init__(self, *neutral: object) -> None:
        self._neutral = neutral

    def __get_pydantic_core_schema__(self, _source: object, _handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": list(self._neutral), "description": "Not implemented: only these neutral values."}

    def _check(self, value: object) -> object:
        # compare types too: 0 == False == 0.0 in Python
        if any(type(value) is type(neutral) and value == neutral for neutral in self._neutral):
            return value
        allowed = " and ".join(orjson.dumps(neutral).decode() for neutral in self._neutral)
        message = "is not implemented beyond {allowed}"
        raise PydanticCustomError("not_implemented", message, {"allowed": allowed})


class NullMeans:
    """Metadata of a field, placed last: reads an explicit null as the default, and documents null in OpenAPI."""

    def __init__(self, default: object) -> None:
        self._default = default

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            lambda value: self._default if value is None else value, handler(source)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [handler(schema), {"type": "null"}]}


def _parse_stop(value: object) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise value_error("must be a string or a list of strings")
    if "" in stops:
        raise value_error("must not contain an empty string")
    return tuple(stops)


StopStrings = Annotated[
    tuple[str, ...],
    PlainValidator(_parse_stop),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}},
                {"type": "null"},
            ]
        }
    ),
]


def _parse_stop_token_ids(value: object) -> tuple[int, ...]:
    ids = [] if value is None else value
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise value_error("must be a list of token ids")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise value_error(f"may have at most {MAX_STOP_TOKEN_IDS} token ids")
    return tuple(ids)


StopTokenIds = Annotated[
    tuple[int, ...],
    PlainValidator(_parse_stop_token_ids),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MAX_STOP_TOKEN_IDS},
                {"type": "null"},
            ]
        }
    ),
]


def _parse_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    biases = {} if value is None else value
    if not isinstance(biases, dict):
        raise value_error("must be an object of token ids and their biases")
    if len(biases) > MAX_LOGIT_BIASES:
        raise value_error(f"may have at most {MAX_LOGIT_BIASES} tokens")
    if not all(isinstance(key, str) and _TOKEN_ID.fullmatch(key) for key in biases):
        raise value_error('must contain token ids as keys, such as "50256"')
    # refuses bool, a subclass of int, and NaN, which is in no range
    if not all(type(bias) in (int, float) and -_LARGEST_BIAS <= bias <= _LARGEST_BIAS for bias in biases.values()):
        raise value_error(f"must contain numbers from -{_LARGEST_BIAS} to {_LARGEST_BIAS}")
    return tuple((int(key), float(bias)) for key, bias in biases.items())


LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_parse_logit_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
                    "additionalProperties": {"type": "number", "minimum": -_LARGEST_BIAS, "maximum": _LARGEST_BIAS},
                    "maxProperties": MAX_LOGIT_BIASES,
                },
                {"type": "null"},
            ]
        }
    ),
]


def _parse_cache_salt(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise value_error("must be a string")
    if not value:  # more likely a missing tenant name than a wish to share with everyone
        raise value_error("must not be empty")
    if len(value.encode()) > MAX_CACHE_SALT_BYTES:
        raise value_error(f"may have at most {MAX_CACHE_SALT_BYTES} bytes in UTF-8")
    return value


# "" if the client gives none; a client cannot send "".
CacheSalt = Annotated[
    str,
    PlainValidator(_parse_cache_salt),
    WithJsonSchema(
        {
            "anyOf": [{"type": "string", "minLength": 1, "maxLength": MAX_CACHE_SALT_BYTES}, {"type": "null"}],
            "description": "An extension: cached keys and values are shared only between requests with the same salt.",
        }
    ),
]


class StreamOptions(BaseModel):
    """include_usage: the last chunk has the usage.
    continuous_usage_stats (vLLM's extension): every chunk has the usage so far.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: Annotated[bool, NullMeans(False)] = False
    continuous_usage_stats: Annotated[bool, NullMeans(False)] = False
    include_obfuscation: Annotated[Any, Only(None, False)] = None


def _parse_metadata(value: object) -> object:
    """Checked here because pydantic would create an error for every wrong value, of which there may be a million."""
    if value is not None and not (isinstance(value, dict) and set(map(type, value.values())) <= {str}):
        raise value_error("must be an object whose values are strings")
    return value


Metadata = Annotated[
    dict[str, str] | None,
    PlainValidator(_parse_metadata),
    WithJsonSchema({"anyOf": [{"type": "object", "additionalProperties": {"type": "string"}}, {"type": "null"}]}),
]


Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False), NullMeans(0.0)]


class SamplingFields(BaseModel):
    """Fields of both /v1/completions and /v1/chat/completions.

    top_k, min_p, repetition_penalty, min_tokens, stop_token_ids: vLLM's extensions.
    priority (vLLM's extension): the client's waiting requests with lower values start first.
    cache_salt (our extension): cached KV is shared only between requests with the same salt.
    logprobs_in_fingerprint (our extension): return log-probabilities packed into the system_fingerprint instead of the
    choices.
    return_token_ids (vLLM's extension): return the token ids of prompts and choices.
    prompt_logprobs (vLLM's extension): return log-probabilities of the prompt's tokens and of this many most likely
    tokens at each position.
    response_format, structured_outputs and guided_* (the last two are vLLM's): the format of the text, see
    grammar_fields.

    Accepted without effect, since they do not concern the generated text: user, metadata, store=false, service_tier
    auto or default, safety_identifier, prompt_cache_key.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str
    n: Annotated[int, Field(ge=1), NullMeans(1)] = 1
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False), NullMeans(1.0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), NullMeans(1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1), NullMeans(-1)] = -1  # -1 and 0: no limit
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), NullMeans(0.0)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False), NullMeans(1.0)] = 1.0
    logit_bias: LogitBias = ()
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    min_tokens: Annotated[int, Field(ge=0), NullMeans(0)] = 0
    stop: StopStrings = ()
    stop_token_ids: StopTokenIds = ()
    # signed or unsigned 64 bits
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**64 - 1)] = None
    ignore_eos: Annotated[bool, NullMeans(False)] = False
    cache_salt: CacheSalt = ""
    priority: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), NullMeans(0)] = 0
    logprobs_in_fingerprint: Annotated[bool, NullMeans(False)] = False
    return_token_ids: Annotated[bool, NullMeans(False)] = False
    prompt_logprobs: Annotated[int | None, Field(ge=0)] = None

    user: str | None = None
    metadata: Metadata = None
    store: Annotated[Any, Only(None, False)] = None
    service_tier: Annotated[Any, Only(None, "auto", "default")] = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    stream: Annotated[bool, NullMeans(False)] = False
    stream_options: StreamOptions | None = None

    response_format: ResponseFormat = None
    structured_outputs: StructuredOutputs = None
    guided_json: GuidedJson = None
    guided_regex: GuidedRegex = None
    guided_choice: GuidedChoice = None
    guided_grammar: GuidedGrammar = None
    guided_decoding_backend: Annotated[Any, Only(None)] = None
    guided_whitespace_pattern: Annotated[Any, Only(None)] = None
    structural_tag: Annotated[Any, Only(None)] = None
