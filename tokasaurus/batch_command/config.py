"""The flags of `toka batch`: those of a run, with all flags of the server, and those of list, show and cancel.

Pydra reads the annotations at run time, as in tokasaurus.config.
"""

import os
from typing import TYPE_CHECKING

from tokasaurus.config import ServerConfig
from tokasaurus.config_flags import SERVER_FLAGS
from tokasaurus.flags import MAX_INT32, Flag, FlagError, FlagTable, assign_flags, check_flags

if TYPE_CHECKING:

    class Config:  # Pydra has no types
        def finalize(self) -> None: ...
else:
    from pydra import Config

ACTIONS = ("list", "show", "cancel")

# Flags of the server that a run sets for its own server.
_SET_BY_THE_RUN = ("host", "port", "data_dir")
# Flags of the server whose defaults protect it from its clients: a run has only one, the user.
_RAISED_LIMITS = ("keep_days", "max_file_bytes", "max_batch_lines")


class RunConfig(ServerConfig):
    """The flags of a run, checked by `finalize`."""

    input: str | None = None
    output: str | None = None
    overwrite: bool = False
    base_url: str | None = None
    completion_window: str | None = None

    keep_days: int = 3650
    max_file_bytes: int = MAX_INT32
    max_batch_lines: int = 1_000_000

    def finalize(self) -> None:
        """Raises FlagError for a wrong value or a missing file name."""
        check_flags(self, _OWN_TABLE)
        super().finalize()
        for name in ("input", "output"):
            if getattr(self, name) is None:
                raise FlagError(f"{name} is missing: toka batch input=requests.jsonl output=results.jsonl")
        if self.completion_window is not None and self.base_url is None:
            _check_window(self.completion_window)
        if self.api_key is not None and self.base_url is None:
            raise FlagError("api_key: only with base_url=, since the server that is started has a key of its own")


def _check_window(window: str) -> None:
    """Raises FlagError for a window that the server would refuse; servers of others may know other windows."""
    from tokasaurus.server.protocol.storage.batches import window_seconds

    try:
        window_seconds(window)
    except ValueError:
        raise FlagError(
            f"completion_window={window}: must be a whole number with s, m, h or d after it, such as 24h, at most 30d"
        ) from None


_OWN_TABLE = FlagTable(
    groups={
        "batch": {
            "input": Flag(
                "file of requests, one JSON object per line; - is standard input, which is copied to a file first, as "
                "pipes are",
                none_means="required",
            ),
            "output": Flag("file for the results, which appears when it is complete", none_means="required"),
            "overwrite": Flag("replace the output if it exists"),
            "base_url": Flag(
                "URL of a running server's OpenAI API, such as http://127.0.0.1:10210/v1; without it, a server is "
                "started, with the flags below",
                none_means="none",
            ),
            "api_key": Flag("API key of the server at base_url", none_means="TOKA_API_KEY or OPENAI_API_KEY"),
            "completion_window": Flag(
                "time after which lines that are unfinished expire, such as 90m, 24h or 30d",
                none_means="24h with base_url, else 30d",
            ),
        }
    }
)

RUN_FLAGS = FlagTable(
    groups={
        **_OWN_TABLE.groups,
        **{
            heading: {name: flag for name, flag in group.items() if name not in _SET_BY_THE_RUN and name != "api_key"}
            for heading, group in SERVER_FLAGS.groups.items()
        },
    },
    aliases=SERVER_FLAGS.aliases,
    not_built=SERVER_FLAGS.not_built,
)


def parse_run_config(words: list[str]) -> RunConfig:
    """The checked config for `name=value` words. Raises FlagError, whose message is one line."""
    names = [word.partition("=")[0] for word in words]
    for name in names:
        if name in _SET_BY_THE_RUN:
            raise FlagError(f"{name}: toka batch sets it itself; base_url= names a running server")
    config = RunConfig()
    assign_flags(config, RUN_FLAGS, words)
    if config.base_url is not None:
        of_server = [name for name in names if name not in _OWN_TABLE.flags]
        if of_server:
            raise FlagError(f"{of_server[0]}: a flag of the server, which runs already at base_url={config.base_url}")
        if config.api_key is None:
            config.api_key = key_of_environment()
    config.finalize()
    return config


def key_of_environment() -> str | None:
    """The key of a server at base_url=, if none is given."""
    return os.environ.get("TOKA_API_KEY") or os.environ.get("OPENAI_API_KEY") or None


def server_words(config: RunConfig, words: list[str]) -> list[str]:
    """The words that the server is started with: those that are not the run's own, and the limits that it raises."""
    given = [word for word in words if word.partition("=")[0] not in _OWN_TABLE.flags]
    return [*given, *(f"{name}={getattr(config, name)}" for name in _RAISED_LIMITS)]


class StoredConfig(Config):
    """The flags of `toka batch list`, `show` and `cancel`, checked by `finalize`."""

    data_dir: str | None = None
    port: int = 10210
    base_url: str | None = None
    api_key: str | None = None
    limit: int = 100
    json: bool = False

    def finalize(self) -> None:
        """Raises FlagError for a wrong value."""
        check_flags(self, STORED_FLAGS)
        if self.base_url is not None and self.data_dir is not None:
            raise FlagError(f"base_url={self.base_url}: either it or data_dir= names the server")


STORED_FLAGS = FlagTable(
    groups={
        "stored batches": {
            "data_dir": Flag(
                "directory of the batches: a server's data_dir=, or OUTPUT.toka of a run that is not complete",
                none_means="by port",
            ),
            "port": Flag("TCP port of the server whose default directory is meant", minimum=1, maximum=65535),
            "api_key": Flag(
                "API key of the server that runs on the directory (cancel)", none_means="the run's, or TOKA_API_KEY"
            ),
            "base_url": Flag(
                "cancel: URL of a running server's OpenAI API, in place of a directory", none_means="none"
            ),
            "limit": Flag("batches that list shows, the newest", minimum=1, maximum=MAX_INT32),
            "json": Flag("print JSON, one object per batch, as the API has it"),
        }
    }
)


def parse_stored_config(words: list[str]) -> StoredConfig:
    """The checked config for `name=value` words. Raises FlagError, whose message is one line."""
    config = StoredConfig()
    assign_flags(config, STORED_FLAGS, words)
    config.finalize()
    return config
