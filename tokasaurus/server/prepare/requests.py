"""What all endpoints need to turn a body into requests: Prepared, checks of fields and of lengths, sampling parameters.

Requests are drafted in a thread, then wait until their grammar is validated.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tokasaurus.messages.commands import NamedAdapter
from tokasaurus.messages.generation import GenerateRequest, TokenFilter
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.messages.status import EngineLimits, SequenceLimit
from tokasaurus.random_ids import random_id, random_seed
from tokasaurus.server.access import key_salt
from tokasaurus.server.engine_client.collectors import BYTES_OF_VALUE
from tokasaurus.server.errors import ContextLengthExceeded, InvalidRequest, Unsupported, UnsupportedField, shorten
from tokasaurus.server.protocol.grammar_fields import GrammarSource
from tokasaurus.server.protocol.sampling_fields import SamplingFields
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.tools.parser import CallRules
from tokasaurus.server.tools.reasoning import ReasoningRules
from tokasaurus.text.tokenizer import TextTooLong

# Per body: n times the number of prompts.
MAX_SEQUENCES = 65_536
# Per body: values that `echo`, `prompt_logprobs` or `return_token_ids` adds to the answer: in each choice, one per
# prompt token and one per top-k logprob of it. This many make an answer of some hundred megabytes.
MAX_PROMPT_VALUES = 1 << 23
# The engine samples in float32. A temperature below its minimum becomes 0 (greedy), a top_p below its minimum becomes
# that minimum. This changes only the choice among tokens that tie to within float32. Dividing by a smaller number would
# overflow.
_MIN_TEMPERATURE = 1e-5
_MIN_TOP_P = 1e-6
# Bounds within which dividing or multiplying a logit by the penalty stays in float32's range.
_REPETITION_PENALTIES = (1e-30, 1e30)
_UINT64_MASK = 2**64 - 1
# Between the seeds of a body's prompts, if its origin gives one: odd, and with bits everywhere.
_SEED_STEP = 0x9E3779B97F4A7C15
_GUIDED_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_GRAMMAR_FIELDS = (
    "response_format",
    "structured_outputs",
    *_GUIDED_FIELDS,
    "json_schema",
    "regex",
    "ebnf",
    "grammar",
)
_REASONS: Mapping[SequenceLimit, str] = {
    "model": "",
    "max_num_tokens_per_request": " on this server, a limit set by its flag max_num_tokens_per_request=",
    "kv_cache_num_tokens": " on this server, the size of its KV cache, which its flag kv_cache_num_tokens= sets",
}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a body comes from."""

    num_bytes: int = 0
    """Size of the body."""
    client: str = ""
    """Who sent it, by `client_of`."""
    seed: int | None = None
    """Unsigned 64 bits, from which the seeds of a body that gives none follow; None draws them."""
    is_background: bool = False
    """Its requests wait behind all others, and are not counted in the limits of the queue."""
    job: str = ""
    """See GenerateRequest; one of `EngineClient.jobs`."""
    session: str = ""
    """See GenerateRequest."""
    arrived_s: float = field(default_factory=time.monotonic)
    """See GenerateRequest."""
    key_salt: str = field(default_factory=key_salt)
    """No other key's requests share cached prompts with its own, whatever salt its body has; "" shares them."""
    adapter: NamedAdapter | None = None
    """What its model means; None for the served model."""


@dataclass(frozen=True, slots=True)
class Echo:
    """An echoed prompt."""

    text: str
    """The prompt as the client wrote it; a prompt given as ids is decoded, special tokens included. Where such a prompt
    ends inside a character, this character belongs to the completion's text."""
    offsets: list[int]
    """Start of each prompt token in `text`, in characters, never decreasing; empty if no logprobs are requested.

    A token that continues a character has the offset of that character. A token that is not in the text, because the
    tokenizer added it, has the offset of the next token.
    """


@dataclass(frozen=True, slots=True)
class Prepared:
    """One body, ready for the engine, and how its answer is written."""

    response_id: str
    """The id of the answer; a client may have chosen it, so it need not be unique."""
    requests: list[GenerateRequest]
    """One per prompt, in order; all have the same `num_sequences`."""
    logprobs_in_fingerprint: bool = False
    """See SamplingFields."""
    return_token_ids: bool = False
    """See SamplingFields."""
    return_tokens_as_token_ids: bool = False
    """See SamplingFields."""
    grammar_param: str | None = None
    """The body's field that gave the grammar of `requests`; None if they have none."""
    calls: CallRules | None = None
    """The tool calls that the answer may contain; None if all of it is content."""
    echoes: Sequence[Echo] = ()
    """One per prompt if the prompts are echoed, else empty."""
    num_top_prompt_logprobs: int | None = None
    """Top-k logprobs per prompt token that `prompt_logprobs` returns; None if the body does not set it. `requests` may
    ask the engine for more, for the echo."""
    experts_from: int | None = None
    """First token whose experts each choice has; None: they are not asked for."""
    repeated: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the answer that repeat the body's, for endpoints whose answers do."""
    starts_in_reasoning: bool = False
    """Whether the prompt ends within reasoning, which the answer continues. Only looked for where it is told: with
    `logprobs_in_fingerprint`, `calls` or `reasoning`."""
    content_start: str = ""
    """What the content of a chat's answer begins with, before what the model writes."""
    keeps_stop: bool = False
    """The text keeps the stop string, or the token, that ended it."""
    reasoning: ReasoningRules | None = None
    """How the answer's reasoning is found and shown; None if the model has none, and for completions."""
    adapter_name: str = ""
    """Name of the adapter that answers, which the answer tells as its model; "" if the served model does."""

    def by(self, adapter: NamedAdapter | None) -> "Prepared":
        """The same, answered by another adapter, or by none."""
        digest, version = _identity(adapter)
        requests = [replace(request, adapter=digest, adapter_version=version) for request in self.requests]
        return replace(self, requests=requests, adapter_name="" if adapter is None else adapter.name)


def _identity(adapter: NamedAdapter | None) -> tuple[str, str]:
    """GenerateRequest's adapter and adapter_version."""
    return ("", "") if adapter is None else (adapter.digest, adapter.version)


def num_prompt_values(prepared: Prepared) -> int:
    """Token ids and logprobs of the prompts, as far as the answer may contain them."""
    shows_prompts = prepared.return_token_ids or prepared.echoes or prepared.num_top_prompt_logprobs is not None
    if not shows_prompts:
        return 0
    return sum(len(request.prompt_ids) * (1 + request.num_top_prompt_logprobs) for request in prepared.requests)


@dataclass(frozen=True, slots=True)
class Draft:
    """One body, prepared but for its grammar."""

    prepared: Prepared
    """Final if the body has no grammar."""
    grammar: GrammarSource | None
    """What each completion must match; None for any text. Not validated, and not part of `prepared`."""

    def with_grammar(self, grammar: str) -> Prepared:
        """The final requests. grammar: `self.grammar`, validated, in llguidance's form."""
        assert self.grammar is not None, "the body has a grammar"
        requests = [replace(request, grammar=grammar) for request in self.prepared.requests]
        return replace(self.prepared, requests=requests, grammar_param=self.grammar.param)


def asked_grammar(body: SamplingFields) -> GrammarSource | None:
    """The grammar that the body asks for, if any.

    Several fields may give the same one: some clients write both an older and a newer field of vLLM.

    Raises InvalidRequest if they give different ones, Unsupported if it cannot be followed.
    """
    given: list[tuple[str, GrammarSource]] = [
        (name, source) for name in _GRAMMAR_FIELDS if (source := getattr(body, name)) is not None
    ]
    if not given:
        return None
    first, asked = given[0]
    for name, source in given[1:]:
        if (source.format, source.text) != (asked.format, asked.text):
            raise InvalidRequest(
                f"{first} and {name}: only one of them may be given, or both with the same value", name
            )
    if asked.refusal:
        raise Unsupported(f"{asked.param} {asked.refusal}", asked.param)
    return asked


def check_fields(body: SamplingFields, model: ServedModel) -> None:
    if body.best_of is not None and body.best_of != body.n:
        raise UnsupportedField(
            "best_of is a field of OpenAI and vLLM that is not implemented here: only null and the value of n are "
            "accepted; n samples with logprobs can be ranked by the client",
            "best_of",
        )
    if body.num_sequences > MAX_SEQUENCES:
        raise InvalidRequest(f"n times the number of prompts may be at most {MAX_SEQUENCES}", "n")
    if body.logprobs_in_fingerprint and body.stream:
        raise InvalidRequest("logprobs_in_fingerprint cannot be streamed", "logprobs_in_fingerprint")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed", "prompt_logprobs")
    check_vocabulary([token_id for token_id, _ in body.logit_bias], model, "logit_bias")
    check_vocabulary(body.stop_token_ids, model, "stop_token_ids")
    check_vocabulary(body.allowed_token_ids or (), model, "allowed_token_ids")


def token_filter(body: SamplingFields, model: ServedModel) -> TokenFilter | None:
    """What allowed_token_ids and bad_words forbid; None if nothing. Tokenizes. Raises InvalidRequest."""
    if body.allowed_token_ids is None and not body.bad_words:
        return None
    sequences = _bad_sequences(body.bad_words, model)
    single = {ids[0] for ids in sequences if len(ids) == 1}
    allowed = range(model.vocab_size) if body.allowed_token_ids is None else body.allowed_token_ids
    if single.issuperset(allowed):
        raise InvalidRequest("bad_words leaves no token that may be sampled", "bad_words")
    return TokenFilter.of_ids(model.vocab_size, body.allowed_token_ids, tuple(sequences))


def _bad_sequences(words: Sequence[str], model: ServedModel) -> list[tuple[int, ...]]:
    """The tokens of each word as it begins a text, and as it stands after a space if those are as many and begin with
    another token: vLLM's rule."""
    bare = [word.lstrip() for word in words]
    encoded = model.tokenizer.encode_batch([*bare, *(f" {word}" for word in bare)], add_special_tokens=False)
    found: list[tuple[int, ...]] = []
    for plain, spaced in zip(encoded[: len(bare)], encoded[len(bare) :], strict=True):
        found += [tuple(plain)] if plain else []
        if spaced and plain and spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(tuple(spaced))
    for ids in found:
        check_vocabulary(ids, model, "bad_words")
    return list(dict.fromkeys(found))


def checked_top(asked: int, param: str, model: ServedModel) -> int:
    """Number of top-k logprobs per token to request from the engine. Raises InvalidRequest if `asked` is too high."""
    if asked > model.max_topk_logprobs:
        raise InvalidRequest(
            f"{param} may be at most {model.max_topk_logprobs}, which the flag max_topk_logprobs= sets", param
        )
    return min(asked, model.vocab_size)


def prompt_top(body: SamplingFields, model: ServedModel) -> int | None:
    """Number of top-k logprobs per prompt token that `prompt_logprobs` asks for; None if it is not set."""
    if body.prompt_logprobs is None:
        return None
    return checked_top(body.prompt_logprobs, "prompt_logprobs", model)


def asked_experts(body: SamplingFields, limits: EngineLimits) -> int | None:
    """First token whose experts are asked for; None: they are not. As vLLM's clients send it to any model,
    routed_experts_prompt_start alone asks for nothing if there are none. Raises Unsupported."""
    refusal = "" if limits.num_routed_experts else limits.no_routed_experts
    if body.return_routed_experts and refusal:
        raise Unsupported(f"return_routed_experts is not possible: {refusal}", "return_routed_experts")
    if refusal or not (body.return_routed_experts or body.routed_experts_prompt_start is not None):
        return None
    return body.routed_experts_prompt_start or 0


def check_experts(requests: Sequence[GenerateRequest], limits: EngineLimits) -> None:
    """Bounds what their prompts' experts add to an answer."""
    if requests[0].want_experts:
        check_prompt_values(requests, limits.num_routed_experts // BYTES_OF_VALUE, "return_routed_experts")


def check_prompt_values(requests: Sequence[GenerateRequest], num_top: int, param: str) -> None:
    num_tokens = sum(len(request.prompt_ids) * request.num_sequences for request in requests)
    if num_tokens * (1 + num_top) > MAX_PROMPT_VALUES:
        message = (
            f"{param} may add at most {MAX_PROMPT_VALUES} values to an answer: "
            f"with these prompts, n and top-k logprobs it would add {num_tokens * (1 + num_top)}"
        )
        raise InvalidRequest(message, param)


def check_vocabulary(token_ids: Sequence[int], model: ServedModel, param: str) -> None:
    for outlier in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= outlier < model.vocab_size:
            # A text has such an id if the tokenizer has more tokens than the model.
            name = model.tokenizer.vocabulary_entry(outlier) if outlier > 0 else ""
            token = f"the token id {outlier}" if name == "" else f"the token {shorten(name)!r} with id {outlier}"
            raise InvalidRequest(f"{param} has {token}; valid ids are 0 to {model.vocab_size - 1}", param)


def response_id_of(body: SamplingFields, prefix: str) -> str:
    """The id of the answer. prefix: names the kind of answer. Raises InvalidRequest."""
    if body.rid is not None and body.request_id is not None:
        raise InvalidRequest("request_id and rid: only one of them may be given", "rid")
    if body.rid is not None:
        return body.rid
    return f"{prefix}{random_id() if body.request_id is None else body.request_id}"


def truncate(prompt_ids: list[int], body: SamplingFields, max_tokens: int | None, limits: EngineLimits) -> list[int]:
    """The last tokens of a prompt, as many as truncate_prompt_tokens keeps. max_tokens: most new tokens that the body
    asks for, if it does."""
    most = body.truncate_prompt_tokens
    if most is None:
        return prompt_ids
    if most == -1:
        most = max(1, limits.max_tokens_per_sequence - (1 if max_tokens is None else max_tokens))
    return prompt_ids[-most:]


def make_requests(
    response_id: str,
    body: SamplingFields,
    prompts: Sequence[tuple[list[int], int]],
    model: ServedModel,
    origin: Origin,
    *,
    num_top_logprobs: int | None,
    num_top_prompt_logprobs: int | None,
    wants_experts: bool = False,
) -> list[GenerateRequest]:
    """One for each prompt. Their ids are unique, also where a client chose the response's.

    prompts: (token ids, most new tokens).

    num_top_logprobs, num_top_prompt_logprobs: of sampled and of prompt tokens. None for no logprobs, 0 for only the
    tokens' own. Raises InvalidRequest.
    """
    fewest = min(max_new_tokens for _, max_new_tokens in prompts)
    if body.min_tokens > fewest:
        raise InvalidRequest(f"min_tokens is {body.min_tokens}: it may be at most {fewest}", "min_tokens")
    sampling, filtered = _sampling(body, model), token_filter(body, model)
    adapter, adapter_version = _identity(origin.adapter)
    is_unique = body.request_id is None and body.rid is None
    unique_id = response_id if is_unique else f"{response_id}-{random_id()}"
    return [
        GenerateRequest(
            request_id=f"{unique_id}-{index}",
            prompt_ids=np.array(prompt_ids, dtype=np.int32),
            num_sequences=body.n,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=_seed(body, origin, index),
            stop_strings=body.stop,
            ignore_eos=body.ignore_eos,
            want_logprobs=num_top_logprobs is not None,
            logit_bias=body.logit_bias,
            cache_salt=f"{origin.key_salt}:{body.cache_salt}" if origin.key_salt else body.cache_salt,
            stop_token_ids=body.stop_token_ids,
            min_tokens=body.min_tokens,
            is_streamed=body.stream,
            num_top_logprobs=num_top_logprobs or 0,
            logprobs_mode=model.logprobs_mode if body.logprobs_mode is None else body.logprobs_mode,
            want_prompt_logprobs=num_top_prompt_logprobs is not None,
            num_top_prompt_logprobs=num_top_prompt_logprobs or 0,
            want_experts=wants_experts,
            client=origin.client,
            priority=body.priority,
            is_background=origin.is_background,
            job=origin.job,
            token_filter=filtered,
            shows_special=not body.skip_special_tokens,
            session=origin.session,
            arrived_s=origin.arrived_s,
            adapter=adapter,
            adapter_version=adapter_version,
        )
        for index, (prompt_ids, max_new_tokens) in enumerate(prompts)
    ]


def _sampling(body: SamplingFields, model: ServedModel) -> SamplingParams:
    """Each parameter is the body's field of its name, else the model's default, or what the engine can compute in its
    place."""
    asked = asked_sampling(body, model)
    lowest, highest = _REPETITION_PENALTIES
    return asked._replace(
        temperature=asked.temperature if asked.temperature >= _MIN_TEMPERATURE else 0.0,
        top_p=max(asked.top_p, _MIN_TOP_P),
        top_k=asked.top_k if 0 < asked.top_k < model.vocab_size else 0,
        repetition_penalty=min(max(asked.repetition_penalty, lowest), highest),
    )


def asked_sampling(body: SamplingFields, model: ServedModel) -> SamplingParams:
    """The body's sampling parameters, with the model's defaults for missing ones."""
    defaults = model.default_sampling
    given = [getattr(body, name) for name in SamplingParams._fields]
    return SamplingParams._make(
        default if value is None else value for value, default in zip(given, defaults, strict=True)
    )


def _seed(body: SamplingFields, origin: Origin, prompt_index: int) -> int:
    if body.seed is not None:
        return body.seed & _UINT64_MASK
    if origin.seed is None:
        return random_seed()
    return (origin.seed + prompt_index * _SEED_STEP) & _UINT64_MASK


def room_after(prompt_ids: list[int], limits: EngineLimits, param: str, fewest: int = 1) -> int:
    """Most new tokens that fit after the prompt. Raises ContextLengthExceeded if they are fewer than `fewest`."""
    room = limits.max_tokens_per_sequence - len(prompt_ids)
    if room < fewest:
        raise _exceeded(f"{param} has {len(prompt_ids)} tokens, which leaves no room for an answer", param, limits)
    return room


def check_max_tokens(max_tokens: int, param: str, prompt_ids: list[int], limits: EngineLimits) -> int:
    """`max_tokens`, which the field `param` asks for. Raises ContextLengthExceeded if there is less room."""
    room = limits.max_tokens_per_sequence - len(prompt_ids)
    if max_tokens > room:
        message = f"{param} is {max_tokens}, but after the prompt's {len(prompt_ids)} tokens there is room for {room}"
        raise _exceeded(message, param, limits)
    return max_tokens


def check_text_length(num_tokens: int, param: str, limits: EngineLimits) -> None:
    """Raises ContextLengthExceeded for a text that is longer than the model takes."""
    if num_tokens > limits.max_tokens_per_sequence:
        raise _exceeded(f"{param} has a text of {num_tokens} tokens; truncate_prompt_tokens=-1 cuts it", param, limits)


def too_long(param: str, error: TextTooLong, limits: EngineLimits) -> ContextLengthExceeded:
    """The error for a prompt that was not even tokenized."""
    return _exceeded(
        f"{param} has at least {error.fewest_tokens} tokens, which leaves no room for an answer", param, limits
    )


def _exceeded(message: str, param: str, limits: EngineLimits) -> ContextLengthExceeded:
    # clients ignore the code field: litellm matches OpenAI's wording, LangChain the code within the message
    words = f"this model's maximum context length is {limits.max_tokens_per_sequence} tokens"
    code = ContextLengthExceeded.code
    return ContextLengthExceeded(f"{words}{_REASONS[limits.limited_by]} ({code}): {message}", param)
