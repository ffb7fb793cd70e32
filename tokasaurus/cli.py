"""The `toka` command: selects the sub-command, prints help and one-line errors.

Imports little, because every process of a server imports this module again.
"""

import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from tokasaurus.monitoring.shortage import ends_in_one_line

if TYPE_CHECKING:
    from tokasaurus.flags import FlagTable

_SYNTAX = """\
Flags are written name=value. T and F are true and false, None is none or auto,
'(2 * 1024)' is evaluated. Below: name=default, or in (parentheses) what an
omitted flag means."""

_SERVE_USAGE = """\
toka [name=value ...]            serve a model behind the OpenAI API;
                                 without model= the demo model
toka ping prompt=TEXT [...]      ask a running server
toka download model=NAME [...]   fetch a model without serving it
toka plan model=NAME [...]       how its memory would be divided on a GPU
toka check model=NAME [...]      whether what computes it works here
toka batch input=F output=F ...  run a file of requests, without a server
toka SUBCOMMAND --help, toka --version"""

_PING_USAGE = "toka ping prompt=TEXT [name=value ...]   ask a running server"
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
toka batch input=FILE output=FILE [...]   run a file of requests; run again,
                                          it continues
toka batch list [data_dir=DIR ...]        batches that servers have stored
toka batch show ID [data_dir=DIR ...]     one of them
toka batch cancel ID [data_dir=DIR ...]   stop it, and keep what is done; or
                                          base_url=URL for one of any server"""


@ends_in_one_line
def main(args: list[str] | None = None) -> int:
    """`toka`: a sub-command if the first word names one, else the server. Returns the exit code; 2 for a wrong flag."""
    words = sys.argv[1:] if args is None else args
    if words and "=" not in words[0] and not words[0].startswith((".", "-")):
        subcommand = _SUBCOMMANDS.get(words[0])
        if subcommand is None:
            known = ", ".join(_SUBCOMMANDS)
            return _refuse("toka", f"{words[0]}: no such sub-command, there are {known}; flags are name=value")
        return subcommand(words[1:])
    if "--version" in words:
        from importlib.metadata import version

        print(f"tokasaurus {version('tokasaurus')}")
        return 0
    from tokasaurus.config import ServerConfig, parse_server_config
    from tokasaurus.config_flags import SERVER_FLAGS
    from tokasaurus.flags import FlagError

    if _wants_help(words):
        return _print_help(_SERVE_USAGE, ServerConfig, SERVER_FLAGS)
    try:
        config = parse_server_config(words)
    except FlagError as error:
        return _refuse("toka", str(error))
    from tokasaurus.launch import serve

    return serve(config)


@ends_in_one_line
def ping_main(args: list[str] | None = None) -> int:
    """`toka ping`, also installed as `toka-ping`. Returns the exit code."""
    words = sys.argv[1:] if args is None else args
    from tokasaurus.flags import FlagError
    from tokasaurus.ping import PING_FLAGS, PingConfig, parse_ping_config, ping

    if _wants_help(words):
        return _print_help(_PING_USAGE, PingConfig, PING_FLAGS)
    try:
        config = parse_ping_config(words)
    except FlagError as error:
        return _refuse("toka ping", str(error))
    return ping(config)


@ends_in_one_line
def download_main(args: list[str] | None = None) -> int:
    """`toka download`, also installed as `toka-download`: print the model's directory. Returns the exit code."""
    words = sys.argv[1:] if args is None else args
    from tokasaurus.download import DOWNLOAD_FLAGS, DownloadConfig, download, parse_download_config
    from tokasaurus.flags import FlagError

    if _wants_help(words):
        return _print_help(_DOWNLOAD_USAGE, DownloadConfig, DOWNLOAD_FLAGS)
    try:
        config = parse_download_config(words)
    except FlagError as error:
        return _refuse("toka download", str(error))
    return download(config)


def plan_main(args: list[str] | None = None) -> int:
    """`toka plan`: returns the exit code, 2 also if the model does not fit."""
    words = sys.argv[1:] if args is None else args
    from tokasaurus.flags import FlagError
    from tokasaurus.plan_command.config import PLAN_FLAGS, PlanConfig, parse_plan_config

    if _wants_help(words):
        return _print_help(_PLAN_USAGE, PlanConfig, PLAN_FLAGS)
    try:
        config = parse_plan_config(words)
    except FlagError as error:
        return _refuse("toka plan", str(error))
    from tokasaurus.plan_command.command import plan

    return plan(config)


@ends_in_one_line
def check_main(args: list[str] | None = None) -> int:
    """`toka check`: returns the exit code, 1 if something computes wrongly."""
    words = sys.argv[1:] if args is None else args
    from tokasaurus.check_command import CHECK_FLAGS, CheckConfig, check, parse_check_config
    from tokasaurus.flags import FlagError

    if _wants_help(words):
        return _print_help(_CHECK_USAGE, CheckConfig, CHECK_FLAGS)
    try:
        run = parse_check_config(words)
    except FlagError as error:
        return _refuse("toka check", str(error))
    return check(run)


@ends_in_one_line
def batch_main(args: list[str] | None = None) -> int:
    """`toka batch`, also installed as `toka-batch`. Returns the exit code."""
    words = sys.argv[1:] if args is None else args
    from tokasaurus.batch_command.config import (
        ACTIONS,
        RUN_FLAGS,
        STORED_FLAGS,
        RunConfig,
        StoredConfig,
        parse_run_config,
        server_words,
    )
    from tokasaurus.flags import FlagError

    action = words[0] if words and "=" not in words[0] and not words[0].startswith((".", "-")) else None
    if action is not None and action not in ACTIONS:
        return _refuse("toka batch", f"{action}: not understood, there are {', '.join(ACTIONS)}; flags are name=value")
    if _wants_help(words):
        if action is None:
            return _print_help(_BATCH_USAGE, RunConfig, RUN_FLAGS)
        return _print_help(_BATCH_USAGE, StoredConfig, STORED_FLAGS)
    try:
        if action is not None:
            return _stored_batches(action, words[1:])
        config = parse_run_config(words)
    except FlagError as error:
        return _refuse("toka batch", str(error))
    from tokasaurus.batch_command.run import run_batch

    return run_batch(config, server_words(config, words))


def _stored_batches(action: str, words: list[str]) -> int:
    """`toka batch list`, `show` and `cancel`. Raises FlagError."""
    from tokasaurus.batch_command.config import parse_stored_config
    from tokasaurus.batch_command.stored import cancel_stored, list_stored, show_stored
    from tokasaurus.flags import FlagError

    if action == "list":
        return list_stored(parse_stored_config(words))
    if not words or "=" in words[0]:
        raise FlagError(f"the batch is missing: toka batch {action} batch_...; toka batch list shows those there are")
    config = parse_stored_config(words[1:])
    return show_stored(config, words[0]) if action == "show" else cancel_stored(config, words[0])


_SUBCOMMANDS: dict[str, Callable[[list[str]], int]] = {
    "ping": ping_main,
    "download": download_main,
    "plan": plan_main,
    "check": check_main,
    "batch": batch_main,
}


def _wants_help(words: list[str]) -> bool:
    return "--help" in words or "-h" in words


def _print_help(usage: str, config_type: type, table: "FlagTable") -> int:
    from tokasaurus.flags import help_text

    width = min(shutil.get_terminal_size().columns, 140)
    print(f"{usage}\n\n{_SYNTAX}\n\n{help_text(config_type, table, width)}")
    return 0


def _refuse(command: str, message: str) -> int:
    print(f"{command}: {message}", file=sys.stderr)
    return 2
