"""`toka completion SHELL`: a script for bash, zsh or fish, made from the declarations of the flags."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokasaurus.flags import Flag, FlagConfig

Commands = Mapping[str, type[FlagConfig]]
"""Flags by what is typed before them: "" for the server, or a sub-command, perhaps with its action."""

_OPTIONS = ("--help", "--help-all", "--print-config")


@dataclass(frozen=True, slots=True)
class _Words:
    """What may follow one command."""

    command: str
    commands: list[str]
    """Sub-commands, or actions of one."""
    flags: list[str]
    """The command's flags, each as `name=`."""
    main_flags: list[str]
    """Flags that are listed before anything is typed."""
    values: dict[str, str]
    """Flag -> its values with spaces between them, where they are few."""


def script(shell: str, commands: Commands) -> str:
    """The script; `shell` is one of SHELLS."""
    top, *others = [_words_of(command, commands) for command in commands]
    top.commands.extend(["completion", "help"])
    return SHELLS[shell]([top, *others, _Words("completion", [*SHELLS], [], [], {})])


def _words_of(command: str, commands: Commands) -> _Words:
    flags, main_flags = commands[command].flags, commands[command].main_flags
    aliases = [flag.alias for flag in flags.values() if flag.alias]
    parts = command.split()
    return _Words(
        command=command,
        commands=[words[-1] for other in commands if (words := other.split())[:-1] == parts and words],
        flags=[f"{name}=" for name in (*flags, *aliases, "config")],
        main_flags=[f"{name}=" for name in flags if name in main_flags or not main_flags],
        values={name: " ".join(values) for name, flag in flags.items() if (values := _values(flag))},
    )


def _values(flag: Flag) -> tuple[str, ...]:
    return flag.choices or (("T", "F") if flag.kind is bool else ())


def _cases(words: list[_Words], indent: str, write: Callable[[_Words], list[str]]) -> list[str]:
    """A branch of `case` for each command."""
    lines = []
    for one in words:
        lines += [f'{indent}"{one.command}")', *(f"{indent}    {line}" for line in write(one)), f"{indent}    ;;"]
    return lines


def _value_cases(one: _Words) -> list[str]:
    by_values: dict[str, list[str]] = {}
    for name, values in one.values.items():
        by_values.setdefault(values, []).append(name)
    branches = [f'{"|".join(names)}) values="{values}" ;;' for values, names in by_values.items()]
    return ["case $name in", *(f"    {branch}" for branch in branches), "esac"]


def _list_words(one: _Words) -> list[str]:
    lists = {"commands": one.commands, "flags": one.flags, "main": one.main_flags}
    return [f'{name}="{" ".join(listed)}"' for name, listed in lists.items()]


def _bash(words: list[_Words]) -> str:
    lines = [
        "# source <(toka completion bash)",
        "_toka() {",
        '    local cur=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} name="" given="" values=""',
        '    local command="" commands="" flags="" main="" word',
        "    COMPREPLY=()",
        "    # Readline takes = for the end of a word, unless COMP_WORDBREAKS lacks it.",
        "    if [[ $cur == = ]]; then",
        "        name=$before cur=",
        "    elif [[ $before == = ]]; then",
        "        name=${COMP_WORDS[COMP_CWORD-2]}",
        "    elif [[ $cur == *=* ]]; then",
        "        name=${cur%%=*} given=${cur%%=*}= cur=${cur#*=}",
        "    fi",
        *_find_command(words, "COMP_WORDS[1]", "COMP_WORDS[2]", "COMP_CWORD > 1", "COMP_CWORD > 2"),
        "    case $command in",
        *_cases(words, "    ", _list_words),
        "    esac",
        "    if [[ -n $name ]]; then",
        "        name=${name//-/_} name=${name#__}",
        "        case $command in",
        *_cases(words, "        ", _value_cases),
        "        esac",
        '        for word in $(compgen -W "$values" -- "$cur"); do COMPREPLY+=("$given$word "); done',
        "        # Readline completes files by itself, if the name before = is no part of the word.",
        '        [[ -n $values || -z $given ]] || COMPREPLY=($(compgen -P "$given" -f -- "$cur"))',
        "        return",
        "    fi",
        "    if [[ $cur == -* ]]; then",
        f'        commands="{" ".join(_OPTIONS)}" flags=" ${{flags//_/-}}" flags=${{flags// / --}}',
        "    fi",
        "    [[ -n $cur ]] || flags=$main",
        '    COMPREPLY=($(compgen -W "$flags" -- "$cur"))',
        '    for word in $(compgen -W "$commands" -- "$cur"); do COMPREPLY+=("$word "); done',
        "}",
        "complete -o nospace -o default -F _toka toka",
    ]
    return "\n".join(lines)


def _find_command(words: list[_Words], first: str, second: str, has_first: str, has_second: str) -> list[str]:
    """Lines that set `command`, whose words are complete."""
    pairs = [one.command for one in words if " " in one.command]
    single = [one.command for one in words if one.command and " " not in one.command]
    return [
        f'    if (( {has_second} )) && [[ "|{"|".join(pairs)}|" == *"|${{{first}}} ${{{second}}}|"* ]]; then',
        f'        command="${{{first}}} ${{{second}}}"',
        f'    elif (( {has_first} )) && [[ "|{"|".join(single)}|" == *"|${{{first}}}|"* ]]; then',
        f"        command=${{{first}}}",
        "    fi",
    ]


def _zsh(words: list[_Words]) -> str:
    lines = [
        "#compdef toka",
        "# source <(toka completion zsh), after compinit",
        "_toka() {",
        '    local cur=${words[CURRENT]} name="" values="" command="" commands="" flags="" main=""',
        *_find_command(words, "words[2]", "words[3]", "CURRENT > 2", "CURRENT > 3"),
        "    case $command in",
        *_cases(words, "    ", _list_words),
        "    esac",
        "    if [[ $cur == *=* ]]; then",
        "        name=${cur%%=*} name=${name#--} name=${name//-/_}",
        "        case $command in",
        *_cases(words, "        ", _value_cases),
        "        esac",
        "        compset -P '*='",
        "        if [[ -n $values ]]; then compadd -- ${=values}; else _files; fi",
        "        return",
        "    fi",
        f"    [[ $cur == -* ]] && compadd -- {' '.join(_OPTIONS)}",
        "    [[ $cur == -* ]] && compadd -S '' -- --${^${=flags//_/-}}",
        "    [[ -n $cur ]] || flags=$main",
        "    [[ $cur == -* ]] || compadd -S '' -- ${=flags}",
        "    [[ $cur == -* || -z $commands ]] || compadd -- ${=commands}",
        "}",
        "compdef _toka toka",
    ]
    return "\n".join(lines)


def _fish(words: list[_Words]) -> str:
    singles = [one.command for one in words if one.command and " " not in one.command]
    lines = ["# toka completion fish | source", "complete -c toka -f", "complete -c toka -l help-all -l print-config"]
    for one in words:
        seen = [f"__fish_seen_subcommand_from {word}" for word in one.command.split()]
        later = one.commands if seen else singles
        seen += [f"not __fish_seen_subcommand_from {' '.join(later)}"] if later else []
        condition = "; and ".join(seen)
        lines += [f"complete -c toka -n '{condition}' -a '{word}'" for word in one.commands]
        is_empty = "test -z (commandline -ct)"
        for is_main, shown in ((True, condition), (False, f"{condition}; and not {is_empty}")):
            listed = [flag for flag in one.flags if (flag in one.main_flags) is is_main]
            with_values = [
                f"{flag}{value}" for flag in listed for value in one.values.get(flag.rstrip("="), "").split() or [""]
            ]
            lines.append(f"complete -c toka -n '{shown}' -a '{' '.join(with_values)}'")
    closed = sorted({name for one in words for name in one.values})
    lines += [
        "function __toka_wants_file",
        "    set -l word (commandline -ct)",
        f"    string match -q '*=*' -- $word; and not string match -rq '^({'|'.join(closed)})=' -- $word",
        "end",
        "function __toka_files",
        "    set -l name (commandline -ct | string replace -r '=.*' '=')",
        "    set -l begun (commandline -ct | string replace -r '^[^=]*=' '')",
        "    for file in (complete -C \"'' $begun\"); echo $name$file; end",
        "end",
        "complete -c toka -n __toka_wants_file -a '(__toka_files)'",
    ]
    return "\n".join(lines)


SHELLS: Mapping[str, Callable[[list[_Words]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
"""Shell -> what makes its script."""
