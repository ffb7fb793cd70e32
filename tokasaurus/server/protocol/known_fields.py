"""Fields of bodies that OpenAI and other servers know beyond the plain ones: which values are accepted here, and why
others are refused.

One table: bodies get their fields without effect from it (`with_known_fields`), errors their sentences, docs/fields.md
its rows, and the tests their cases.
"""

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, create_model

from tokasaurus.messages.sampling import CLIENT_PARAMETERS, ClientParameter
from tokasaurus.server.protocol.fields import Only

Model = TypeVar("Model", bound=BaseModel)

Endpoint = Literal["chat", "completions"]

BOTH: tuple[Endpoint, ...] = ("chat", "completions")
CHAT: tuple[Endpoint, ...] = ("chat",)
COMPLETIONS: tuple[Endpoint, ...] = ("completions",)


@dataclass(frozen=True, slots=True)
class KnownField:
    """One row. Exactly one of `effect` and `instead` may be given; with neither, no value has an effect."""

    servers: tuple[str, ...]
    """Whose field it is."""
    neutral: tuple[object, ...] = (None,)
    """Values that are accepted and have no effect. Of a field without any effect, examples."""
    endpoints: tuple[Endpoint, ...] = BOTH
    effect: str = ""
    """What the other values do here; "" if they are refused."""
    examples: tuple[object, ...] = ()
    """Values with that effect."""
    instead: str = ""
    """What refused values could be replaced by, or why they are refused; a clause after a semicolon. Of a field without
    any effect: why nothing depends on it."""
    is_ignored: bool = False
    """No value has an effect: the field does not concern the answers of this server."""
    type: Any = Any
    """Type of the values of a field without any effect, unless the bodies declare it themselves."""

    @property
    def is_neutral_only(self) -> bool:
        """All values but the neutral ones are refused."""
        return not self.effect and not self.is_ignored


def _built(effect: str, *examples: object) -> dict[str, Any]:
    return {"effect": effect, "examples": examples}


def _examples(parameter: ClientParameter) -> tuple[float, ...]:
    """A value with an effect; of a whole number also with a point, as some clients write it."""
    value = parameter.strong
    return (value, float(value)) if isinstance(value, int) else (value,)


_OPENAI, _VLLM, _SGLANG, _TGI, _LLAMA = ("OpenAI",), ("vLLM",), ("SGLang",), ("TGI",), ("llama.cpp",)
_BOTH_ENGINES = ("vLLM", "SGLang")
_OF_OPENAI = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
"""Sampling parameters of OpenAI's API, which need no entry here."""
_NO_MEDIA = "the models served here read and write text alone"
_NO_BEAMS = "n samples with logprobs can be ranked by the client"
_CACHED_ANYWAY = "cached prompts are found without it, and kept while there is room"
_NO_ROUTING = "this server routes requests itself"

KNOWN_FIELDS: Mapping[str, KnownField] = {
    # OpenAI
    "audio": KnownField(_OPENAI, endpoints=CHAT, instead=_NO_MEDIA),
    "function_call": KnownField(_OPENAI, (None, "none", "auto"), CHAT, instead="tool_choice is its newer form"),
    "functions": KnownField(_OPENAI, (None, []), CHAT, instead="tools is its newer form"),
    "metadata": KnownField(_OPENAI, (None, {"a": "b"}), is_ignored=True),
    "modalities": KnownField(_OPENAI, (None, ["text"]), CHAT, instead=_NO_MEDIA),
    "moderation": KnownField(_OPENAI, endpoints=CHAT, instead="no moderation model is served here"),
    "prediction": KnownField(
        _OPENAI,
        (None, {"type": "content", "content": "x"}),
        CHAT,
        instead="it is meant to save time, and the text does not depend on it",
        is_ignored=True,
        type=dict[str, Any],
    ),
    "prompt_cache_key": KnownField(_OPENAI, (None, "x"), is_ignored=True),
    "prompt_cache_options": KnownField(
        _OPENAI, (None, {"mode": "explicit"}), CHAT, instead=_CACHED_ANYWAY, is_ignored=True, type=dict[str, Any]
    ),
    "prompt_cache_retention": KnownField(
        _OPENAI, (None, "in_memory", "24h"), CHAT, instead=_CACHED_ANYWAY, is_ignored=True, type=str
    ),
    "safety_identifier": KnownField(_OPENAI, (None, "x"), is_ignored=True),
    "service_tier": KnownField(
        _OPENAI,
        (None, "auto", "default", "flex", "scale", "priority", "fast", "ultrafast"),
        instead="there is one tier; priority orders the waiting requests of a client",
        is_ignored=True,
        type=str,
    ),
    "store": KnownField(
        _OPENAI,
        (None, True, False),
        instead="answers are not kept, so that there is nothing to retrieve",
        is_ignored=True,
        type=bool,
    ),
    "suffix": KnownField(
        _OPENAI, (None, ""), COMPLETIONS, instead="write the model's own marks for filling a gap into the prompt"
    ),
    "user": KnownField(_OPENAI, (None, "me"), is_ignored=True),
    "verbosity": KnownField(
        _OPENAI,
        (None, "low", "medium", "high"),
        CHAT,
        instead="ask for short or long answers in a message",
        is_ignored=True,
        type=Literal["low", "medium", "high"],
    ),
    "web_search_options": KnownField(_OPENAI, endpoints=CHAT, instead="give the model a tool that searches"),
    "best_of": KnownField(
        ("OpenAI", "vLLM", "SGLang", "TGI"), (None, 1), **_built("accepted if it equals n, which it then repeats")
    ),
    # vLLM and SGLang: sampling
    **{
        name: KnownField(
            _BOTH_ENGINES,
            (None,),  # any number may differ from the server's default
            **_built(each.meaning, *_examples(each)),
        )
        for name, each in CLIENT_PARAMETERS.items()
        if name not in _OF_OPENAI
    },
    "min_tokens": KnownField(_BOTH_ENGINES, (None, 0), **_built("fewest tokens", 2, 2.0)),
    "ignore_eos": KnownField(_BOTH_ENGINES, (None, False), **_built("the end token does not end the text", True)),
    "stop_token_ids": KnownField(_BOTH_ENGINES, (None, []), **_built("token ids that end the text", [5])),
    "allowed_token_ids": KnownField(_VLLM, **_built("the only tokens that may be sampled", [5, 6.0])),
    "bad_words": KnownField(
        _VLLM, (None, []), **_built("words that do not occur, with or without a space before", ["hello", "how are"])
    ),
    "use_beam_search": KnownField(_VLLM, (None, False), instead=_NO_BEAMS),
    "length_penalty": KnownField(_VLLM, (None, 1), instead=_NO_BEAMS),
    "logits_processors": KnownField(_VLLM, (None, []), instead="code of a client does not run on this server"),
    "watermarking": KnownField(_VLLM, (None, False)),
    "repetition_detection": KnownField(_VLLM),
    "custom_logit_processor": KnownField(_SGLANG, instead="code of a client does not run on this server"),
    "custom_params": KnownField(_SGLANG, (None, {})),
    "stop_regex": KnownField(_SGLANG, (None, "", []), instead="stop has texts, and regex says what a whole text is"),
    # vLLM and SGLang: the text
    "skip_special_tokens": KnownField(_BOTH_ENGINES, (None, True), **_built("the text has the special tokens", False)),
    "include_stop_str_in_output": KnownField(
        _VLLM, (None, False), **_built("the text keeps the stop string or token that ended it", True)
    ),
    "no_stop_trim": KnownField(
        _SGLANG, (None, False), **_built("the text keeps the stop string or token that ended it", True)
    ),
    "spaces_between_special_tokens": KnownField(_BOTH_ENGINES, (None, True, False), is_ignored=True),
    # vLLM and SGLang: log-probabilities and tokens
    "prompt_logprobs": KnownField(_VLLM, **_built("log-probabilities of the prompt's tokens", 1)),
    "return_token_ids": KnownField(_BOTH_ENGINES, (None, False), **_built("token ids of prompts and choices", True)),
    "return_tokens_as_token_ids": KnownField(
        _VLLM, (None, False), **_built("log-probabilities name tokens by their ids", True)
    ),
    "logprob_token_ids": KnownField(_VLLM),
    "return_token_offsets": KnownField(_VLLM, (None, False)),
    "return_prompt_text": KnownField(_VLLM, (None, False), CHAT, instead="/detokenize gives it for prompt_token_ids"),
    "prompt_embeds": KnownField(_VLLM, endpoints=COMPLETIONS, instead="prompts are texts or token ids"),
    # vLLM and SGLang: prompts
    "truncate_prompt_tokens": KnownField(
        _VLLM, **_built("keeps the last tokens of a prompt; -1: as many as leave room for the answer", 1, -1, 3.0)
    ),
    "truncation_side": KnownField(_VLLM, (None, "left"), instead="the last tokens are kept"),
    "add_special_tokens": KnownField(
        _VLLM,
        **_built("whether the tokenizer adds bos and the like; null: for completions, not for chats", True, False),
    ),
    # vLLM and SGLang: chat templates
    "add_generation_prompt": KnownField(
        _VLLM, (None, True), CHAT, **_built("whether the start of an answer is written", False)
    ),
    "continue_final_message": KnownField(
        _BOTH_ENGINES, (None, False), CHAT, **_built("the answer continues the final message", True)
    ),
    "chat_template_kwargs": KnownField(
        _BOTH_ENGINES, (None, {}), CHAT, **_built("variables of the chat template", {"enable_thinking": False})
    ),
    "reasoning_effort": KnownField(
        ("OpenAI", "vLLM"), endpoints=CHAT, **_built("how long the model thinks, if its template knows it", "low")
    ),
    "enable_thinking": KnownField(
        ("vLLM", "SGLang"), endpoints=CHAT, **_built("whether the model thinks, if its template knows it", False)
    ),
    "separate_reasoning": KnownField(
        _SGLANG, (None, True), CHAT, **_built("whether reasoning is split off the content, if the model has any", False)
    ),
    "include_reasoning": KnownField(_VLLM, (None, True), CHAT, **_built("whether the reasoning is returned", False)),
    "chat_template": KnownField(
        _VLLM,
        (None, ""),
        CHAT,
        **_built("the chat template, with the flag request_chat_template=T", "{{ messages[0].content }}"),
    ),
    "echo": KnownField(
        ("OpenAI", "vLLM", "SGLang"),
        (None, False),
        **_built("the text begins with the prompt; of a chat, with the final message if it is the assistant's", True),
    ),
    "documents": KnownField(_VLLM, (None, []), CHAT, instead='chat_template_kwargs={"documents": …} passes them on'),
    "media_io_kwargs": KnownField(_VLLM, (None, {}), CHAT, instead=_NO_MEDIA),
    "mm_processor_kwargs": KnownField(_VLLM, (None, {}), CHAT, instead=_NO_MEDIA),
    "return_mm_kwargs": KnownField(_VLLM, (None, True), CHAT, instead=_NO_MEDIA),
    "images_config": KnownField(_SGLANG, (None, {}), instead=_NO_MEDIA),
    # vLLM and SGLang: the format of the text
    "structured_outputs": KnownField(_VLLM, **_built("a grammar of the text", {"choice": ["a"], "backend": "auto"})),
    "guided_json": KnownField(_VLLM, **_built("a JSON schema of the text", {"type": "object"})),
    "guided_regex": KnownField(_VLLM, **_built("a regular expression of the text", "a+")),
    "guided_choice": KnownField(_VLLM, **_built("the texts that are possible", ["a", "b"])),
    "guided_grammar": KnownField(_VLLM, **_built("a grammar of the text", 'start: "a"')),
    "guided_decoding_backend": KnownField(
        _VLLM, (None, "auto", "guidance"), instead="llguidance is the only one, and is chosen always"
    ),
    "guided_whitespace_pattern": KnownField(
        _VLLM, instead="structured_outputs has disable_any_whitespace for JSON without white space"
    ),
    "structural_tag": KnownField(_BOTH_ENGINES, (None, "")),
    "json_schema": KnownField(
        ("SGLang", "llama.cpp"), (None, "", {}), **_built("a JSON schema of the text", '{"type": "object"}')
    ),
    "regex": KnownField(_SGLANG, (None, ""), **_built("a regular expression of the text", "a+")),
    "ebnf": KnownField(_SGLANG, (None, ""), **_built("a grammar of the text, as in guided_grammar", 'root ::= "a"')),
    "grammar": KnownField(_LLAMA, (None, ""), **_built("a grammar of the text, as in guided_grammar", 'root ::= "a"')),
    # vLLM and SGLang: scheduling
    "request_id": KnownField(_VLLM, **_built("the end of the answer's id, after cmpl-, chatcmpl- etc.", "mine")),
    "rid": KnownField(_SGLANG, **_built("the id of the answer", "mine")),
    "priority": KnownField(_BOTH_ENGINES, (None, 0), **_built("orders the waiting requests of a client", 3)),
    "cache_salt": KnownField(_BOTH_ENGINES, **_built("cached prompts are shared among requests with equal salts", "x")),
    "thinking_token_budget": KnownField(_VLLM),
    "stream_interval": KnownField(_VLLM, instead="chunks are as long as the engine's steps make them"),
    "session_id": KnownField(_BOTH_ENGINES, instead="the header X-Session-ID names a session, with rl=T"),
    "session_params": KnownField(_SGLANG, (None, {})),
    "lora_path": KnownField(_SGLANG, instead="model names an adapter"),
    "kv_transfer_params": KnownField(_VLLM, (None, {}), instead="prefill and decode are in one process"),
    "ec_transfer_params": KnownField(_VLLM, (None, {}), instead=_NO_MEDIA),
    "vllm_xargs": KnownField(_VLLM, (None, {}), instead="they are for extensions of vLLM"),
    "routed_experts_prompt_start": KnownField(
        _VLLM, **_built("choices have the experts of the tokens from this one on, if the model has experts", 1)
    ),
    "return_hidden_states": KnownField(_SGLANG, (None, False)),
    "return_routed_experts": KnownField(
        _SGLANG, (None, False), **_built("choices have the experts of their tokens, if the model has experts")
    ),
    "routed_experts_start_len": KnownField(_SGLANG, (None, 0), instead="routed_experts_prompt_start is its name here"),
    "return_cached_tokens_details": KnownField(
        _SGLANG, (None, False), instead="usage.prompt_tokens_details always has them"
    ),
    "bootstrap_host": KnownField(_SGLANG, instead="prefill and decode are in one process"),
    "bootstrap_port": KnownField(_SGLANG, instead="prefill and decode are in one process"),
    "bootstrap_room": KnownField(_SGLANG, instead="prefill and decode are in one process"),
    "routed_dp_rank": KnownField(_SGLANG, instead=_NO_ROUTING),
    "disagg_prefill_dp_rank": KnownField(_SGLANG, instead=_NO_ROUTING),
    "data_parallel_rank": KnownField(_SGLANG, instead=_NO_ROUTING),
    "extra_key": KnownField(_SGLANG, (None, ""), instead="cache_salt keeps cached prompts apart"),
    "ngram_corpus_id": KnownField(_SGLANG),
    "custom_labels": KnownField(_SGLANG, (None, {})),
    # TGI and llama.cpp
    "max_new_tokens": KnownField(("SGLang", "TGI"), instead="max_tokens is its name here"),
    "n_predict": KnownField(_LLAMA, (None, -1), instead="max_tokens is its name here"),
    "repeat_penalty": KnownField(_LLAMA, (None, 1), instead="repetition_penalty is its name here"),
    "repeat_last_n": KnownField(_LLAMA, (None, 64, 0, -1), instead="repetition_penalty covers the whole context"),
    "typical_p": KnownField(("TGI", "llama.cpp"), (None, 1)),
    "watermark": KnownField(_TGI, (None, False)),
    "do_sample": KnownField(_TGI, (None, True), instead="temperature=0 is greedy"),
    "details": KnownField(_TGI, (None, False), instead="logprobs and return_token_ids give them"),
    "decoder_input_details": KnownField(_TGI, (None, False), instead="prompt_logprobs gives them"),
    "return_full_text": KnownField(_TGI, (None, False), instead="echo is its name here"),
    "top_n_tokens": KnownField(_TGI, (None, 0), instead="logprobs and top_logprobs are its names here"),
    "truncate": KnownField(_TGI, instead="truncate_prompt_tokens is its name here"),
    "adapter_id": KnownField(_TGI, (None, ""), instead="model names an adapter"),
    "tool_prompt": KnownField(_TGI, endpoints=CHAT, instead="the chat template describes the tools"),
    "guideline": KnownField(_TGI, endpoints=CHAT, instead="write it into a message"),
    "cache_prompt": KnownField(_LLAMA, (None, True), instead="a cache_salt of its own keeps a request from the cache"),
    "mirostat": KnownField(_LLAMA, (None, 0)),
    "mirostat_tau": KnownField(_LLAMA, (None, 5.0)),
    "mirostat_eta": KnownField(_LLAMA, (None, 0.1)),
    "dry_multiplier": KnownField(_LLAMA, (None, 0)),
    "xtc_probability": KnownField(_LLAMA, (None, 0)),
    "xtc_threshold": KnownField(_LLAMA, (None, 0.1)),
    "dynatemp_range": KnownField(_LLAMA, (None, 0)),
    "dynatemp_exponent": KnownField(_LLAMA, (None, 1)),
    "top_n_sigma": KnownField(_LLAMA, (None, -1)),
    "samplers": KnownField(_LLAMA, instead="the rules of sampling apply in vLLM's order"),
    "n_probs": KnownField(_LLAMA, (None, 0), instead="logprobs and top_logprobs are its names here"),
    "post_sampling_probs": KnownField(_LLAMA, (None, False), instead='logprobs_mode="sampled" gives them'),
    "n_keep": KnownField(_LLAMA, (None, 0), instead="a context is never shifted"),
    "min_keep": KnownField(_LLAMA, (None, 0)),
    "id_slot": KnownField(_LLAMA, (None, -1), instead=_NO_ROUTING),
    "t_max_predict_ms": KnownField(_LLAMA, (None, 0), instead="close the connection to end a request"),
    "timings_per_token": KnownField(_LLAMA, (None, False)),
    "return_progress": KnownField(_LLAMA, (None, False)),
    "return_tokens": KnownField(_LLAMA, (None, False), instead="return_token_ids is its name here"),
    "response_fields": KnownField(_LLAMA, (None, [])),
    "lora": KnownField(_LLAMA, (None, []), instead="model names an adapter"),
}


class Neutral(Only):
    """Metadata of a field that KNOWN_FIELDS lists: `Only` its neutral values are accepted."""

    def __init__(self, name: str) -> None:
        self._field = KNOWN_FIELDS[name]
        super().__init__(*self._field.neutral)
        self.description = f"Not implemented: {accepted(self._field)}."

    def refusal(self) -> str:
        return refusal(self._field)


def refusal(field: KnownField) -> str:
    """To be read after the field's name."""
    reason = f"; {field.instead}" if field.instead else ""
    return f"is a field of {_listed(field.servers)} that is not implemented here: {accepted(field)}{reason}"


def accepted(field: KnownField) -> str:
    values = [orjson.dumps(value).decode() for value in field.neutral]
    return f"only {_listed(values)} {'is' if len(values) == 1 else 'are'} accepted"


def _listed(words: Collection[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def with_known_fields(endpoint: Endpoint) -> Callable[[type[Model]], type[Model]]:
    """Decorator of a body: adds all fields of the table that have no effect at this endpoint, and are not declared."""

    def add(model: type[Model]) -> type[Model]:
        added: dict[str, Any] = {
            name: (Annotated[Any, Neutral(name)] if field.is_neutral_only else field.type | None, None)
            for name, field in KNOWN_FIELDS.items()
            if not field.effect and endpoint in field.endpoints and name not in model.model_fields
        }
        return create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **added)

    return add


def advice(name: str, fields: Collection[str]) -> str:
    """For a field that a body does not have, after its name: what may be meant, as ": did you mean …?", or "".

    fields: of the body. Only the first characters of `name` are read."""
    meant = meant_field(name, fields)
    if meant is not None:
        return f": did you mean {meant!r}?"
    known = KNOWN_FIELDS.get(name)
    return "" if known is None else f": it belongs to bodies of {_listed(known.endpoints)}"


def meant_field(name: str, fields: Collection[str]) -> str | None:
    """Which of a body's fields may be meant by one that it does not have. Only the first characters are read."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name[:100]).lower().replace("-", "_").replace(" ", "_")
    if snake in fields:
        return snake
    if name in KNOWN_FIELDS:
        return None
    swapped = [name for name in fields if sorted(name) == sorted(snake)]
    close = swapped or difflib.get_close_matches(snake, fields, n=1, cutoff=0.75)
    return close[0] if close else None
