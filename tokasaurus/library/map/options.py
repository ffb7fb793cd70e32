"""The keywords of `map` that say what to do with the rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from tokasaurus.library.keywords import ChatOptions

if TYPE_CHECKING:
    from tokasaurus.library.map.prompts import PromptOf
    from tokasaurus.library.requests import Schema
    from tokasaurus.library.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class MapOptions:
    """`Client.map` says what each means; a wrong value is found when the rows have been opened."""

    prompt: PromptOf | None = None
    messages: PromptOf | None = None
    embed: PromptOf | None = None
    embed_dtype: str = "float32"
    chat: bool = False
    key: str | None = None
    sampling: Sampling | None = None
    schema: Schema[Any] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    columns: Sequence[str] = ()
    format: str | None = None
    prefix: str = ""
    overwrite: bool = False
    retry_errors: bool = False
    progress: bool = True


class MapKeywords(ChatOptions, total=False):
    """MapOptions for type checkers, beside the other fields of bodies."""

    prompt: PromptOf | None
    messages: PromptOf | None
    embed: PromptOf | None
    embed_dtype: str
    chat: bool
    key: str | None
    sampling: Sampling | None
    schema: Schema[Any] | None
    tools: Sequence[Mapping[str, Any]] | None
    columns: Sequence[str]
    prefix: str
    progress: bool


class StoredMapKeywords(MapKeywords, total=False):
    """Also keywords that need an output directory."""

    format: str | None
    overwrite: bool
    retry_errors: bool


KEYWORDS = tuple(field.name for field in fields(MapOptions))


def show_keywords(method: Callable[..., Any]) -> None:
    """Give a method with **keywords the signature that `help` and editors show: each of MapOptions, and its default."""
    signature = inspect.signature(method)
    kept = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    own = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(MapOptions)
    ]
    rest = inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD, annotation="Unpack[ChatOptions]")
    method.__signature__ = signature.replace(parameters=[*kept, *own, rest])  # type: ignore[attr-defined]
