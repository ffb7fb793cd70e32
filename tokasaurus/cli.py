"""The `toka` command: picks what to run, prints help and one-line errors. Imports little, so that help is quick."""

import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from tokasaurus.flags import Flag, FlagError, FlagTable, assign_flags, check_flags, help_text

if TYPE_CHECKING:

    class Config:  # Pydra has no types
        def finalize(self) -> None: ...
else:
    from pydra import Config

_SYNTAX = """\
Flags are written name=value; T and F are true and false, None is none or auto,
'(2 * 1024)' is worked out. Shown is name=default, or in (parentheses) what
leaving the flag out means."""

_SERVE_USAGE = """\
toka [name=value ...]            serve a model behind the OpenAI API;
                                 without model= the demo model
toka ping prompt=TEXT [...]      ask a running server
toka download model=NAME [...]   fetch a model without serving it
toka SUBCOMMAND --help, toka --version"""

_PING_USAGE = "toka ping prompt=TEXT [name=value ...]   ask a running server"
_DOWNLOAD_USAGE = "toka download model=NAME [name=value ...]   fetch a model without serving it"


class DownloadConfig(Config):
    """The flags of `toka download`, checked by `finalize`."""

    model: str | None = None
    tokenizer: str | None = None

    def finalize(self) -> None:
        """Raises FlagError."""
        check_flags(self, DOWNLOAD_FLAGS)


DOWNLOAD_FLAGS = FlagTable(
    groups={
        "model": {
            "model": Flag("Hugging Face repo id, directory in its format, or .gguf file", none_means="demo"),
            "tokenizer": Flag("where the tokenizer comes from, named like a model", none_means="model"),
        }
    }
)


def main(args: list[str] | None = None) -> int:
    """`toka`: a sub-command if the first word names one, else the server. Returns the exit code; 2 is a wrong flag."""
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
    from tokasaurus.config import SERVER_FLAGS, ServerConfig, parse_server_config

    if _wants_help(words):
        return _print_help(_SERVE_USAGE, ServerConfig, SERVER_FLAGS)
    try:
        config = parse_server_config(words)
    except FlagError as error:
        return _refuse("toka", str(error))
    from tokasaurus.launch import serve

    return serve(config)


def ping_main(args: list[str] | None = None) -> int:
    """`toka ping`, also installed as `toka-ping`. Returns the exit code."""
    words = sys.argv[1:] if args is None else args
    from tokasaurus.ping import PING_FLAGS, PingConfig, parse_ping_config, ping

    if _wants_help(words):
        return _print_help(_PING_USAGE, PingConfig, PING_FLAGS)
    try:
        config = parse_ping_config(words)
    except FlagError as error:
        return _refuse("toka ping", str(error))
    return ping(config)


def download_main(args: list[str] | None = None) -> int:
    """`toka download`, also installed as `toka-download`: print where the model lies. Returns the exit code."""
    words = sys.argv[1:] if args is None else args
    if _wants_help(words):
        return _print_help(_DOWNLOAD_USAGE, DownloadConfig, DOWNLOAD_FLAGS)
    config = DownloadConfig()
    try:
        assign_flags(config, DOWNLOAD_FLAGS, words)
        config.finalize()
    except FlagError as error:
        return _refuse("toka download", str(error))
    from tokasaurus.checkpoint import CheckpointError, resolve_checkpoint

    try:
        checkpoint = resolve_checkpoint(config.model, config.tokenizer, lambda line: print(line, file=sys.stderr))
    except CheckpointError as error:
        print(f"toka download: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("toka download: stopped", file=sys.stderr)
        return 1
    print(checkpoint.directory)
    if checkpoint.tokenizer_directory != checkpoint.directory:
        print(checkpoint.tokenizer_directory)
    return 0


_SUBCOMMANDS: dict[str, Callable[[list[str]], int]] = {"ping": ping_main, "download": download_main}


def _wants_help(words: list[str]) -> bool:
    return "--help" in words or "-h" in words


def _print_help(usage: str, config_type: type, table: FlagTable) -> int:
    width = min(shutil.get_terminal_size().columns, 140)
    print(f"{usage}\n\n{_SYNTAX}\n\n{help_text(config_type, table, width)}")
    return 0


def _refuse(command: str, message: str) -> int:
    print(f"{command}: {message}", file=sys.stderr)
    return 2
