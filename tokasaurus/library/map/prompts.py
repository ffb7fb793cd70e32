"""What a row asks: a template, a column or a function of the row → the prompt that is sent."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from tokasaurus.library.map.rows import Row, Source, is_missing, listed_columns
from tokasaurus.text.exact_json import dumps

PromptOf: TypeAlias = "str | Callable[[Row], Any]"
"""A template such as "{question}", the name of a column, or a function of the row."""


class NoPrompt(Exception):
    """A row has no prompt. The message says why."""


class Prompts:
    """How the rows of a job become prompts."""

    def __init__(
        self,
        source: Source,
        prompt: PromptOf | None,
        messages: PromptOf | None,
        chat: bool,
        embed: PromptOf | None = None,
    ) -> None:
        """prompt: gives a text, or token ids; or messages, which are sent as a chat. messages: gives messages, and is
        no template. chat: a text is sent as the message of a user. embed: gives a text that becomes a vector. Raises
        TypeError and ValueError."""
        asked = {"prompt": prompt, "messages": messages, "embed": embed}
        if len(given_ones := [name for name, each in asked.items() if each is not None]) != 1:
            raise TypeError("map needs either prompt= or messages= or embed=")
        if chat and prompt is None:
            raise TypeError(f"chat=True goes with prompt=; {given_ones[0]}= is none")
        self._chat = chat
        self._is_messages = messages is not None
        (argument,) = given_ones
        given = asked[argument]
        self.description = given if isinstance(given, str) else f"function {getattr(given, '__name__', given)}"
        """The prompt's source, for messages about a job that has changed."""
        self.is_text = isinstance(given, str) and messages is None and ("{" in given or "}" in given)
        """Whether each prompt is a text, made by a template."""
        self.columns: list[str] | None = None
        """Columns that the prompts need; None: all."""
        self._make: Callable[[Row], Any]
        if isinstance(given, str):
            if self.is_text:
                self._make, self.columns = _template(given)
            else:
                self._make, self.columns = _column(given), [given]
            missing = [name for name in self.columns if name not in source.columns] if source.columns else []
            if missing:
                no_template = "" if "{" in given or messages is not None else ' (a template has {}, as "{question}")'
                raise ValueError(
                    f"{argument}={given!r}: {source.description} has no column {missing[0]!r}{no_template}; "
                    f"{listed_columns(source)}"
                )
        elif inspect.iscoroutinefunction(given):
            raise TypeError(f"{argument} must be a function that returns the prompt, not an async one")
        elif callable(given):
            self._make = _function(given, argument)
        else:
            raise TypeError(f"{argument} must be a string or a function of the row, not {type(given).__name__}")

    def make(self, row: Row) -> Any:
        """What RequestFormat.line takes. Raises NoPrompt."""
        prompt = self._make(row)
        if is_missing(prompt):
            raise NoPrompt(f"there is no prompt: it is {prompt}")
        if isinstance(prompt, str):
            if self._is_messages:
                raise NoPrompt("messages must be a list of dicts, not a text")
            return [{"role": "user", "content": prompt}] if self._chat else prompt
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            if not all(isinstance(message, Mapping) for message in prompt):
                raise NoPrompt("messages must be a list of dicts, and not all of its items are dicts")
            return [
                {
                    name: _without_nulls(value)
                    for name, value in message.items()
                    if value is not None or name == "content"
                }
                for message in prompt
            ]
        if self._is_messages:
            raise NoPrompt("messages must be a list of dicts that is not empty")
        return prompt


def _template(template: str) -> tuple[Callable[[Row], str], list[str]]:
    """(row → text, the columns in it). Raises ValueError."""
    parts: list[tuple[str, str | None]] = []
    try:
        for literal, name, specification, conversion in string.Formatter().parse(template):
            if name == "":
                raise ValueError("{} has no column; a brace itself is written {{ or }}")
            if specification or conversion:
                raise ValueError(f"{{{name}}} has a format, and only the column can be given")
            parts.append((literal, name))
    except ValueError as error:
        raise ValueError(f"prompt={template!r}: {error}; {{{{ and }}}} are braces that are no column") from None
    columns = list(dict.fromkeys(name for _, name in parts if name is not None))

    def make(row: Row) -> str:
        texts = []
        for literal, name in parts:
            texts.append(literal)
            if name is not None:
                value = row.get(name)
                texts.append(value if isinstance(value, str) else _as_text(value, name))
        return "".join(texts)

    return make, columns


def _as_text(value: object, name: str) -> str:
    """The text of a value in a template. Raises NoPrompt."""
    if value is None:
        raise NoPrompt(f"there is no prompt: the column {name!r} is null")
    if isinstance(value, dict | list | tuple):
        try:
            return dumps(value).decode()
        except TypeError as error:
            raise NoPrompt(f"the column {name!r} cannot be a text: {error}") from None
    try:
        return str(value)
    except Exception as error:
        raise NoPrompt(f"the column {name!r} cannot be a text: {type(error).__name__}: {error}") from None


def _column(name: str) -> Callable[[Row], Any]:
    def make(row: Row) -> Any:
        value = row.get(name)
        if value is None:
            raise NoPrompt(f"there is no prompt: the column {name!r} is null")
        return value

    return make


def _function(function: Callable[[Row], Any], argument: str) -> Callable[[Row], Any]:
    def make(row: Row) -> Any:
        try:
            return function(dict(row))  # which may change it
        except Exception as error:
            raise NoPrompt(f"the function of {argument}= failed: {type(error).__name__}: {error}") from None

    return make


def _without_nulls(value: Any) -> Any:
    """The value without members of dicts that are null: a column of dicts has every member in every row."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(member) for name, member in value.items() if member is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value
