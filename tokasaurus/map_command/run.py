"""`toka map`: run a job over files, with an engine of its own or a running server; run again, it goes on."""

import dataclasses
import sys
from pathlib import Path

from tokasaurus.flags import FlagError, given_text
from tokasaurus.library.client import Client
from tokasaurus.library.connection import ServerError
from tokasaurus.library.engine import EngineError
from tokasaurus.library.llm import LLM
from tokasaurus.library.map.job import check_arguments
from tokasaurus.library.map.options import MapOptions
from tokasaurus.library.map.outputs import MapSummary
from tokasaurus.library.sampling import Sampling
from tokasaurus.map_command.config import MapConfig, engine_flags
from tokasaurus.processes.stop_signals import Stopped, signals_raise


def run_map(config: MapConfig, words: list[str]) -> int:
    """Run the job to its end; call from the main thread. Returns the exit code. Raises FlagError.

    0: every row is in the output, and none of this call has an error. 1: not; the last lines on stdout or one line on
    stderr say why. 2: the engine refused a flag or
    the model. 128 + N: stopped by signal N."""
    sampling = _sampling(config)
    try:
        with signals_raise():
            summary = _run(config, sampling, words)
    except FlagError:
        raise
    except (ServerError, EngineError, ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        print(f"toka map: {_one_line(error)}", file=sys.stderr)
        return error.exit_code if isinstance(error, EngineError) else 1
    except Stopped as stopped:
        print("toka map: stopped; the same command continues where it was", file=sys.stderr)
        return 128 + stopped.number
    print(_describe(summary))
    return 1 if summary.num_errors else 0


def _sampling(config: MapConfig) -> Sampling:
    try:
        return Sampling(**config.sampling_fields())
    except ValueError as error:
        raise FlagError(str(error).removeprefix("Sampling: ")) from None


def _run(config: MapConfig, sampling: Sampling, words: list[str]) -> MapSummary:
    assert config.input is not None
    assert config.output is not None
    schema, tools = config.read_schema(), config.read_tools()
    # Now, since starting an engine may take minutes.
    options = MapOptions(
        prompt=None if config.prompt is None else given_text("prompt", config.prompt),
        messages=config.messages,
        chat=config.chat,
        key=config.key,
        columns=config.answer_columns(),
        format=config.format,
        prefix=config.prefix or "",
        overwrite=config.overwrite,
        retry_errors=config.retry_errors,
    )
    check_arguments(config.input, Path(config.output).expanduser(), options)
    client = (
        Client(config.base_url, api_key=config.api_key, concurrency=config.concurrency)
        if config.base_url is not None
        else LLM(concurrency=config.concurrency, **engine_flags(config, words))
    )
    with client:
        return client.map(
            config.input, config.output, sampling=sampling, schema=schema, tools=tools, **dataclasses.asdict(options)
        )


def _describe(summary: MapSummary) -> str:
    num_answered = summary.num_rows - summary.num_skipped - summary.num_errors
    rows = "row" if num_answered == 1 else "rows"
    errors = "1 error" if summary.num_errors == 1 else f"{summary.num_errors:,} errors"
    skipped = f", {summary.num_skipped:,} done before" if summary.num_skipped else ""
    rate = summary.output_tokens / max(summary.seconds, 1e-9)
    sums = f"{summary.output_tokens:,} tokens, {summary.seconds:.1f} s, {rate:,.1f} tokens/s"
    again = "; with retry_errors=T, the same command computes rows with errors again" if summary.num_errors else ""
    first, last = f"{num_answered:,} {rows} answered, {errors}{skipped}, {sums}", f"the rows are in {summary.output}"
    return "\n".join([first, *summary.reasons, f"{last}{again}"])


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
