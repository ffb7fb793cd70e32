"""Bodies of /v1/models, and of /tokenize, /detokenize and /tokenizer_info in vLLM's format."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from tokasaurus.server.protocol.chat import ChatMessage, TemplateFields
from tokasaurus.server.protocol.fields import NullMeans, StrictObject
from tokasaurus.server.protocol.tools import Tools


@dataclass(frozen=True, slots=True)
class ModelObject:
    """created: start of the server, as Unix time in seconds.

    max_model_len: most tokens of a request's prompt and completion together on this server, by the model, the KV cache
    or a flag; null while the model is loading. root: the checkpoint that all names in the list stand for.
    """

    id: str
    created: int
    max_model_len: int | None
    root: str
    object: Literal["model"] = "model"
    owned_by: str = "tokasaurus"


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
