"""`toka download`: fetch a model and print its directory."""

import sys
from typing import TYPE_CHECKING

from tokasaurus.checkpoint import CheckpointError, resolve_checkpoint
from tokasaurus.flags import Flag, FlagTable, assign_flags, check_flags

if TYPE_CHECKING:

    class Config:  # Pydra has no types
        def finalize(self) -> None: ...
else:
    from pydra import Config


class DownloadConfig(Config):
    """The flags of `toka download`, checked by `finalize`."""

    model: str | None = None
    tokenizer: str | None = None

    def finalize(self) -> None:
        """Raises FlagError for a wrong value."""
        check_flags(self, DOWNLOAD_FLAGS)


DOWNLOAD_FLAGS = FlagTable(
    groups={
        "model": {
            "model": Flag("Hugging Face repo id, directory in its format, or .gguf file", none_means="demo"),
            "tokenizer": Flag("source of the tokenizer, written like model=", none_means="model"),
        }
    }
)


def parse_download_config(args: list[str]) -> DownloadConfig:
    """The checked config for `name=value` words. Raises FlagError, whose message is one line."""
    config = DownloadConfig()
    assign_flags(config, DOWNLOAD_FLAGS, args)
    config.finalize()
    return config


def download(config: DownloadConfig) -> int:
    """Download the model and print its directory, and the tokenizer's if it differs. Returns the exit code."""
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
