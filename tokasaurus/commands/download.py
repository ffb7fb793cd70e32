"""`toka download`: fetch a model and print its directory."""

from tokasaurus.config import ServerConfig
from tokasaurus.flags import flag
from tokasaurus.monitoring.log_lines import no_status
from tokasaurus.monitoring.log_writer import log_writer, people_output
from tokasaurus.startup_report import StartupReport


class DownloadConfig(ServerConfig, only=("model", "tokenizer", "trust_remote_code")):
    """The flags of `toka download`."""

    dequantized: bool = flag(
        False,
        "also write the weights of a GGUF file or of quantised safetensors as plain ones, for programs that read "
        "nothing else, and print that directory",
        heading="download",
    )


def download(config: DownloadConfig, _words: list[str]) -> int:
    """Download the model and print its directory, and the tokenizer's if it differs. Returns the exit code."""
    from tokasaurus.checkpoint import CheckpointError, resolve_checkpoint, with_safetensors

    writer = log_writer()
    writer.output = people_output()
    report = StartupReport()
    writer.show_status(report.rows)

    def show(line: str) -> None:
        report.begin_phase(line)
        writer.put(line)

    try:
        checkpoint = resolve_checkpoint(
            config.model,
            config.tokenizer,
            show,
            report.show_amount,
            trust_remote_code=config.trust_remote_code,
        )
        directory = with_safetensors(checkpoint.directory, show) if config.dequantized else checkpoint.directory
    except CheckpointError as error:
        writer.put(f"toka download: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        writer.put("toka download: stopped")
        return 1
    finally:
        writer.show_status(no_status)
        writer.flush_lines()  # before the result, which may go to the same terminal
    print(directory)
    if checkpoint.tokenizer_directory != checkpoint.directory:
        print(checkpoint.tokenizer_directory)
    return 0
