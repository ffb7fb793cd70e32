"""GET /v1/models, POST /tokenize, POST /detokenize, GET /tokenizer_info: the served model and its tokenizer."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from tokasaurus.messages.commands import NamedAdapter
from tokasaurus.server.errors import InvalidRequest
from tokasaurus.server.json_body import JsonBodyRoute
from tokasaurus.server.openapi import BODY_ERRORS, answers, example_body
from tokasaurus.server.paths import squeeze_slashes
from tokasaurus.server.prepare.chat import check_names, encode_messages, template_of
from tokasaurus.server.protocol.chat import ChatMessage, TemplateFields
from tokasaurus.server.protocol.fields import NullMeans, StrictObject
from tokasaurus.server.protocol.tools import Tools
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.state import ServerState, num_body_bytes, state_of
from tokasaurus.text.json_lines import write_json


@dataclass(frozen=True, slots=True)
class ModelObject:
    """created: start of the server, as Unix time in seconds.

    max_model_len: most tokens of a request's prompt and completion together on this server, by the model, the KV cache
    or a flag; null while the model is loading. root: the checkpoint that the name stands for; of an adapter, its
    directory when it was loaded. parent: of an adapter, the served model.
    """

    id: str
    created: int
    max_model_len: int | None
    root: str
    object: Literal["model"] = "model"
    owned_by: str = "tokasaurus"
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class ModelList:
    data: list[ModelObject]
    object: Literal["list"] = "list"


class TokenizeRequest(TemplateFields):
    """Exactly one of prompt and messages is required.

    model: as in other bodies.
    add_special_tokens: add the tokenizer's special tokens, such as bos, to a prompt; chat templates write their own.
    return_token_strs: also return each token as spelled in the vocabulary.
    tools: as in a chat body; only with messages.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage] | None, Field(min_length=1, fail_fast=True)] = None
    add_special_tokens: bool | None = None
    return_token_strs: Annotated[bool, NullMeans(False)] = False
    tools: Tools = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TokenizeResponse:
    """max_model_len: maximum tokens of prompt and completion together."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(StrictObject):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


@dataclass(frozen=True, slots=True)
class DetokenizeResponse:
    prompt: str


router = APIRouter(route_class=JsonBodyRoute)


@router.get("/v1/models", tags=["models"], responses=answers(ModelList))
async def list_models(request: Request) -> Response:
    """The served model, once under each of its names, then all adapters; its own name comes first."""
    state = state_of(request)
    models = [_model_object(state, name) for name in state.model.listed_names]
    return _json(write_json(ModelList([*models, *(_adapter_object(state, one) for one in _adapters(state))])))


# a path, since names such as org/name contain slashes
@router.get("/v1/models/{name:path}", tags=["models"], responses=answers(ModelObject, 404))
async def retrieve_model(request: Request, name: str) -> Response:
    """The model or adapter with this name; "default" and the flag model= are other names of the served model."""
    state = state_of(request)
    adapter = next((one for one in _adapters(state) if squeeze_slashes(f"/{one.name}") == f"/{name}"), None)
    if adapter is not None:
        return _json(write_json(_adapter_object(state, adapter)))
    return _json(write_json(_model_object(state, state.model.name_in_path(name))))


def _adapters(state: ServerState) -> list[NamedAdapter]:
    return [adapter for adapter in state.engine.control.adapters.named if adapter.name]


def _adapter_object(state: ServerState, adapter: NamedAdapter) -> ModelObject:
    return replace(_model_object(state, adapter.name), root=adapter.source, parent=state.model.name)


def _model_object(state: ServerState, name: str) -> ModelObject:
    limits, model = state.engine.limits, state.model
    max_model_len = None if limits is None else limits.max_tokens_per_sequence
    return ModelObject(name, model.created, max_model_len, root=model.name if model.source is None else model.source)


@router.post(
    "/tokenize",
    tags=["tokenizer"],
    responses=answers(TokenizeResponse, *BODY_ERRORS, 404, 503),
    openapi_extra=example_body({"prompt": "What do whales eat?"}),
)
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """The token ids of a prompt, or of messages formatted with the model's chat template."""
    state = state_of(request)
    state.adapter_for(body.model)
    limits = state.ready_limits()
    size = num_body_bytes(request)
    run = state.text_threads.run_apart if body.chat_template else state.text_threads.run
    content = await run(size, _tokenize, body, state, size, limits.max_tokens_per_sequence)
    return _json(content)


@router.post(
    "/detokenize",
    tags=["tokenizer"],
    responses=answers(DetokenizeResponse, *BODY_ERRORS, 404),
    openapi_extra=example_body({"tokens": [1, 2, 3]}),
)
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """The text of token ids, including the names of special tokens."""
    state = state_of(request)
    state.adapter_for(body.model)
    if len(body.tokens) > state.config.max_tokenize_chars:
        raise InvalidRequest(
            f"tokens has {len(body.tokens)} token ids: there may be at most {state.config.max_tokenize_chars}",
            "tokens",
        )
    content = await state.text_threads.run(num_body_bytes(request), _detokenize, body, state.model)
    return _json(content)


@router.get("/tokenizer_info", tags=["tokenizer"])
async def tokenizer_info(request: Request) -> Response:
    """The chat template, and the special tokens by role, such as eos_token."""
    tokenizer = state_of(request).model.tokenizer
    info: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.named_tokens}
    return _json(write_json(info | {"chat_template": tokenizer.chat_template}))


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _check_length(body: TokenizeRequest, num_bytes: int, max_chars: int) -> None:
    """num_bytes: size of the body. Raises InvalidRequest if the texts to tokenize have more characters."""
    param = "prompt" if body.messages is None else "messages"
    num_chars = len(body.prompt or "")
    # The template may write any field of the messages and tools, so their JSON counts. A character takes at most 12
    # bytes of a body.
    if body.messages is not None and num_bytes > max_chars:
        num_chars = num_bytes // 12
        if num_chars <= max_chars:
            num_chars = len(body.model_dump_json())
    if num_chars > max_chars:
        raise InvalidRequest(
            f"{param} may have at most {max_chars} characters for /tokenize, not {num_chars}",
            param,
        )


def _tokenize(body: TokenizeRequest, state: ServerState, num_bytes: int, max_model_len: int) -> bytes:
    model = state.model
    _check_length(body, num_bytes, state.config.max_tokenize_chars)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("just one of prompt and messages is needed", "prompt")
    if body.messages is not None:
        if body.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens goes with prompt: a chat template writes them itself", "add_special_tokens"
            )
        check_names(body.tools)
        token_ids = encode_messages(body.messages, body, model, template_of(body, model), tools=body.tools)
    else:
        assert body.prompt is not None, "checked above: exactly one is set"
        for name in (*TemplateFields.model_fields, "tools"):
            if getattr(body, name) not in (None, "", {}, []):
                raise InvalidRequest(f"{name} goes with messages: a prompt has no template", name)
        add_special_tokens = True if body.add_special_tokens is None else body.add_special_tokens
        token_ids = model.tokenizer.encode(body.prompt, add_special_tokens)
    token_strs = None
    if body.return_token_strs:
        token_strs = [model.tokenizer.vocabulary_entry(token_id) for token_id in token_ids]
    return write_json(TokenizeResponse(len(token_ids), max_model_len, token_ids, token_strs))


def _detokenize(body: DetokenizeRequest, model: ServedModel) -> bytes:
    highest = max(body.tokens, default=0)
    num_ids = max(model.vocab_size, model.tokenizer.vocab_size)  # /tokenize may give ids that the model lacks
    if highest >= num_ids:
        raise InvalidRequest(f"tokens has the token id {highest}; valid ids are 0 to {num_ids - 1}", "tokens")
    return write_json(DetokenizeResponse(model.tokenizer.decode(body.tokens, skip_special_tokens=False)))
