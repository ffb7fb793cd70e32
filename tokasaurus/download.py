"""`toka download`: fetch a model and print its directory."""

import sys

from tokasaurus.config import ServerConfig
from tokasaurus.flags import flag


class DownloadConfig(ServerConfig, only=("model", "tokenizer", "trust_remote_code")):
    """The flags of `toka download`."""

    dequantized: bool = flag(
        False,
        "also write the weights of a GGUF file or of quantised safetensors as plain ones, for programs that read "
        "nothing else, and print that directory",
        heading="download",
    )


def download(config: DownloadConfig) -> int:
    """Download the model and print its directory, and the tokenizer's if it differs. Returns the exit code."""
    from tokasaurus.checkpoint import CheckpointError, resolve_checkpoint, with_safetensors

    def show(line: str) -> None:
        print(line, file=sys.stderr)

    try:
        checkpoint = resolve_checkpoint(
            config.model,
            config.tokenizer,
            show,
            trust_remote_code=config.trust_remote_code,
        )
        directory = with_safetensors(checkpoint.directory, show) if config.dequantized else checkpoint.directory
    except CheckpointError as error:
        print(f"toka download: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("toka download: stopped", file=sys.stderr)
        return 1
    print(directory)
    if checkpoint.tokenizer_directory != checkpoint.directory:
        print(checkpoint.tokenizer_directory)
    return 0
