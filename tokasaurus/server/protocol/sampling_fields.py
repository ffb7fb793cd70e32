"""Fields shared by completions and chat bodies. Token ids are compared with the vocabulary later."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from tokasaurus.messages.generation import LOGPROBS_MODES, MAX_STOP_TOKEN_IDS, LogprobsMode
from tokasaurus.messages.sampling import CLIENT_PARAMETERS
from tokasaurus.server.protocol.fields import (
    WHOLE_FLOATS,
    NullMeans,
    Only,
    StrictObject,
    Text,
    TokenId,
    as_integer,
    as_integers,
    value_error,
)
from tokasaurus.server.protocol.grammar_fields import (
    GuidedChoice,
    GuidedGrammar,
    GuidedJson,
    GuidedRegex,
    ResponseFormat,
    StructuredOutputs,
    TopEbnf,
    TopGrammar,
    TopJsonSchema,
    TopRegex,
)

MAX_CACHE_SALT_BYTES = 1024  # in UTF-8
MAX_LOGIT_BIASES = 1024
_LARGEST_BIAS = 100

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)  # exactly one spelling of each id


def _parse_stop(value: object) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise value_error("must be a string or a list of strings")
    if "" in stops:
        raise value_error("must not contain an empty string")
    return tuple(stops)


StopStrings = Annotated[tuple[str, ...], PlainValidator(_parse_stop, Text | list[Text] | None)]


def _parse_stop_token_ids(value: object) -> tuple[int, ...]:
    return _parse_ids(value, MAX_STOP_TOKEN_IDS)


def _parse_ids(value: object, max_ids: int) -> tuple[int, ...]:
    ids = [] if value is None else value
    if not isinstance(ids, list):
        raise value_error("must be a list of token ids")
    if len(ids) > max_ids:
        raise value_error(f"may have at most {max_ids} token ids")
    ids = as_integers(ids)
    if not set(map(type, ids)) <= {int}:
        raise value_error("must be a list of token ids")
    return tuple(ids)


StopTokenIds = Annotated[
    tuple[int, ...],
    PlainValidator(_parse_stop_token_ids, Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None),
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


_Bias = Annotated[float, Field(ge=-_LARGEST_BIAS, le=_LARGEST_BIAS)]

_Biases = Annotated[
    dict[str, _Bias],
    Field(max_length=MAX_LOGIT_BIASES, json_schema_extra={"propertyNames": {"pattern": f"^({_TOKEN_ID.pattern})$"}}),
]

LogitBias = Annotated[tuple[tuple[int, float], ...], PlainValidator(_parse_logit_bias, _Biases | None)]


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
    PlainValidator(_parse_cache_salt, Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_BYTES)] | None),
    Field(description="An extension: cached keys and values are shared only between requests with the same salt."),
]


class StreamOptions(StrictObject):
    """include_usage: the last chunk has the usage.
    continuous_usage_stats (vLLM's extension): every chunk has the usage so far.
    """

    include_usage: Annotated[bool, NullMeans(False)] = False
    continuous_usage_stats: Annotated[bool, NullMeans(False)] = False
    include_obfuscation: Annotated[Any, Only(None, False)] = None


def _parse_metadata(value: object) -> object:
    """Checked here because pydantic would create an error for every wrong value, of which there may be a million."""
    if value is not None and not (isinstance(value, dict) and set(map(type, value.values())) <= {str}):
        raise value_error("must be an object whose values are strings")
    return value


Metadata = Annotated[dict[str, str] | None, PlainValidator(_parse_metadata, dict[str, str] | None)]


def _parse_logprobs_mode(value: object) -> object:
    if value is not None and value not in LOGPROBS_MODES:
        raise value_error("must be " + " or ".join([f'"{mode}"' for mode in LOGPROBS_MODES]))
    return value


AskedLogprobsMode = Annotated[LogprobsMode | None, PlainValidator(_parse_logprobs_mode, LogprobsMode | None)]


Seed = Annotated[int | None, Field(ge=-(2**63), le=2**64 - 1), WHOLE_FLOATS]  # signed or unsigned 64 bits
Priority = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE_FLOATS, NullMeans(0)]


MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256


def _parse_allowed_token_ids(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if value == []:
        raise value_error("must not be empty")
    return tuple(dict.fromkeys(_parse_ids(value, MAX_ALLOWED_TOKENS)))


MAX_ALLOWED_TOKENS = 1 << 20
"""More than any vocabulary has."""

AllowedTokenIds = Annotated[
    tuple[int, ...] | None,
    PlainValidator(_parse_allowed_token_ids, Annotated[list[TokenId], Field(min_length=1)] | None),
]


def _parse_bad_words(value: object) -> tuple[str, ...]:
    words = [] if value is None else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise value_error("must be a list of strings")
    if len(words) > MAX_BAD_WORDS:
        raise value_error(f"may have at most {MAX_BAD_WORDS} words")
    if any(not word.strip() for word in words):
        raise value_error("must not contain an empty word")
    if any(len(word) > MAX_BAD_WORD_CHARS for word in words):
        raise value_error(f"may have words of at most {MAX_BAD_WORD_CHARS} characters")
    return tuple(words)


_BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS, pattern=r"\S")]
BadWords = Annotated[
    tuple[str, ...], PlainValidator(_parse_bad_words, Annotated[list[_BadWord], Field(max_length=MAX_BAD_WORDS)] | None)
]


def _parse_prompt_tokens(value: object) -> object:
    number = as_integer(value)
    if number is not None and (type(number) is not int or (number < 1 and number != -1)):
        raise value_error("must be -1 or a whole number from 1")
    return number


PromptTokens = Annotated[
    int | None, PlainValidator(_parse_prompt_tokens, Annotated[int, Field(ge=1)] | Literal[-1] | None)
]

_REQUEST_ID = re.compile("[ -~]{1,200}")  # as the header X-Request-Id


def _parse_request_id(value: object) -> object:
    if value is not None and not (isinstance(value, str) and _REQUEST_ID.fullmatch(value)):
        raise value_error("must be 1 to 200 characters of printable ASCII")
    return value


RequestId = Annotated[
    str | None, PlainValidator(_parse_request_id, Annotated[str, Field(pattern=f"^{_REQUEST_ID.pattern}$")] | None)
]


def _within(name: str) -> Any:
    """Metadata of a sampling parameter's field: its range, without infinity."""
    parameter = CLIENT_PARAMETERS[name]
    bounds: dict[str, Any] = {"gt" if parameter.excludes_minimum else "ge": parameter.minimum, "le": parameter.maximum}
    if isinstance(parameter.default, float):
        bounds["allow_inf_nan"] = False
    return Field(**{name: bound for name, bound in bounds.items() if bound is not None})


class SamplingNumbers(StrictObject):
    """How tokens are sampled, and what ends a text, by the names that all protocols have.

    temperature, top_p, top_k, min_p, repetition_penalty: null is the model's own default where its files have one (see
    the flag sampling_defaults), else a value that changes nothing.
    """

    temperature: Annotated[float | None, _within("temperature")] = None
    top_p: Annotated[float | None, _within("top_p")] = None
    top_k: Annotated[int | None, _within("top_k"), WHOLE_FLOATS] = None  # -1 and 0: no limit
    min_p: Annotated[float | None, _within("min_p")] = None
    presence_penalty: Annotated[float, _within("presence_penalty"), NullMeans(0.0)] = 0.0
    frequency_penalty: Annotated[float, _within("frequency_penalty"), NullMeans(0.0)] = 0.0
    repetition_penalty: Annotated[float | None, _within("repetition_penalty")] = None
    logit_bias: LogitBias = ()
    stop: StopStrings = ()
    stop_token_ids: StopTokenIds = ()
    ignore_eos: Annotated[bool, NullMeans(False)] = False


class SamplingFields(SamplingNumbers):
    """Fields of both /v1/completions and /v1/chat/completions.

    model: null or "" is the served model, as a missing one is.
    top_k, min_p, repetition_penalty, min_tokens, stop_token_ids: vLLM's extensions.
    priority (vLLM's extension): the client's waiting requests with lower values start first.
    cache_salt (our extension): cached KV is shared only between requests with the same salt.
    logprobs_mode (our extension): whose log-probabilities are returned with sampled tokens; null: as the server's flag
    says.
    return_tokens_as_token_ids (vLLM's extension): name the tokens of log-probabilities by their ids.
    logprobs_in_fingerprint (our extension): return log-probabilities packed into the system_fingerprint instead of the
    choices.
    return_token_ids (vLLM's extension): return the token ids of prompts and choices.
    prompt_logprobs (vLLM's extension): return log-probabilities of the prompt's tokens and of this many most likely
    tokens at each position.
    return_routed_experts (SGLang's; the answer is vLLM's): each choice, in a stream its last chunk, has routed_experts:
    base64 of a NumPy file [tokens, layers, experts], uint8 or uint16, of all tokens but the last.
    routed_experts_prompt_start (vLLM's): the same from this token on.
    response_format, structured_outputs and guided_* (the last two are vLLM's): the format of the text, see
    grammar_fields.

    allowed_token_ids (vLLM's): the only tokens that may be sampled.
    bad_words (vLLM's): words whose tokens, with or without a space before, never follow each other in the completion.
    skip_special_tokens (vLLM's and SGLang's): false shows special tokens in the text.
    include_stop_str_in_output (vLLM's), no_stop_trim (SGLang's): the text keeps the stop string, or the text of the
    token, that ended it.
    truncate_prompt_tokens (vLLM's): keep the last so many tokens of a prompt; -1: as many as leave room for the
    answer.
    add_special_tokens (vLLM's): the tokenizer adds its special tokens, such as bos, to prompts of text. null: yes, but
    not for chats, whose templates write them.
    request_id (vLLM's): ends the answer's id. rid (SGLang's): is the answer's id.
    json_schema, regex, ebnf (SGLang's), grammar (llama.cpp's): the same.
    best_of: must equal n.

    Accepted without effect, since they do not concern the generated text: user, metadata, safety_identifier,
    prompt_cache_key, spaces_between_special_tokens. `with_known_fields` adds those with neutral values only.
    """

    model: str | None = None
    n: Annotated[int, Field(ge=1), WHOLE_FLOATS, NullMeans(1)] = 1
    best_of: Annotated[int | None, Field(ge=1), WHOLE_FLOATS] = None
    max_tokens: Annotated[int | None, Field(ge=1), WHOLE_FLOATS] = None
    min_tokens: Annotated[int, Field(ge=0), WHOLE_FLOATS, NullMeans(0)] = 0
    seed: Seed = None
    cache_salt: CacheSalt = ""
    priority: Priority = 0
    logprobs_mode: AskedLogprobsMode = None
    logprobs_in_fingerprint: Annotated[bool, NullMeans(False)] = False
    return_token_ids: Annotated[bool, NullMeans(False)] = False
    return_tokens_as_token_ids: Annotated[bool, NullMeans(False)] = False
    prompt_logprobs: Annotated[int | None, Field(ge=0), WHOLE_FLOATS] = None
    return_routed_experts: Annotated[bool, NullMeans(False)] = False
    routed_experts_prompt_start: Annotated[int | None, Field(ge=0), WHOLE_FLOATS] = None
    allowed_token_ids: AllowedTokenIds = None
    bad_words: BadWords = ()
    skip_special_tokens: Annotated[bool, NullMeans(True)] = True
    include_stop_str_in_output: Annotated[bool, NullMeans(False)] = False
    no_stop_trim: Annotated[bool, NullMeans(False)] = False
    truncate_prompt_tokens: PromptTokens = None
    add_special_tokens: bool | None = None
    request_id: RequestId = None
    rid: RequestId = None

    user: str | None = None
    metadata: Metadata = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    spaces_between_special_tokens: bool | None = None

    stream: Annotated[bool, NullMeans(False)] = False
    stream_options: StreamOptions | None = None

    response_format: ResponseFormat = None
    structured_outputs: StructuredOutputs = None
    guided_json: GuidedJson = None
    guided_regex: GuidedRegex = None
    guided_choice: GuidedChoice = None
    guided_grammar: GuidedGrammar = None
    json_schema: TopJsonSchema = None
    regex: TopRegex = None
    ebnf: TopEbnf = None
    grammar: TopGrammar = None

    @property
    def stops(self) -> tuple[tuple[str, ...], str]:
        """(stop strings, the field that has them)."""
        return self.stop, "stop"

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine runs for the body: `n` for each prompt."""
        return self.n
