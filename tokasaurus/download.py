"""`toka download`: fetch a model and print its directory."""

import sys

from tokasaurus.checkpoint import CheckpointError, resolve_checkpoint
from tokasaurus.config import ServerConfig


class DownloadConfig(ServerConfig, only=("model", "tokenizer", "trust_remote_code")):
    """The flags of `toka download`."""


def download(config: DownloadConfig) -> int:
    """Download the model and print its directory, and the tokenizer's if it differs. Returns the exit code."""
    try:
        checkpoint = resolve_checkpoint(
            config.model,
            config.tokenizer,
            lambda line: print(line, file=sys.stderr),
            trust_remote_code=config.trust_remote_code,
        )
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
