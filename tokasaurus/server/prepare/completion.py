"""A completions body → its requests, and the echo of its prompts: their text and the offset of each token in it."""

import codecs
from collections.abc import Iterator, Sequence

from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.errors import InvalidRequest
from tokasaurus.server.prepare.requests import (
    Draft,
    Echo,
    Origin,
    Prepared,
    asked_experts,
    asked_grammar,
    check_experts,
    check_fields,
    check_max_tokens,
    check_prompt_values,
    check_vocabulary,
    checked_top,
    make_requests,
    prompt_top,
    response_id_of,
    room_after,
    too_long,
    truncate,
)
from tokasaurus.server.protocol.completions import CompletionRequest, Prompt
from tokasaurus.server.served_model import ServedModel
from tokasaurus.text.tokenizer import TextTooLong, Tokenizer

# Per body: the length of its grammar times its prompts, since each request in the engine has its own copy.
MAX_GRAMMAR_CHARS_OF_PROMPTS = 1 << 27
# Per body: allowed_token_ids times its prompts, for the same reason.
MAX_ALLOWED_TOKENS_OF_PROMPTS = 1 << 22
DEFAULT_COMPLETION_TOKENS = 16


def draft_completion(
    body: CompletionRequest,
    model: ServedModel,
    limits: EngineLimits,
    origin: Origin,
    default_tokens: int | None = DEFAULT_COMPLETION_TOKENS,
    may_only_score: bool = False,
) -> Draft:
    """The requests of a body. Tokenizes: a long body must not run on the event loop. Raises InvalidRequest.

    default_tokens: most new tokens if the body does not say, or as many as there is room for; None is all of it.
    may_only_score: max_tokens may be 0 without an echo, for prompt_logprobs."""
    if body.max_tokens == 0 and not body.echo and not may_only_score:
        raise InvalidRequest("max_tokens must be at least 1, unless echo is true", "max_tokens")
    check_fields(body, model)
    num_top = None if body.logprobs is None else checked_top(body.logprobs, "logprobs", model)
    num_prompt_top, experts_from = prompt_top(body, model), asked_experts(body, limits)
    needed_prompt_tops = [top for top in (num_prompt_top, num_top if body.echo else None) if top is not None]
    grammar = asked_grammar(body)
    if grammar is not None and len(grammar.text) * len(body.prompt) > MAX_GRAMMAR_CHARS_OF_PROMPTS:
        raise InvalidRequest(
            f"{grammar.param} has {len(grammar.text)} characters, for each of {len(body.prompt)} prompts: "
            f"together there may be {MAX_GRAMMAR_CHARS_OF_PROMPTS}",
            grammar.param,
        )
    num_allowed = len(body.allowed_token_ids or ())
    if num_allowed * len(body.prompt) > MAX_ALLOWED_TOKENS_OF_PROMPTS:
        raise InvalidRequest(
            f"allowed_token_ids has {num_allowed} token ids, for each of {len(body.prompt)} prompts: "
            f"together there may be {MAX_ALLOWED_TOKENS_OF_PROMPTS}",
            "allowed_token_ids",
        )
    response_id = response_id_of(body, "cmpl-")
    prompts, echoes = [], []
    adds_special = body.add_special_tokens is not False
    for given, all_ids in zip(body.prompt, _tokenize(body, adds_special, model, limits), strict=True):
        prompt_ids = truncate(all_ids, body, default_tokens if body.max_tokens is None else body.max_tokens, limits)
        prompt = given if len(prompt_ids) == len(all_ids) else prompt_ids
        if len(prompt_ids) <= limits.max_tokens_per_sequence:  # a longer one is refused for its length, in less time
            check_vocabulary(prompt_ids, model, "prompt")
        room = room_after(prompt_ids, limits, "prompt", fewest=0 if body.max_tokens == 0 else 1)
        max_new_tokens = room if default_tokens is None else min(default_tokens, room)
        if body.max_tokens is not None:
            max_new_tokens = check_max_tokens(body.max_tokens, "max_tokens", prompt_ids, limits)
        prompts.append((prompt_ids, max_new_tokens))
        if body.echo:
            echoes.append(make_echo(prompt, prompt_ids, model.tokenizer, num_top is not None, adds_special))
    requests = make_requests(
        response_id,
        body,
        prompts,
        model,
        origin,
        num_top_logprobs=num_top,
        num_top_prompt_logprobs=max(needed_prompt_tops, default=None),
        wants_experts=experts_from is not None,
    )
    check_experts(requests, limits)
    if body.echo:
        check_prompt_values(requests, num_top or 0, "echo")
    if num_prompt_top is not None:
        check_prompt_values(requests, num_prompt_top, "prompt_logprobs")
    if body.return_token_ids:
        check_prompt_values(requests, 0, "return_token_ids")
    prepared = Prepared(
        response_id,
        requests,
        body.logprobs_in_fingerprint,
        body.return_token_ids,
        body.return_tokens_as_token_ids,
        echoes=echoes,
        keeps_stop=body.include_stop_str_in_output or body.no_stop_trim,
        num_top_prompt_logprobs=num_prompt_top,
        experts_from=experts_from,
        adapter_name="" if origin.adapter is None else origin.adapter.name,
    )
    return Draft(prepared, grammar)


def _tokenize(body: CompletionRequest, adds_special: bool, model: ServedModel, limits: EngineLimits) -> list[list[int]]:
    """The ids of each prompt. adds_special: the tokenizer adds its tokens to texts. Raises InvalidRequest."""
    prompts = body.prompt
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    max_tokens = limits.max_tokens_per_sequence if body.truncate_prompt_tokens is None else None
    try:
        encoded = iter(model.tokenizer.encode_batch(texts, adds_special, max_tokens))
    except TextTooLong as error:
        raise too_long("prompt", error, limits) from None
    prompts_ids = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
    for prompt_ids in prompts_ids:
        if not prompt_ids:
            raise InvalidRequest("prompt has no tokens", "prompt")
    return prompts_ids


def make_echo(
    prompt: Prompt, prompt_ids: Sequence[int], tokenizer: Tokenizer, wants_offsets: bool, adds_special: bool = True
) -> Echo:
    """prompt_ids: the tokens of the prompt; for a text, with the special tokens that the tokenizer adds if
    `adds_special`."""
    is_text = isinstance(prompt, str)
    text = prompt if isinstance(prompt, str) else _text_of_ids(prompt_ids, tokenizer)
    if not wants_offsets:
        return Echo(text, [])
    offsets, token_texts = [0], []
    for token_text in _token_texts(prompt_ids, text, tokenizer):
        token_texts.append(token_text)
        offsets.append(offsets[-1] + len(token_text))
    if is_text and "".join(token_texts) != text:  # the tokenizer normalised the text
        return Echo(text, tokenizer.token_starts(text, adds_special))
    return Echo(text, [min(offset, len(text)) for offset in offsets[:-1]])


def _text_of_ids(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    tail = tokenizer.prompt_tail(prompt_ids)
    num_settled = len(prompt_ids) - tail.num_open_tokens
    if tail.num_open_tokens and tuple(prompt_ids[num_settled:]) == tail.token_ids[-tail.num_open_tokens :]:
        # Without these bytes, since a run of byte tokens that is no valid UTF-8 has none of its characters.
        return tokenizer.decode(prompt_ids[:num_settled], skip_special_tokens=False)
    text = tokenizer.decode(prompt_ids, skip_special_tokens=False)
    return text.removesuffix(tokenizer.decode_after(tail, []))


def _token_texts(prompt_ids: Sequence[int], text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """The text of each token: the characters that it completes, "" for a special token that is not in `text`."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    num_characters = 0
    for index, token_id in enumerate(prompt_ids):
        token_text = decoder.decode(tokenizer.token_bytes(token_id, is_first=index == 0))
        if token_id in tokenizer.special_ids and not text.startswith(token_text, num_characters):
            token_text = ""
        num_characters += len(token_text)
        yield token_text
