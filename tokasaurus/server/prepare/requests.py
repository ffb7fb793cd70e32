"""OpenAI body → Prepared, final: its requests are drafted in a thread, then wait until their grammar is validated."""

import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tokasaurus.messages.generation import GenerateRequest, SamplingParams
from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.access import key_salt
from tokasaurus.server.errors import InvalidRequest, Unsupported, shorten
from tokasaurus.server.grammars.validator import asked_grammar
from tokasaurus.server.prepare.chat_prompt import encode_messages, opens_thinking
from tokasaurus.server.prepare.context_length import check_max_tokens, room_after, too_long
from tokasaurus.server.prepare.echo import Echo, make_echo
from tokasaurus.server.prepare.tool_choice import resolve_tools
from tokasaurus.server.protocol.chat import ChatCompletionRequest
from tokasaurus.server.protocol.completions import CompletionRequest, Prompt
from tokasaurus.server.protocol.grammar_fields import GrammarSource
from tokasaurus.server.protocol.sampling_fields import SamplingFields
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.tools.parser import CallRules
from tokasaurus.text.tokenizer import TextTooLong

# Per body: n times the number of prompts.
MAX_SEQUENCES = 65_536
# Per body: values that `echo`, `prompt_logprobs` or `return_token_ids` adds to the answer: in each choice, one per
# prompt token and one per top-k logprob of it. This many make an answer of some hundred megabytes.
MAX_PROMPT_VALUES = 1 << 23
# Per body: the length of its grammar times its prompts, since each request in the engine has its own copy.
MAX_GRAMMAR_CHARS_OF_PROMPTS = 1 << 27
DEFAULT_COMPLETION_TOKENS = 16
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
    key_salt: str = field(default_factory=key_salt)
    """No other key's requests share cached prompts with its own, whatever salt its body has; "" shares them."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """One body, ready for the engine, and how its answer is written."""

    response_id: str
    """The id of the answer."""
    requests: list[GenerateRequest]
    """One per prompt, in order; all have the same `num_sequences`."""
    logprobs_in_fingerprint: bool = False
    """See SamplingFields."""
    return_token_ids: bool = False
    """See SamplingFields."""
    grammar_param: str | None = None
    """The body's field that gave the grammar of `requests`; None if they have none."""
    calls: CallRules | None = None
    """Which tool calls the answer may contain; None if all of it is content."""
    echoes: Sequence[Echo] = ()
    """One per prompt if the prompts are echoed, else empty."""
    num_top_prompt_logprobs: int | None = None
    """Top-k logprobs per prompt token that `prompt_logprobs` returns; None if the body does not set it. `requests` may
    ask the engine for more, for the echo."""


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


def draft_completion(body: CompletionRequest, model: ServedModel, limits: EngineLimits, origin: Origin) -> Draft:
    """The requests of a body. Tokenizes, so must not run on the event loop. Raises InvalidRequest."""
    if body.best_of is not None and body.best_of != body.n:
        raise Unsupported("best_of other than n is not implemented", "best_of")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens must be at least 1, unless echo is true", "max_tokens")
    _check_fields(len(body.prompt), body, model)
    num_top = None if body.logprobs is None else _checked_top(body.logprobs, "logprobs", model)
    num_prompt_top = _prompt_top(body, model)
    grammar = asked_grammar(body)
    if grammar is not None and len(grammar.text) * len(body.prompt) > MAX_GRAMMAR_CHARS_OF_PROMPTS:
        raise InvalidRequest(
            f"{grammar.param} has {len(grammar.text)} characters, for each of {len(body.prompt)} prompts: "
            f"together there may be {MAX_GRAMMAR_CHARS_OF_PROMPTS}",
            grammar.param,
        )
    response_id = f"cmpl-{uuid.uuid4().hex}"
    requests, echoes = [], []
    for index, (prompt, prompt_ids) in enumerate(zip(body.prompt, _tokenize(body.prompt, model, limits), strict=True)):
        room = room_after(prompt_ids, limits, "prompt", fewest=0 if body.max_tokens == 0 else 1)
        max_new_tokens = min(DEFAULT_COMPLETION_TOKENS, room)
        if body.max_tokens is not None:
            max_new_tokens = check_max_tokens(body.max_tokens, "max_tokens", prompt_ids, limits)
        request_id = f"{response_id}-{index}"
        request = _request(request_id, body, prompt_ids, max_new_tokens, num_top, model, origin, index)
        requests.append(_with_prompt_logprobs(request, num_prompt_top, num_top if body.echo else None))
        if body.echo:
            echoes.append(make_echo(prompt, prompt_ids, model.tokenizer, wants_offsets=num_top is not None))
    if body.echo:
        _check_prompt_values(requests, num_top or 0, "echo")
    if num_prompt_top is not None:
        _check_prompt_values(requests, num_prompt_top, "prompt_logprobs")
    if body.return_token_ids:
        _check_prompt_values(requests, 0, "return_token_ids")
    prepared = Prepared(
        response_id,
        requests,
        body.logprobs_in_fingerprint,
        body.return_token_ids,
        echoes=echoes,
        num_top_prompt_logprobs=num_prompt_top,
    )
    return Draft(prepared, grammar)


def draft_chat(body: ChatCompletionRequest, model: ServedModel, limits: EngineLimits, origin: Origin) -> Draft:
    """The requests of a body. Tokenizes, so must not run on the event loop. Raises InvalidRequest."""
    _check_fields(1, body, model)
    tool_use = resolve_tools(body, model, asked_grammar(body))
    prompt_ids = encode_messages(body.messages, body, model, limits, tool_use.shown)
    _check_vocabulary(prompt_ids, model, "messages")
    room = room_after(prompt_ids, limits, "messages")
    max_new_tokens = room
    asked = _asked_chat_tokens(body)
    if asked is not None:
        max_new_tokens = check_max_tokens(*asked, prompt_ids, limits)
    num_top, num_prompt_top = _checked_top(body.top_logprobs or 0, "top_logprobs", model), _prompt_top(body, model)
    if num_top and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true", "top_logprobs")
    response_id = f"chatcmpl-{uuid.uuid4().hex}"
    num_top_logprobs = num_top if body.logprobs else None
    request = _request(f"{response_id}-0", body, prompt_ids, max_new_tokens, num_top_logprobs, model, origin)
    requests = [_with_prompt_logprobs(request, num_prompt_top)]
    if body.return_token_ids and body.stream:  # the first chunk of each choice repeats the prompt's ids
        _check_prompt_values(requests, 0, "return_token_ids")
    prepared = Prepared(
        response_id,
        requests,
        body.logprobs_in_fingerprint,
        body.return_token_ids,
        calls=tool_use.rules
        and replace(tool_use.rules, starts_in_thinking=opens_thinking(body.messages, body, prompt_ids, model)),
        num_top_prompt_logprobs=num_prompt_top,
    )
    return Draft(prepared, tool_use.grammar)


def _check_fields(num_prompts: int, body: SamplingFields, model: ServedModel) -> None:
    if num_prompts * body.n > MAX_SEQUENCES:
        raise InvalidRequest(f"n times the number of prompts may be at most {MAX_SEQUENCES}", "n")
    if body.logprobs_in_fingerprint and body.stream:
        raise InvalidRequest("logprobs_in_fingerprint cannot be streamed", "logprobs_in_fingerprint")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed", "prompt_logprobs")
    _check_vocabulary([token_id for token_id, _ in body.logit_bias], model, "logit_bias")
    _check_vocabulary(body.stop_token_ids, model, "stop_token_ids")


def _checked_top(asked: int, param: str, model: ServedModel) -> int:
    """Number of top-k logprobs per token to request from the engine. Raises InvalidRequest if `asked` is too high."""
    if asked > model.max_top_logprobs:
        raise InvalidRequest(f"{param} may be at most {model.max_top_logprobs} (max_topk_logprobs)", param)
    return min(asked, model.vocab_size)


def _prompt_top(body: SamplingFields, model: ServedModel) -> int | None:
    """Number of top-k logprobs per prompt token that `prompt_logprobs` asks for; None if it is not set."""
    if body.prompt_logprobs is None:
        return None
    if not model.allow_logprobs:
        message = "prompt_logprobs is disabled on this server (enable_chosen_logprobs)"
        raise InvalidRequest(message, "prompt_logprobs")
    return _checked_top(body.prompt_logprobs, "prompt_logprobs", model)


def _check_prompt_values(requests: Sequence[GenerateRequest], num_top: int, param: str) -> None:
    num_tokens = sum(len(request.prompt_ids) * request.num_sequences for request in requests)
    if num_tokens * (1 + num_top) > MAX_PROMPT_VALUES:
        message = (
            f"{param} may add at most {MAX_PROMPT_VALUES} values to an answer: "
            f"with these prompts, n and top-k logprobs it would add {num_tokens * (1 + num_top)}"
        )
        raise InvalidRequest(message, param)


def _with_prompt_logprobs(request: GenerateRequest, *num_top: int | None) -> GenerateRequest:
    """The request, asking for prompt logprobs if any use needs them.

    num_top: for each use, the top-k logprobs that it needs per prompt token; None if it needs no prompt logprobs.
    """
    needed = [number for number in num_top if number is not None]
    if not needed:
        return request
    return replace(request, want_prompt_logprobs=True, num_top_prompt_logprobs=max(needed))


def _tokenize(prompts: list[Prompt], model: ServedModel, limits: EngineLimits) -> list[list[int]]:
    """The ids of each prompt. Raises InvalidRequest."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    max_tokens = limits.max_tokens_per_sequence
    try:
        encoded = iter(model.tokenizer.encode_batch(texts, add_special_tokens=True, max_tokens=max_tokens))
    except TextTooLong as error:
        raise too_long("prompt", error, limits) from None
    prompts_ids = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
    for prompt_ids in prompts_ids:
        if not prompt_ids:
            raise InvalidRequest("prompt has no tokens", "prompt")
        if len(prompt_ids) <= max_tokens:  # the caller refuses a longer one for its length, which takes less time
            _check_vocabulary(prompt_ids, model, "prompt")
    return prompts_ids


def _check_vocabulary(token_ids: Sequence[int], model: ServedModel, param: str) -> None:
    for outlier in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= outlier < model.vocab_size:
            # A text has such an id if the tokenizer has more tokens than the model.
            name = model.tokenizer.vocabulary_entry(outlier) if outlier > 0 else ""
            token = f"the token id {outlier}" if name == "" else f"the token {shorten(name)!r} with id {outlier}"
            raise InvalidRequest(f"{param} has {token}; valid ids are 0 to {model.vocab_size - 1}", param)


def _asked_chat_tokens(body: ChatCompletionRequest) -> tuple[int, str] | None:
    """(most new tokens, name of the field that gave them); None if no field did. Raises InvalidRequest."""
    if body.max_completion_tokens is None:
        return None if body.max_tokens is None else (body.max_tokens, "max_tokens")
    if body.max_tokens is not None and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest("max_tokens is an older name of max_completion_tokens: give one of them", "max_tokens")
    return body.max_completion_tokens, "max_completion_tokens"


def _request(
    request_id: str,
    body: SamplingFields,
    prompt_ids: list[int],
    max_new_tokens: int,
    num_top_logprobs: int | None,
    model: ServedModel,
    origin: Origin,
    prompt_index: int = 0,
) -> GenerateRequest:
    """num_top_logprobs: None for no logprobs, 0 for the sampled tokens' logprobs only."""
    if num_top_logprobs is not None and not model.allow_logprobs:
        raise InvalidRequest("logprobs is disabled on this server (enable_chosen_logprobs)", "logprobs")
    if body.min_tokens > max_new_tokens:
        raise InvalidRequest(f"min_tokens is {body.min_tokens}: it may be at most {max_new_tokens}", "min_tokens")
    sampling = SamplingParams(
        temperature=body.temperature if body.temperature >= _MIN_TEMPERATURE else 0.0,
        top_p=max(body.top_p, _MIN_TOP_P),
        top_k=body.top_k if 0 < body.top_k < model.vocab_size else 0,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=min(max(body.repetition_penalty, _REPETITION_PENALTIES[0]), _REPETITION_PENALTIES[1]),
    )
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=np.array(prompt_ids, dtype=np.int32),
        num_sequences=body.n,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=_seed(body, origin, prompt_index),
        stop_strings=body.stop,
        ignore_eos=body.ignore_eos,
        want_logprobs=num_top_logprobs is not None,
        logit_bias=body.logit_bias,
        cache_salt=f"{origin.key_salt}:{body.cache_salt}" if origin.key_salt else body.cache_salt,
        stop_token_ids=body.stop_token_ids,
        min_tokens=body.min_tokens,
        is_streamed=body.stream,
        num_top_logprobs=num_top_logprobs or 0,
        client=origin.client,
        priority=body.priority,
        is_background=origin.is_background,
    )


def _seed(body: SamplingFields, origin: Origin, prompt_index: int) -> int:
    if body.seed is not None:
        return body.seed & _UINT64_MASK
    if origin.seed is None:
        return secrets.randbits(64)
    return (origin.seed + prompt_index * _SEED_STEP) & _UINT64_MASK
