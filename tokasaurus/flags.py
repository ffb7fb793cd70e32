"""Command-line flags in Pydra's syntax: declaring them, parsing `name=value`, checking every value, and the help text.

A subclass of FlagConfig declares each flag once: name, type, default, allowed values, meaning, and the flags it depends
on. Pydra casts silently (`port=8080.7` becomes 8080, `flag=false` becomes True), so values are checked here instead of
cast.
"""

import ast
import dataclasses
import difflib
import inspect
import json
import math
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from pydra.parser import parse_value
from typing_extensions import Self

if TYPE_CHECKING:
    # Pydra has no types; with an untyped base class every misspelt flag would pass the type checker.
    class Config:
        def finalize(self) -> None: ...
else:
    from pydra import Config

MAX_INT32 = 2**31 - 1

SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
"""Letters after a number, as vLLM reads them."""
SUFFIXES_IN_WORDS = "8k is 8,000 and 8K is 8,192; so are m and M, g and G"

_MAX_SHORT_HELP = 20
"""A command with so many flags shows all of them in the short help."""

Value = TypeVar("Value")


class FlagError(ValueError):
    """Flags are wrong. The message has a line for each, which names the flag, its value and what is allowed."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


@dataclasses.dataclass(frozen=True)
class Rule:
    """A condition on a flag's value, checked unless the value is None or F."""

    text: str
    """What is demanded, for the documentation."""
    find_error: Callable[[Any, Any], str | None]
    """(config, the flag's value) → what is wrong, as the end of the error message; None if nothing is."""


@dataclasses.dataclass(frozen=True)
class Flag:
    """All that is known of one flag."""

    default: Any
    meaning: str
    """What it does, with its unit."""
    minimum: float | None = None
    """Inclusive."""
    maximum: float | None = None
    """Inclusive."""
    choices: tuple[str, ...] = ()
    """If not empty, the only allowed words."""
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further words -> the choices that they mean."""
    none_means: str = "none"
    """What None stands for, such as "auto"; help shows it in place of None."""
    heading: str = ""
    """Its group in the help; by default the group of the base class's flag of this name, or of the flag before it."""
    alias: str = ""
    """A second name."""
    rules: tuple[Rule, ...] = ()
    variables: tuple[str, ...] = ()
    """Environment variables. If the flag is left out, the first that is not empty has its value; by default TOKA_ and
    the name in capitals."""
    is_secret: bool = False
    """No message shows its value."""
    kind: type = NoneType
    """Type of its values, apart from None. FlagConfig takes it and the next from the annotation."""
    is_optional: bool = False
    """Whether None is allowed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A flag's value, and where it is written."""

    name: str
    value: Any
    text: str
    """The value as typed after `name=`."""
    label: str
    """Begins a message about it: the flag as written, with its place if that is not the command line."""
    source: str = ""
    """A variable, or a file with the line; empty for the command line."""

    @property
    def word(self) -> str:
        """The setting as a word of a command line."""
        return f"{self.name}={self.text}"


def flag(default: Value, meaning: str, **properties: Any) -> Value:
    """Declares a flag in the body of a FlagConfig. properties: see Flag."""
    return cast(Value, Flag(default, meaning, **properties))


def count(default: Value, meaning: str, minimum: int = 1, **properties: Any) -> Value:
    """`flag` of whole numbers from `minimum`."""
    return flag(default, meaning, minimum=minimum, maximum=MAX_INT32, **properties)


class FlagConfig(Config):
    """The flags of one command. A subclass declares each as an annotated attribute: `port: int = flag(10210, "…")`; the
    attribute of the class is then the default. Pydra reads the annotations at run time: no annotations as strings, no
    Literal, unions only `T | None`.

    Of the base class's flags, a subclass has those in `only` and none of those in `without`; heading: their group in
    its help, in place of their own. further: flags that are declared elsewhere, before its own ones of their heading;
    one whose default is None says its kind.
    """

    flags = dict[str, Flag]()  # noqa: RUF012  (annotated, it would be a flag)
    """Flags by name, in the order of the help. A subclass begins with its own groups."""
    retired = MappingProxyType(dict[str, str]())
    """Flags that were dropped -> what holds in their place. They are accepted, with a warning, and do nothing."""
    main_flags = frozenset[str]()
    """Flags in the short help; empty for all. For its own groups a subclass says which; for inherited groups, its base
    class does."""

    def __init_subclass__(
        cls,
        without: Iterable[str] = (),
        only: Iterable[str] | None = None,
        heading: str | None = None,
        further: Mapping[str, Flag] | None = None,
    ) -> None:
        kept = set(cls.flags if only is None else only).difference(without)
        inherited = {
            name: flag if heading is None else dataclasses.replace(flag, heading=heading)
            for name, flag in cls.flags.items()
            if name in kept
        }
        headings = {flag.heading for flag in inherited.values()}
        first: dict[str, Flag] = {}
        latest = ""
        declared = [(name, vars(cls)[name], annotation) for name, annotation in inspect.get_annotations(cls).items()]
        elsewhere = [
            (name, flag, flag.kind | None if flag.default is None else type(flag.default))
            for name, flag in (further or {}).items()
        ]
        for heading_elsewhere in dict.fromkeys(flag.heading for _, flag, _ in elsewhere):
            place = [flag.heading for _, flag, _ in declared].index(heading_elsewhere)
            declared[place:place] = [one for one in elsewhere if one[1].heading == heading_elsewhere]
        for name, own, annotation in declared:
            latest = own.heading or latest
            group_heading = own.heading or (inherited[name].heading if name in inherited else latest)
            kinds = get_args(annotation) if NoneType in get_args(annotation) else (annotation,)
            group = inherited if group_heading in headings else first
            group[name] = dataclasses.replace(
                own,
                heading=group_heading,
                kind=kinds[0],
                is_optional=NoneType in kinds,
                variables=own.variables or (f"TOKA_{name.upper()}",),
            )
            setattr(cls, name, own.default)
        cls.flags = first | {name: flag for name, flag in inherited.items() if name not in first}
        if "main_flags" not in vars(cls):
            is_long = len(cls.flags) > _MAX_SHORT_HELP and bool(cls.main_flags)
            cls.main_flags = cls.main_flags & set(inherited) | set(first) if is_long else frozenset()

    @classmethod
    def retired_note(cls, name: str, label: str) -> str | None:
        """A line about a flag that was dropped, as it was written; None for any other name."""
        return f"{label.rstrip('= :')}: does nothing, {cls.retired[name]}" if name in cls.retired else None

    @classmethod
    def declared(cls, name: str, **changes: Any) -> Any:
        """The declaration of a flag, for another config that has the same flag."""
        return dataclasses.replace(cls.flags[name], **{"heading": "", **changes})

    @classmethod
    def parse(cls, words: Iterable[str]) -> Self:
        """The checked config for a program's `name=value` words; the last word for a name counts. Raises FlagError.
        What a user types has more forms: see command_line."""
        settings: dict[str, Setting] = {}
        errors: list[str] = []
        for word in words:
            name, _, text = word.partition("=")
            if note := cls.retired_note(name, word):
                warnings.warn(note, stacklevel=2)
                continue
            try:
                if word == name:
                    raise FlagError(not_understood(word))
                setting = cls.read(name, text)
            except FlagError as error:
                errors += error.lines
            else:
                settings[setting.name] = setting
        return cls.of(settings, errors)

    @classmethod
    def read(cls, typed_name: str, text: str, written_as: str = "", source: str = "") -> Setting:
        """The setting of a flag, whose value is not checked yet.

        written_as: what stands before the text where it was written, if not `typed_name=`. source: see Setting. Raises
        FlagError for an unknown name, or a value that cannot be parsed."""
        before = written_as or f"{typed_name}="
        shown = text if _is_utf8(text) else text.encode(errors="backslashreplace").decode()
        name = cls.name_of(typed_name)
        if name is None:
            why, meant = cls.why_not_here(typed_name), cls.name_meant(typed_name)
            is_secret = meant is not None and cls.flags[cls.names()[meant]].is_secret
            listed = "--help-all lists those there are" if meant is None else f"did you mean {meant}=?"
            raise FlagError(
                f"{_label(before, shown, why is not None or is_secret)}: {why or f'unknown flag, {listed}'}"
            )
        flag = cls.flags[name]
        label = _label(before, shown, flag.is_secret)
        if shown != text:
            raise FlagError(f"{label}: has bytes that are not UTF-8")
        text = _in_our_words(text, flag)
        try:
            value = _read(text, flag)
        except _Unreadable as error:
            raise FlagError(f"{label}: {error}") from None
        return Setting(name, value, text, label, source)

    @classmethod
    def names(cls) -> dict[str, str]:
        """Every name and alias -> the flag's name."""
        return {flag.alias: name for name, flag in cls.flags.items() if flag.alias} | {name: name for name in cls.flags}

    @classmethod
    def name_of(cls, typed_name: str) -> str | None:
        """The flag with this name or alias; None if there is none."""
        return cls.names().get(typed_name)

    @classmethod
    def name_meant(cls, typed_name: str) -> str | None:
        """The name or alias most like one that is unknown; None if none is."""
        close = difflib.get_close_matches(typed_name.lstrip("-").replace("-", "_"), cls.names(), n=1)
        return close[0] if close else None

    @classmethod
    def why_not_here(cls, _name: str) -> str | None:
        """Why the command lacks a flag of another one, if it is to be said."""
        return None

    @classmethod
    def relevant(cls, settings: dict[str, Setting]) -> dict[str, Setting]:
        """The settings for this call of the command: the environment and files may have settings for other calls."""
        return settings

    @classmethod
    def of(cls, settings: Mapping[str, Setting], errors: Iterable[str] = ()) -> Self:
        """The checked config. errors: lines about words that are no settings. Raises FlagError with all errors."""
        config = cls()
        for name, setting in settings.items():
            setattr(config, name, setting.value)
        config._check([*errors], settings)
        return config

    def finalize(self) -> None:
        """Raises FlagError if values have the wrong type, are out of range, or do not go with another flag's.

        A whole float for an int flag, or an int for a float flag, is converted to the flag's type.
        """
        self._check([], {})

    def values(self) -> dict[str, Any]:
        """Every flag's value, also of dropped flags that became constants."""
        constants = (name for name in self.retired if hasattr(self, name))
        return {name: getattr(self, name) for name in (*self.flags, *constants)}

    def further_errors(self) -> Iterator[str]:
        """What else is wrong, where every value is allowed; a line for each."""
        yield from ()

    def _check(self, errors: list[str], given: Mapping[str, Setting]) -> None:
        wrong = dict[str, str]()
        for name, flag in self.flags.items():
            value = _as_kind(getattr(self, name), flag.kind)
            if not _is_allowed(value, flag):
                is_number = flag.kind is int and isinstance(value, str) and value[:1].isdigit()
                suffixes = f"; {SUFFIXES_IN_WORDS}" if is_number else ""
                wrong[name] = f"{self._label_of(name, value, given)}: must be {allowed_values(flag)}{suffixes}"
                value = flag.default  # for the rules of others
            setattr(self, name, value)
        for name, flag in self.flags.items():
            value = getattr(self, name)
            for rule in flag.rules if value is not None and value is not False and name not in wrong else ():
                error = rule.find_error(self, value)
                if error is not None:
                    wrong.setdefault(name, f"{self._label_of(name, value, given)}: {error}")
        errors += [wrong[name] for name in {**given, **wrong} if name in wrong]  # in the order of the words
        if errors or (errors := list(self.further_errors())):
            raise FlagError(*errors)

    def _label_of(self, name: str, value: Any, given: Mapping[str, Setting]) -> str:
        return given[name].label if name in given else _label(f"{name}=", _show(value), self.flags[name].is_secret)

    @classmethod
    def help_text(cls, width: int, is_short: bool = False) -> str:
        """Every flag with its default (or in parentheses what omitting it means) and meaning, wrapped to `width`.

        is_short: only main_flags."""
        column = 38 if width >= 100 else 30
        lines: list[str] = []
        heading = ""
        for name, flag in cls.flags.items():
            if is_short and cls.main_flags and name not in cls.main_flags:
                continue
            if flag.heading != heading:
                heading = flag.heading
                lines += ["", f"{heading}:"]
            left = f"  {name} ({flag.none_means})" if flag.default is None else f"  {name}={_show(flag.default)}"
            meaning = flag.meaning
            if flag.choices:
                meaning += f" ({', '.join(flag.choices)})"
            if flag.alias:
                meaning += f"; also {flag.alias}"
            if len(left) > column - 2:
                lines.append(left)
                left = ""
            indent = " " * column
            lines += textwrap.wrap(meaning, width, initial_indent=left.ljust(column), subsequent_indent=indent)
        return "\n".join(lines[1:])


def not_understood(word: str) -> str:
    return f"{_show(word)}: not understood, flags are written name=value"


def are_missing(names: Iterable[str], usage: str) -> Iterator[str]:
    """A line if there are any names, for flags that must be given."""
    listed = list(names)
    if listed:
        *most, last = listed
        yield f"{', '.join(most)} and {last} are missing: {usage}" if most else f"{last} is missing: {usage}"


def at_most(other: str) -> Rule:
    """A check that the value is at most the value of the flag `other`."""

    def find_error(config: Any, value: Any) -> str | None:
        limit = getattr(config, other)
        return f"must be at most {other}={limit}" if value > limit else None

    return Rule(f"at most {other}", find_error)


def at_least(other: str, text: str = "{}") -> Rule:
    """A check that the value is at least the value of the flag `other`, which a message names as `text` says."""

    def find_error(config: Any, value: Any) -> str | None:
        limit = getattr(config, other)
        return f"must be at least {text.format(f'{other}={limit}')}" if value < limit else None

    return Rule(f"at least {other}", find_error)


def needs(other: str, minimum: int | None = None, why: str = "") -> Rule:
    """Another flag must be set too. other: its name, or for a bool NAME=T. minimum: its least value."""

    def find_error(config: Any, _value: Any) -> str | None:
        at = getattr(config, other.removesuffix("=T"))
        is_set = at is not None and at is not False and (minimum is None or at >= minimum)
        return None if is_set else f"needs {wanted} beside it{why}"

    wanted = other if minimum is None else f"{other}= of at least {minimum}"
    return Rule(f"needs {wanted}", find_error)


def excludes(choice: str, **others: str) -> Rule:
    """`choice` does not go with these values of other flags."""

    def find_error(config: Any, value: Any) -> str | None:
        for name, other in others.items():
            if value == choice and _show(getattr(config, name, None)) == other:
                return f"does not run with {name}={other}"
        return None

    listed = ", ".join(f"{name}={other}" for name, other in others.items())
    return Rule(f"{choice} not with {listed}", find_error)


def matches(pattern: str, text: str) -> Rule:
    """The whole value matches a regular expression. text: what that means."""
    return Rule(text, lambda _, value: None if re.fullmatch(pattern, value) else f"must be {text}")


def installed(module: str, *packages: str) -> Rule:
    """The module is there, which these packages bring."""

    def find_error(_config: Any, _value: Any) -> str | None:
        try:
            is_there = find_spec(module) is not None
        except ModuleNotFoundError:  # a package that it is in
            is_there = False
        return None if is_there else f"needs packages that are not installed: pip install {' '.join(packages)}"

    return Rule(f"needs the packages {' and '.join(packages)}", find_error)


def allowed_values(flag: Flag) -> str:
    """The values that a flag may have, in words."""
    if flag.choices:
        allowed = ", ".join(flag.choices[:-1]) + f" or {flag.choices[-1]}"
    elif flag.kind in (int, float):
        allowed = "a whole number" if flag.kind is int else "a number"
        if flag.minimum is not None and flag.maximum is not None:
            allowed += f" from {flag.minimum} to {flag.maximum}"
        elif flag.minimum is not None:
            allowed += f" of at least {flag.minimum}"
    else:
        allowed = {bool: "T or F", str: "some text", dict: "a JSON object"}.get(flag.kind, f"a {flag.kind.__name__}")
    return f"{allowed}, or None ({flag.none_means})" if flag.is_optional else allowed


def given_text(name: str, text: str) -> str:
    """The text that a flag gives: the content of FILE for @FILE, standard input for -, else itself. Of a file, a line
    break at the end is left out, as a shell does. Raises FlagError."""
    if text != "-" and not text.startswith("@"):
        return text
    try:
        if text != "-":
            content = Path(text[1:]).expanduser().read_bytes()
        elif sys.stdin is None:
            raise FlagError(f"{name}=-: standard input is closed")
        else:
            content = sys.stdin.buffer.read()
        read = content.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise FlagError(f"{name}={text}: must be text in UTF-8") from None
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise FlagError(f"{name}={text}: {why}; {name}=- reads a text that begins with @") from None
    if not read:
        raise FlagError(f"{name}={text}: is empty")
    return read


def number_with_suffix(text: str) -> str:
    """Digits in place of a whole number with one of SUFFIXES, such as 8k or 1.5G; any other text as it is."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG])", text, re.ASCII)
    number = None if match is None else Fraction(match[1]) * SUFFIXES[match[2]]
    return text if number is None or number.denominator != 1 else str(number)


def split_list(text: str | None) -> list[str]:
    """The words of a flag with words separated by commas; none of None."""
    return [word for part in (text or "").split(",") if (word := part.strip())]


def _as_kind(value: Any, kind: type) -> Any:
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return float(value) if kind is float and type(value) is int else value


def _label(before: str, text: str, is_secret: bool) -> str:
    """before: what stands before the value, such as `port=` or `--port `."""
    return before.rstrip("=: ") if is_secret else (before + _show(text)).rstrip()


def _is_utf8(text: str) -> bool:
    """Whether a text is UTF-8, which may be a path that Python has read by the rules of another locale."""
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            os.fsencode(text).decode()
        except UnicodeError:
            return False
    return True


class _Unreadable(ValueError):
    """The message says why."""


def written(value: object, flag: Flag) -> str:
    """The text after `name=` that is read as this value."""
    if isinstance(value, str):
        return value if flag.kind is not str or _unquoted(value) == value else repr(value)
    return json.dumps(value) if isinstance(value, dict | list) else _show(value)


def _in_our_words(text: str, flag: Flag) -> str:
    return number_with_suffix(text) if flag.kind is int else flag.synonyms.get(text, text)


def _read(text: str, flag: Flag) -> Any:
    """The value of `text`, parsed by Pydra's rules unless the flag is a string. Raises _Unreadable."""
    is_free_text = flag.kind is str and not flag.choices
    if flag.is_optional and (text == "None" or (text == "auto" and not is_free_text)):
        return None
    if flag.kind is str:
        return _unquoted(text)
    if flag.kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return _read_object(text) if flag.kind is dict else parse_value(text)
    except Exception as error:
        # An expression in parentheses can raise any exception.
        raise _Unreadable(f"cannot be read, {type(error).__name__}: {' '.join(str(error).split())}") from None


def _read_object(text: str) -> Any:
    """The value of JSON, or of a Python literal, which may have single quotes; else the text. Raises TypeError for a
    literal that JSON cannot have, such as a set."""
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(json.dumps(_literal(text)))


def _unquoted(text: str) -> str:
    """Text as typed: `1e5`, `T` and `(a)` stay text for a string flag; a quoted literal loses its quotes."""
    value = _literal(text)
    return value if isinstance(value, str) else text


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _is_allowed(value: Any, flag: Flag) -> bool:
    if value is None:
        return flag.is_optional
    if flag.kind in (int, float):
        return (
            type(value) is flag.kind
            and math.isfinite(value)
            and (flag.minimum is None or value >= flag.minimum)
            and (flag.maximum is None or value <= flag.maximum)
        )
    if flag.kind is str:
        return isinstance(value, str) and value != "" and (not flag.choices or value in flag.choices)
    return isinstance(value, flag.kind)


def _show(value: object) -> str:
    """A value as typed on the command line, in one line."""
    if isinstance(value, bool):
        return "T" if value else "F"
    text = str(value)
    return text if text.isprintable() else repr(text)
