"""The flags of `toka batch`: those of a run, with all flags of the server, and those of list, show and cancel."""

import os
from collections.abc import Iterator

from tokasaurus.config import FLAGS_OF_ACCESS, CommandConfig, ServerConfig
from tokasaurus.flags import MAX_INT32, FlagConfig, are_missing, count, flag

ACTIONS = ("list", "show", "cancel")

# Flags of the server that a run sets for its own server, or of what only others use. Lines may name aliases of a model.
_SET_BY_THE_RUN = (*(name for name in FLAGS_OF_ACCESS if name != "model_aliases"), "rl")
# Flags of the server with other defaults here: most protect it from its clients, and a run has only one, the user, who
# sees its log beside the progress.
_OWN_DEFAULTS = ("keep_days", "max_file_bytes", "max_batch_lines", "log_level")


class RunConfig(CommandConfig, without=_SET_BY_THE_RUN):
    """The flags of a run, checked by `finalize`."""

    command_headings = ("batch",)
    set_by_command = _SET_BY_THE_RUN
    why_set = "toka batch sets it itself"

    input: str | None = flag(
        None,
        "file of requests, one JSON object per line; - is standard input, which is copied to a file first, "
        "as pipes are",
        none_means="required",
        heading="batch",
    )
    output: str | None = flag(None, "file for the results, which appears when it is complete", none_means="required")
    overwrite: bool = flag(False, "replace the output if it exists")
    base_url: str | None = CommandConfig.declared("base_url", heading="batch")
    api_key: str | None = ServerConfig.declared(
        "api_key",
        meaning="API key of the server at base_url",
        none_means="TOKA_API_KEY or OPENAI_API_KEY",
        variables=("TOKA_API_KEY", "OPENAI_API_KEY"),
        heading="batch",
    )
    completion_window: str | None = flag(
        None,
        "time after which lines that are unfinished expire, such as 90m, 24h or 30d",
        none_means="24h with base_url, else 30d",
    )

    keep_days: int = ServerConfig.declared("keep_days", default=3650)
    max_file_bytes: int = ServerConfig.declared("max_file_bytes", default=MAX_INT32)
    max_batch_lines: int = ServerConfig.declared("max_batch_lines", default=1_000_000)
    log_level: str = ServerConfig.declared("log_level", default="warning")

    def further_errors(self) -> Iterator[str]:
        missing = [name for name in ("input", "output") if getattr(self, name) is None]
        yield from are_missing(missing, "toka batch input=requests.jsonl output=results.jsonl")
        if self.output == "-":
            yield "output=-: must be a file, beside which the state is kept with which the same command continues"
        if self.base_url is None:
            if self.completion_window is not None and not _is_window(self.completion_window):
                shown = f"completion_window={self.completion_window}"
                yield f"{shown}: must be a whole number with s, m, h or d after it, such as 24h, at most 30d"
            if self.api_key is not None:
                yield "api_key: only with base_url=, since the server that is started takes no key"


def _is_window(window: str) -> bool:
    """Whether our server takes it; servers of others may know other windows."""
    from tokasaurus.server.protocol.batches import window_seconds

    try:
        window_seconds(window)
    except ValueError:
        return False
    return True


def key_of_environment() -> str | None:
    """The key of a server at base_url=, if none is given."""
    return os.environ.get("TOKA_API_KEY") or os.environ.get("OPENAI_API_KEY") or None


def server_words(config: RunConfig, words: list[str]) -> list[str]:
    """The server's flags: the words of the run without the run's own flags, and the run's defaults for a server."""
    given = [word for word in words if word.partition("=")[0] not in RunConfig.own_flags()]
    return [*given, *(f"{name}={getattr(config, name)}" for name in _OWN_DEFAULTS)]


class StoredConfig(FlagConfig):
    """The flags of `toka batch list`, `show` and `cancel`, checked by `finalize`."""

    data_dir: str | None = flag(
        None,
        "directory of the batches: a server's data_dir=, or OUTPUT.toka of a run that is not complete",
        none_means="by port",
        heading="stored batches",
    )
    port: int = flag(
        ServerConfig.port, "TCP port of the server whose default directory is meant", minimum=1, maximum=65535
    )
    api_key: str | None = flag(
        None,
        "API key of the server at base_url, or of the one that runs on the directory",
        none_means="TOKA_API_KEY",
        is_secret=True,
    )
    base_url: str | None = flag(None, "URL of a running server's OpenAI API, in place of a directory")
    limit: int = count(100, "batches that list shows, the newest")
    json: bool = flag(False, "print JSON, one object per batch, as the API has it")

    def further_errors(self) -> Iterator[str]:
        if self.base_url is not None and self.data_dir is not None:
            yield f"base_url={self.base_url}: either it or data_dir= names the server"
