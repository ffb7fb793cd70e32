"""Command-line flags in Pydra's syntax: parsing `name=value`, checking every value, and the help text.

Pydra casts silently (`port=8080.7` becomes 8080, `flag=false` becomes True), so values are checked here instead of
cast. A config class declares each flag's name, type and default; a FlagTable adds its meaning and allowed values.
"""

import ast
import dataclasses
import difflib
import inspect
import math
import textwrap
from types import NoneType
from typing import Any, get_args

from pydra.parser import parse_value

MAX_INT32 = 2**31 - 1


class FlagError(ValueError):
    """A flag is wrong. The message is one line that names the flag, its value and what is allowed."""


@dataclasses.dataclass(frozen=True)
class Flag:
    """Meaning and allowed values of one flag."""

    meaning: str
    """What it does, with its unit."""
    minimum: float | None = None
    """Inclusive."""
    maximum: float | None = None
    """Inclusive."""
    choices: tuple[str, ...] = ()
    """If not empty, the only allowed words."""
    none_means: str = "none"
    """What None stands for, such as "auto"; help shows it in place of None."""


@dataclasses.dataclass(frozen=True)
class FlagTable:
    """All flags of one config class."""

    groups: dict[str, dict[str, Flag]]
    """Heading → flag name → Flag; every annotated field of the config class is in exactly one group."""
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    """Second name → name."""
    not_built: frozenset[str] = frozenset()
    """Flags that are not implemented: only their default is allowed."""

    @property
    def flags(self) -> dict[str, Flag]:
        return {name: flag for group in self.groups.values() for name, flag in group.items()}


def assign_flags(config: object, table: FlagTable, words: list[str]) -> None:
    """Set attributes from `name=value` words, without checking the values; the last word for a name counts.

    Raises FlagError for a word that is not `name=value`, an unknown name, a value that cannot be parsed, or a name and
    its alias with different values.
    """
    types = _field_types(type(config))
    given: dict[str, tuple[str, Any]] = {}  # name -> (name as typed, value)
    for word in words:
        typed_name, equals, text = word.partition("=")
        if not equals:
            raise FlagError(f"{_show(word)}: not understood, flags are written name=value")
        name = table.aliases.get(typed_name, typed_name)
        if name not in table.flags:
            raise FlagError(f"{_show(word)}: unknown flag, {_suggestion(typed_name, table)}")
        value = _read(typed_name, text, table.flags[name], *types[name])
        before_name, before = given.get(name, (typed_name, value))
        if before_name != typed_name and before != value:
            raise FlagError(
                f"{typed_name}={_show(value)}: must equal {before_name}={_show(before)}, its other name, or be left out"
            )
        given[name] = (typed_name, value)
    for name, (_, value) in given.items():
        setattr(config, name, value)


def check_flags(config: object, table: FlagTable) -> None:
    """Raises FlagError for the first flag whose value has the wrong type, is out of range, or is not implemented.

    A whole float for an int flag, or an int for a float flag, is converted to the flag's type.
    """
    types = _field_types(type(config))
    for name, flag in table.flags.items():
        value = getattr(config, name)
        field_type, optional = types[name]
        if field_type is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        elif field_type is float and type(value) is int:
            value = float(value)
        if not _is_allowed(value, flag, field_type, optional):
            raise FlagError(f"{name}={_show(value)}: must be {_allowed(flag, field_type, optional)}")
        default = getattr(type(config), name)
        if name in table.not_built and value != default:
            raise FlagError(f"{name}={_show(value)}: not built yet, it must be {_show(default)} or left out")
        setattr(config, name, value)


def help_text(config_type: type, table: FlagTable, width: int) -> str:
    """Every flag with its default (or in parentheses what omitting it means) and meaning, wrapped to `width`."""
    column = 38 if width >= 100 else 30
    second_names = {name: alias for alias, name in table.aliases.items()}
    lines: list[str] = []
    for heading, group in table.groups.items():
        lines += ["", f"{heading}:"]
        for name, flag in group.items():
            default = getattr(config_type, name)
            left = f"  {name} ({flag.none_means})" if default is None else f"  {name}={_show(default)}"
            meaning = flag.meaning
            if flag.choices:
                meaning += f" ({', '.join(flag.choices)})"
            if name in second_names:
                meaning += f"; also {second_names[name]}"
            if name in table.not_built:
                meaning += " (not built yet)"
            if len(left) > column - 2:
                lines.append(left)
                left = ""
            indent = " " * column
            lines += textwrap.wrap(meaning, width, initial_indent=left.ljust(column), subsequent_indent=indent)
    return "\n".join(lines[1:])


def _field_types(config_type: type) -> dict[str, tuple[type, bool]]:
    """Field name → its type without None, and whether None is allowed."""
    types: dict[str, tuple[type, bool]] = {}
    for declaring_type in reversed(config_type.__mro__):
        for name, annotation in inspect.get_annotations(declaring_type).items():
            parts = get_args(annotation) if NoneType in get_args(annotation) else (annotation,)
            types[name] = (parts[0], NoneType in parts)
    return types


def _read(name: str, text: str, flag: Flag, field_type: type, optional: bool) -> Any:
    """The value of `text`, parsed by Pydra's rules unless the flag is a string. Raises FlagError."""
    is_free_text = field_type is str and not flag.choices
    if optional and (text == "None" or (text == "auto" and not is_free_text)):
        return None
    if field_type is str:
        return _unquoted(text)
    if field_type is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return parse_value(text)
    except Exception as error:
        # An expression in parentheses can raise any exception.
        raise FlagError(f"{name}={_show(text)}: cannot be read, {type(error).__name__}: {error}") from None


def _unquoted(text: str) -> str:
    """Text as typed: `1e5`, `T` and `(a)` stay text for a string flag; a quoted literal loses its quotes."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, str) else text


def _suggestion(name: str, table: FlagTable) -> str:
    bare_name = name.lstrip("-").replace("-", "_")
    close = difflib.get_close_matches(bare_name, [*table.flags, *table.aliases], n=1)
    return f"did you mean {close[0]}=? (--help lists all)" if close else "--help lists those there are"


def _is_allowed(value: Any, flag: Flag, field_type: type, optional: bool) -> bool:
    if value is None:
        return optional
    if field_type in (int, float):
        return (
            type(value) is field_type
            and math.isfinite(value)
            and (flag.minimum is None or value >= flag.minimum)
            and (flag.maximum is None or value <= flag.maximum)
        )
    if field_type is str:
        return isinstance(value, str) and value != "" and (not flag.choices or value in flag.choices)
    return isinstance(value, field_type)


def _allowed(flag: Flag, field_type: type, optional: bool) -> str:
    if flag.choices:
        allowed = ", ".join(flag.choices[:-1]) + f" or {flag.choices[-1]}"
    elif field_type in (int, float):
        allowed = "a whole number" if field_type is int else "a number"
        if flag.minimum is not None and flag.maximum is not None:
            allowed += f" from {flag.minimum} to {flag.maximum}"
        elif flag.minimum is not None:
            allowed += f" of at least {flag.minimum}"
    else:
        allowed = {bool: "T or F", str: "some text"}.get(field_type, f"a {field_type.__name__}")
    return f"{allowed}, or None ({flag.none_means})" if optional else allowed


def _show(value: object) -> str:
    """A value as typed on the command line, in one line."""
    if isinstance(value, bool):
        return "T" if value else "F"
    text = str(value)
    return text if text.isprintable() else repr(text)
