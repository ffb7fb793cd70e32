"""What a user has set: the words after `toka`, environment variables and a YAML file, together one checked config.

The command line comes before the environment, the environment before the file. Knows the declarations of flags and
other programs' habits."""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from tokasaurus.config import DEMO, ServerConfig
from tokasaurus.flags import FlagConfig, FlagError, Setting, not_understood, written
from tokasaurus.habits import OPTIONS, plain_name

AnyConfig = TypeVar("AnyConfig", bound=FlagConfig)

FILE_FLAG = "config"
"""Names a YAML file of flags. Not a flag of any config: a file may not name another one."""
FILE_VARIABLE = "TOKA_CONFIG"
_PREFIX = "TOKA_"
_OTHERS = (FILE_VARIABLE, "TOKA_CACHE", "TOKA_NIGHTLY")
"""Variables that are no flags."""
_OF_TESTS = ("TOKA_TEST_", "TOKA_CLIENTS_")
# Kubernetes sets these in every container beside a service named toka, and TOKA_PORT to an URL.
_OF_KUBERNETES = re.compile(r"TOKA_(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP|SCTP))(_\w+)?")
_KUBERNETES_PORT = re.compile(r"(tcp|udp|sctp)://.*")

_TRUTH_VALUES = ("T", "F", "True", "False", "true", "false")
_NUMBER = re.compile(r"-\d[\d.e]*")


@dataclass(frozen=True, slots=True)
class Given(Generic[AnyConfig]):
    """All that the user has set for one command."""

    config: AnyConfig
    settings: Mapping[str, Setting]
    """Settings by flag; a flag that is left out has its default."""
    warnings: Sequence[str]
    """Lines about flags that do nothing any more."""

    @property
    def words(self) -> list[str]:
        """The settings as words of a command line, with the names of our flags."""
        return [setting.word for setting in self.settings.values()]


@dataclass(frozen=True, slots=True)
class Typed:
    """A flag and its value on the command line."""

    name: str
    text: str
    before: str
    """What stands before the value, for messages."""


def read(
    config_type: type[AnyConfig],
    words: Sequence[str],
    environment: Mapping[str, str],
    positional: Sequence[str] = (),
    is_any_word: bool = True,
) -> Given[AnyConfig]:
    """Raises FlagError with a line for each error.

    positional: the flags that words without a name stand for, in their order. is_any_word: whatever the word is;
    otherwise only if it looks like a model."""
    typed, errors = translate(words, config_type, positional, is_any_word)
    warnings = list[str]()
    settings: dict[str, Setting] = {}
    path = environment.get(FILE_VARIABLE) or None
    for flag in typed:
        if flag.name == FILE_FLAG and FILE_FLAG not in config_type.names():
            path = flag.text
            continue
        if note := config_type.retired_note(flag.name, flag.before + flag.text):
            warnings.append(note)
            continue
        try:
            setting = config_type.read(flag.name, flag.text, flag.before)
        except FlagError as error:
            errors += error.lines
            continue
        first = settings.setdefault(setting.name, setting)
        if first is not setting:
            errors.append(f"{setting.label}: given twice, first as {first.label}")
    found = {} if path is None else _of_file(config_type, path, errors, warnings)
    found.update({setting.name: setting for setting in _of_environment(config_type, environment, errors)})
    for name in config_type.retired:
        variable = f"{_PREFIX}{name.upper()}"
        warnings += [note for note in [config_type.retired_note(name, variable)] if note and environment.get(variable)]
    settings = config_type.relevant({**settings, **{name: one for name, one in found.items() if name not in settings}})
    return Given(config_type.of(settings, errors), settings, warnings)


def translate(
    words: Sequence[str], config_type: type[FlagConfig], positional: Sequence[str] = (), is_any_word: bool = True
) -> tuple[list[Typed], list[str]]:
    """The flags that the words are, whichever program's habit they follow, and a line for each word that is none.

    Arguments as of `read`."""
    typed: list[Typed] = []
    errors: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if is_bare(word):
            positional = [flag for flag in positional if flag not in {one.name for one in typed}]
            if positional and (is_any_word or looks_like_model(word)):
                typed.append(Typed(positional[0], word, ""))
            elif config_type.name_of(plain_name(word)) is not None and rest and "=" not in rest[0]:
                errors.append(f"{word} {rest[0]}: not understood, did you mean {plain_name(word)}={rest.pop(0)}?")
            else:
                errors.append(not_understood(word))
            continue
        is_option = word.startswith("-")
        before = f"{name}=" if equals or not is_option else f"{name} "
        value = text if equals else None
        try:
            typed += _one(name, value, before, rest if is_option else [], config_type)
        except FlagError as error:
            errors += error.lines
    return typed, errors


def _one(name: str, value: str | None, before: str, rest: list[str], config_type: type[FlagConfig]) -> Iterator[Typed]:
    """Flags of one word; pops its value from `rest` if it has one.

    value: None if the word has none. Raises FlagError."""
    plain = plain_name(name) if before[0] == "-" or "-" in name else name
    habit = OPTIONS.get(plain)
    if plain.removeprefix("no_") in config_type.retired:
        if value is None and rest and not looks_like_model(rest[0]) and _is_value(rest[0]) and "=" not in rest[0]:
            value = rest.pop(0)
        yield Typed(plain.removeprefix("no_"), value or "", before)
        return
    own = config_type.name_of(plain)
    if own is None and config_type.name_of(plain.removeprefix("no_")) is not None and value is None:
        own = config_type.name_of(plain.removeprefix("no_"))
        if own is not None and config_type.flags[own].kind is bool:
            yield Typed(own, "F", before)
            return
    if own is not None:
        is_bool = config_type.flags[own].kind is bool
        if value is None and is_bool:
            value = rest.pop(0) if rest and rest[0] in _TRUTH_VALUES else "T"
        elif value is None:
            value = _next(rest, f"{name}: needs a value, {own}=...")
        yield Typed(plain, value if habit is None or habit.flag != own else habit.convert(value), before)
        return
    if plain == FILE_FLAG:
        yield Typed(FILE_FLAG, _next(rest, f"{name}: needs a file") if value is None else value, before)
        return
    if habit is None or (habit.flag and habit.flag not in config_type.flags):
        if value is None:
            value = rest.pop(0) if rest and _is_value(rest[0]) else None
        if value is None and not before.startswith("--"):
            raise FlagError(not_understood(name))
        yield Typed(plain, value or "", before)  # unknown, as reading it says
        return
    if habit.is_truth_value and value is None:
        value = rest.pop(0) if rest and rest[0] in _TRUTH_VALUES else "T"
    if habit.takes_value and value is None:
        value = rest.pop(0) if rest and _is_value(rest[0]) else None
    if habit.refusal:
        raise FlagError(f"{before.rstrip('= ') if value is None else before + value}: {habit.refusal}")
    if habit.words is not None:
        for word in habit.words:
            flag, _, text = word.partition("=")
            if flag in config_type.flags:
                yield Typed(flag, text, f"{name}: {flag}=")
        return
    if value is None:
        raise FlagError(f"{name}: needs a value, {habit.flag}=...")
    yield Typed(habit.flag, habit.convert(value), f"{name}: {habit.flag}=")


def _next(rest: list[str], error: str) -> str:
    """Takes the next word, if it is a value. Raises FlagError."""
    if not rest or not _is_value(rest[0]):
        raise FlagError(error)
    return rest.pop(0)


def _is_value(word: str) -> bool:
    return not word.startswith("-") or _NUMBER.fullmatch(word) is not None


def is_bare(word: str) -> bool:
    """Whether a word is neither a flag with a value nor an option; - is standard input."""
    return word == "-" or not (word.startswith("-") or "=" in word)


def looks_like_model(word: str) -> bool:
    """Whether a word is a repository id with its owner, a GGUF file, a directory or the demo model."""
    return "/" in word or word.endswith(".gguf") or word == DEMO or Path(word).is_dir()


def _of_environment(
    config_type: type[FlagConfig], environment: Mapping[str, str], errors: list[str]
) -> Iterator[Setting]:
    for name, flag in config_type.flags.items():
        for variable in flag.variables:
            text = environment.get(variable)
            if text and not (variable == "TOKA_PORT" and _KUBERNETES_PORT.fullmatch(text)):
                try:
                    yield config_type.read(name, text, f"{variable}=", variable)
                except FlagError as error:
                    errors += error.lines
                break


def variables_of(config_types: Iterable[type[FlagConfig]]) -> set[str]:
    """The environment variables of all flags of these commands."""
    types = list(config_types)
    retired = {f"{_PREFIX}{name.upper()}" for one in types for name in one.retired}
    return retired.union(*(flag.variables for one in types for flag in one.flags.values()))


def unknown_variables(environment: Mapping[str, str], known: set[str], meant: set[str]) -> list[str]:
    """A line for each variable that is named as if it were a flag's, and is none of any command.

    known: variables_of all commands. meant: of those, the ones that a line may propose."""
    renamed = {f"{_PREFIX}{name.upper()}": f"{_PREFIX}{one.flag.upper()}" for name, one in OPTIONS.items() if one.flag}
    lines = []
    for variable in sorted(environment):
        is_ours = variable.startswith(_PREFIX) and not variable.startswith(_OF_TESTS)
        if is_ours and variable not in known and variable not in _OTHERS and not _OF_KUBERNETES.fullmatch(variable):
            close = [renamed[variable]] if variable in renamed else difflib.get_close_matches(variable, meant, n=1)
            lines.append(f"{variable}: unknown variable{f', did you mean {close[0]}?' if close else ''}")
    return lines


def _of_file(config_type: type[FlagConfig], path: str, errors: list[str], warnings: list[str]) -> dict[str, Setting]:
    """The settings in a YAML file. Flags of the server that the command lacks are passed over, so that one file can
    serve several commands."""
    settings: dict[str, Setting] = {}
    try:
        entries = list(_entries(path))
    except FlagError as error:
        errors += error.lines
        return {}
    for key, value, text, line in entries:
        place = f"{path}:{line}"
        plain = key.replace("-", "_")
        if note := config_type.retired_note(plain, f"{place}: {key}"):
            warnings.append(note)
            continue
        name = _name_in_file(config_type, plain)
        typed: Iterable[Typed]
        if name is not None:
            flag = config_type.flags[name]
            typed = [Typed(name, written(_in_file(value, text, flag.kind), flag), f"{key}: ")]
        elif ServerConfig.name_of(plain) is not None:
            continue
        else:
            found, wrong = translate([f"{plain}={text}"], ServerConfig)
            typed = [Typed(one.name, one.text, f"{key}: " if one.name == plain else one.before) for one in found]
            typed = [one for one in typed if one.name == plain or one.name in config_type.flags]
            errors += [f"{place}: {text}" for text in wrong]
        for one in typed:
            try:
                setting = config_type.read(one.name, one.text, f"{place}: {one.before}", place)
            except FlagError as error:
                errors += error.lines
                continue
            if setting.name in settings:
                errors.append(f"{setting.label}: given twice, first in {settings[setting.name].source}")
            settings.setdefault(setting.name, setting)
    return settings


def _name_in_file(config_type: type[FlagConfig], key: str) -> str | None:
    """The flag that an entry sets: as the variable does, which is not the flag of this name if it means another thing
    than the server's."""
    variable = f"{_PREFIX}{(config_type.name_of(key) or key).upper()}"
    return next((name for name, flag in config_type.flags.items() if variable in flag.variables), None)


def _in_file(value: Any, text: str, kind: type) -> Any:
    """The value of an entry for a flag of this kind. text: the value as written, if it is no list or object."""
    if isinstance(value, list) and kind is str:
        return ",".join(map(str, value))
    # A number such as 1e5, a date, or a name such as on, as it is written.
    return value if value is None or (isinstance(value, bool | dict | list) and kind is not str) else text


def _entries(path: str) -> Iterator[tuple[str, Any, str, int]]:
    """Key, value, value as written if it is no list or object, and line number of each entry of a YAML file. Raises
    FlagError."""
    import yaml

    try:
        loader = yaml.SafeLoader(Path(path).expanduser().read_text(encoding="utf-8"))
        root = loader.get_single_node()
    except OSError as error:
        raise FlagError(f"{FILE_FLAG}={path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FlagError(f"{FILE_FLAG}={path}: must be text in UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = path if mark is None else f"{path}:{mark.line + 1}"
        raise FlagError(f"{place}: is not YAML: {getattr(error, 'problem', None) or error}") from None
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise FlagError(f"{path}:{root.start_mark.line + 1}: must be lines such as `port: 8080`")
    for key_node, value_node in root.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise FlagError(f"{path}:{line}: must be lines such as `port: 8080`")
        try:
            value = loader.construct_object(value_node, deep=True)
        except yaml.YAMLError as error:
            raise FlagError(f"{path}:{line}: is not YAML: {getattr(error, 'problem', None) or error}") from None
        yield key_node.value, value, value_node.value if isinstance(value_node, yaml.ScalarNode) else "", line


def listing(given: Given[Any]) -> str:
    """Every flag with its value and where that is from, as a YAML file that config= reads. Secrets are left out."""
    lines = []
    for name, flag in given.config.flags.items():
        setting = given.settings.get(name)
        source = "default" if setting is None else setting.source or "command line"
        value = getattr(given.config, name)
        if flag.is_secret and value is not None:
            lines.append(f"# {name}: not shown  # {source}")
            continue
        shown = "null" if value is None else _as_yaml(value)
        none = f" ({flag.none_means})" if value is None and flag.none_means != "none" else ""
        lines.append(f"{name}: {shown}  # {source}{none}")
    return "\n".join(lines)


def _as_yaml(value: object) -> str:
    # JSON is YAML, and quotes what YAML would read as something else.
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./-]*", value) and value.lower() not in _YAML_WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)


_YAML_WORDS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
