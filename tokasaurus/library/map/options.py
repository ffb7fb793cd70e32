"""The arguments of `map` that say what to do with the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokasaurus.library.map.prompts import PromptOf


@dataclass(frozen=True, slots=True, kw_only=True)
class MapOptions:
    """`Client.map` says what each means; a wrong value is found when the rows have been opened."""

    prompt: PromptOf | None = None
    messages: PromptOf | None = None
    chat: bool = False
    key: str | None = None
    columns: Sequence[str] = ()
    format: str | None = None
    prefix: str = ""
    overwrite: bool = False
    retry_errors: bool = False
    progress: bool = True
