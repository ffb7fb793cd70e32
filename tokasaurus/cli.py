"""The `toka` command: selects the sub-command, prints help and one-line errors.

Imports little, because every process of a server imports this module again.
"""

import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tokasaurus import __version__
from tokasaurus.inherited import NO_DIRECTORY, put_right, working_directory
from tokasaurus.monitoring.shortage import ends_in_one_line

if TYPE_CHECKING:
    from tokasaurus.flags import FlagConfig

AnyConfig = TypeVar("AnyConfig", bound="FlagConfig")

_SYNTAX = """\
Flags are written name=value. T and F are true and false, None is none or auto,
'(2 * 1024)' is evaluated. port=8080 is also --port 8080, TOKA_PORT=8080 in the
environment, and `port: 8080` in a YAML file that config=FILE names;
--print-config prints all flags. Below: name=default, or in (parentheses) what
an omitted flag means."""

_SERVE_USAGE = """\
toka [name=value ...]            serve a model behind the OpenAI API;
                                 without model= the demo model
toka ping prompt=TEXT [...]      ask a running server
toka chat [model=NAME] [...]     converse with it, or with a model of its own
toka download model=NAME [...]   fetch a model without serving it
toka plan model=NAME [...]       how its memory would be divided on a GPU
toka check model=NAME [...]      whether what computes it works here
toka batch input=F output=F ...  run a file of requests, without a server
toka map input=F output=DIR ...  answer every row of a data set
toka mismatch model=NAME [...]   its log-probabilities beside a trainer's
toka top [URL]                   watch a running server in the terminal
toka ps                          the servers that run here
toka models [port=N ...]         the models of a running server
toka bench [WORKLOAD] [...]      measure a server, or several in turns
toka completion bash|zsh|fish    a script that completes flags in a shell
toka SUBCOMMAND --help, toka --version"""

_PING_USAGE = """\
toka ping TEXT [name=value ...]   ask a running server
toka ping @FILE [...]             ask what is in a file, or - in standard input"""
_CHAT_USAGE = """\
toka chat [name=value ...]     converse with a running server in the terminal
toka chat model=NAME           the same, with a model in processes of its own
echo TEXT | toka chat [...]    print the answer to one message"""
_DOWNLOAD_USAGE = "toka download model=NAME [name=value ...]   fetch a model without serving it"
_PLAN_USAGE = """\
toka plan model=NAME [name=value ...]   how a model's memory would be divided
                                        on CUDA devices, which need not be
                                        there; --json prints JSON"""
_CHECK_USAGE = """\
toka check [model=NAME] [name=value ...]   compare what computes a model here,
                                           kernels, compiled layers and graphs,
                                           with plain torch; --json prints JSON"""
_BATCH_USAGE = """\
toka batch FILE OUTPUT [name=value ...]   run a file of requests; run again,
                                          it continues
toka batch list [data_dir=DIR ...]        batches that servers have stored
toka batch show ID [data_dir=DIR ...]     one of them
toka batch cancel ID [data_dir=DIR ...]   stop it, and keep what is done; or
                                          base_url=URL for one of any server"""

_MAP_USAGE = """\
toka map FILES DIRECTORY prompt=TEMPLATE [name=value ...]
answer every row of a data set; run again, it continues

  toka map input='questions/*.parquet' output=answers prompt='{question}' \\
      model=Qwen/Qwen3-0.6B
  toka map input=problems.jsonl output=samples prompt='{problem}' chat=T \\
      key=id n=8 temperature=0.7 max_tokens=2048
  toka map input=reviews.csv output=labels prompt='Which mood has: {text}' \\
      schema=mood.json base_url=http://127.0.0.1:10210"""


_MISMATCH_USAGE = """\
toka mismatch [model=NAME] [json=FILE] [picture=FILE] [name=value ...]
sample in several ways, and compare the log-probabilities with those that a
trainer's forward gives the same tokens"""

_PS_USAGE = """\
toka ps [json=T]   the servers of this user on this machine: address, model,
                   state, time since the start, and the process to signal"""
_MODELS_USAGE = """\
toka models [name=value ...]   the models of a running server, ours or another
                               one: name, longest request, checkpoint, owner"""

_TOP_USAGE = """\
toka top [URL] [name=value ...]   watch a running server
toka top replay=FILE [speed=N]    show a recording"""


_BENCH_USAGE = """\
toka bench [WORKLOAD] [name=value ...]   measure any OpenAI-compatible server
toka bench compare FILE [FILE ...]       what earlier runs wrote, side by side

  toka bench sharegpt base_url=http://127.0.0.1:8000/v1 output=vllm.json
  toka bench monkeys peer=toka,vllm model=Qwen/Qwen3-0.6B html=report.html
  toka bench compare before.json after.json"""


_COMPLETION_USAGE = """\
toka completion bash|zsh|fish   a script that completes sub-commands and flags
  bash: source <(toka completion bash), in ~/.bashrc
  zsh:  source <(toka completion zsh), in ~/.zshrc after compinit
  fish: toka completion fish > ~/.config/fish/completions/toka.fish"""


@ends_in_one_line
def main(args: list[str] | None = None) -> int:
    """`toka`: a sub-command if the first word names one, else the server. Returns the exit code; 2 for a wrong flag."""
    words = sys.argv[1:] if args is None else args
    if words and _is_bare(words[0]):
        name, *rest = words
        if name in _SUBCOMMANDS:
            return _main_of(name)(rest)
        if name in ("help", "version"):
            return main([*rest, f"--{name}"])
        from tokasaurus.habits import COMMANDS

        habit = COMMANDS.get(name)
        if habit is not None and habit.refusal:
            return _refuse("toka", f"{name}: {habit.refusal}")
        if habit is not None and habit.words:
            return main([*habit.words, *rest])
        if habit is not None:
            return _run_server(rest, is_any_word=True)
        from tokasaurus.command_line import looks_like_model

        if not looks_like_model(name):
            known = ", ".join(_SUBCOMMANDS)
            return _refuse("toka", f"{name}: no such sub-command, there are {known}; flags are name=value")
    if "--version" in words:
        print(f"tokasaurus {__version__}")
        return 0
    return _run_server(words, is_any_word=False)


def _run_server(words: list[str], is_any_word: bool) -> int:
    from tokasaurus.config import ServerConfig

    return _run("toka", _SERVE_USAGE, ServerConfig, words, _serve, ("model",), is_any_word)


def _command_main(
    name: str, args: list[str] | None = None, run: "Callable[[Any, list[str]], int] | None" = None
) -> int:
    """A sub-command. args: by default the command line's. run: in place of the command's function."""
    if args is None:
        put_right()
    command = _COMMANDS[name]
    label = f"toka {'batch' if name.startswith('batch') else name}"
    run = run or (lambda config, words: _loaded(command.run)(config, words))
    return _run(
        label, command.usage, _loaded(command.config), args, run, command.positional, True, command.needs_directory
    )


@ends_in_one_line
def ping_main(args: list[str] | None = None) -> int:
    """`toka ping`, also installed as `toka-ping`. Returns the exit code."""
    return _command_main("ping", args)


@ends_in_one_line
def download_main(args: list[str] | None = None) -> int:
    """`toka download`, also installed as `toka-download`: print the model's directory. Returns the exit code."""
    return _command_main("download", args)


@ends_in_one_line
def batch_main(args: list[str] | None = None) -> int:
    """`toka batch`, also installed as `toka-batch`. Returns the exit code."""
    if args is None:
        put_right()
    words = sys.argv[1:] if args is None else args
    from tokasaurus.commands.batch.config import ACTIONS

    if not words or not _is_bare(words[0]) or _looks_like_file(words[0]):
        return _command_main("batch", words)
    action, *words = words
    if action not in ACTIONS:
        return _refuse("toka batch", f"{action}: not understood, there are {', '.join(ACTIONS)}; flags are name=value")
    if action == "list" or _wants_help(words):
        return _command_main(f"batch {action}", words)
    if not words or "=" in words[0]:
        listed = f"toka batch {action} batch_...; toka batch list shows those there are"
        return _refuse("toka batch", f"the batch is missing: {listed}")
    batch_id = words.pop(0)
    stored = _loaded(_COMMANDS[f"batch {action}"].run)
    return _command_main(f"batch {action}", words, lambda config, _: stored(config, [batch_id]))


@ends_in_one_line
def bench_main(args: list[str] | None = None) -> int:
    """`toka bench`. Returns the exit code."""
    words = sys.argv[1:] if args is None else args
    if not words or words[0] != "compare":
        return _command_main("bench", words)
    files = [word for word in words[1:] if _is_file(word)]
    if not files and not _wants_help(words):
        return _refuse("toka bench compare", "needs files that toka bench output=FILE has written")
    flags = [word for word in words[1:] if not _is_file(word)]
    compare = _loaded(_COMMANDS["bench compare"].run)
    return _command_main("bench compare", flags, lambda config, _: compare(config, files))


def completion_main(words: list[str]) -> int:
    """`toka completion`: print the script for a shell. Returns the exit code."""
    from tokasaurus.commands.completion import SHELLS, script

    if _wants_help(words):
        print(_COMPLETION_USAGE)
        return 0
    if len(words) != 1 or words[0] not in SHELLS:
        return _refuse("toka completion", f"needs the name of a shell: {', '.join(SHELLS)}")
    print(script(words[0], config_types()))
    return 0


def _run(
    command: str,
    usage: str,
    config_type: type[AnyConfig],
    args: list[str] | None,
    run: Callable[[AnyConfig, list[str]], int],
    positional: tuple[str, ...] = (),
    is_any_word: bool = True,
    needs_directory: bool = True,
) -> int:
    """Reads the words in `args`, by default the command line's, with the environment, and calls `run` with the
    config and the words that say the same; or prints help or the config.

    positional, is_any_word: see command_line.read. needs_directory: whether it may read files, or start processes."""
    words = sys.argv[1:] if args is None else args
    if _wants_help(words):
        width = min(shutil.get_terminal_size().columns, 140)
        is_short = "--help-all" not in words
        print(f"{usage}\n\n{_SYNTAX}\n\n{config_type.help_text(width, is_short)}")
        num_more = len(set(config_type.flags) - config_type.main_flags) if config_type.main_flags else 0
        if is_short and num_more:
            print(f"\n{num_more} further flags: {command} --help-all")
        return 0
    from tokasaurus import command_line
    from tokasaurus.flags import FlagError
    from tokasaurus.messages.status import UserError

    wants_listing = "--print-config" in words
    words = [word for word in words if word != "--print-config"]
    own_variables = command_line.variables_of([config_type])
    if command_line.unknown_variables(os.environ, own_variables, own_variables):
        known = command_line.variables_of(config_types().values())
        for line in command_line.unknown_variables(os.environ, known, own_variables):
            print(f"{command}: warning: {line}", file=sys.stderr)
    try:
        given = command_line.read(config_type, words, os.environ, positional, is_any_word)
        for line in given.warnings:
            print(f"{command}: warning: {line}", file=sys.stderr)
        if wants_listing:
            print(command_line.listing(given))
            return 0
        if needs_directory and working_directory() is None:
            return _refuse(command, NO_DIRECTORY)
        return run(given.config, given.words)
    except FlagError as error:
        return _refuse(command, *error.lines)
    except UserError as error:
        _refuse(command, str(error))
        return error.exit_code


class _Command(NamedTuple):
    """A sub-command whose modules are imported when it is used."""

    usage: str
    config: str
    """Its flags: a class below tokasaurus.commands, as `module:name`."""
    run: str
    """A function of the flags and of the words that say the same, likewise. Returns the exit code; may raise FlagError
    and UserError."""
    positional: tuple[str, ...] = ()
    needs_directory: bool = True
    """It reads files, or starts processes without refusing by itself to do so."""


_COMMANDS = {
    "ping": _Command(_PING_USAGE, "ping:PingConfig", "ping:ping", ("prompt",), False),
    "chat": _Command(_CHAT_USAGE, "chat:ChatConfig", "chat:chat", ("model",), False),
    "download": _Command(_DOWNLOAD_USAGE, "download:DownloadConfig", "download:download", ("model",)),
    "plan": _Command(_PLAN_USAGE, "plan:PlanConfig", "plan:plan", ("model",)),
    "check": _Command(_CHECK_USAGE, "check:CheckConfig", "check:check", ("model",)),
    "batch": _Command(_BATCH_USAGE, "batch.config:RunConfig", "batch.run:run_batch", ("input", "output")),
    "batch list": _Command(_BATCH_USAGE, "batch.config:StoredConfig", "batch.stored:list_stored"),
    "batch show": _Command(_BATCH_USAGE, "batch.config:StoredConfig", "batch.stored:show_stored"),
    "batch cancel": _Command(_BATCH_USAGE, "batch.config:StoredConfig", "batch.stored:cancel_stored"),
    "map": _Command(_MAP_USAGE, "map:MapConfig", "map:run_map", ("input", "output")),
    "mismatch": _Command(_MISMATCH_USAGE, "mismatch:MismatchConfig", "mismatch:run_mismatch", ("model",)),
    "top": _Command(_TOP_USAGE, "top.config:TopConfig", "top.run:top", ("base_url",), False),
    "ps": _Command(_PS_USAGE, "servers:PsConfig", "servers:ps", (), False),
    "models": _Command(_MODELS_USAGE, "servers:ModelsConfig", "servers:models", ("base_url",), False),
    "bench": _Command(_BENCH_USAGE, "bench.config:BenchConfig", "bench.run:run_bench", ("workload",)),
    "bench compare": _Command(_BENCH_USAGE, "bench.config:CompareConfig", "bench.run:run_compare"),
}
_SUBCOMMANDS = [*(name for name in _COMMANDS if " " not in name), "completion"]


def _loaded(name: str) -> Any:
    """What `_Command.config` and `run` name."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"tokasaurus.commands.{module}"), attribute)


def _main_of(name: str) -> Callable[[list[str]], int]:
    own: dict[str, Callable[[list[str]], int]] = {
        "batch": batch_main,
        "bench": bench_main,
        "completion": completion_main,
    }
    return own.get(name, ends_in_one_line(partial(_command_main, name)))


def config_types() -> "dict[str, type[FlagConfig]]":
    """The flags of each command, by what is typed before them."""
    from tokasaurus.config import ServerConfig

    return {"": ServerConfig, **{name: _loaded(command.config) for name, command in _COMMANDS.items()}}


def _serve(config: Any, _words: list[str]) -> int:
    from tokasaurus.processes.launch import serve

    return serve(config)


def _is_bare(word: str) -> bool:
    """Whether it is no flag."""
    return "=" not in word and not word.startswith((".", "-"))


def _looks_like_file(word: str) -> bool:
    """Whether the first word of `toka batch` is its input rather than an action."""
    return "." in word or "/" in word or Path(word).is_file()


def _is_file(word: str) -> bool:
    """Whether a word of `toka bench compare` is a file to read."""
    return not word.startswith("-") and ("=" not in word or Path(word).exists())


def _wants_help(words: list[str]) -> bool:
    return not {"--help", "--help-all", "-h"}.isdisjoint(words)


def _refuse(command: str, *lines: str) -> int:
    for line in lines:
        print(f"{command}: {line}", file=sys.stderr)
    return 2
