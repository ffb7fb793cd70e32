"""`toka map`: run a job over files, with an engine of its own or a running server; run again, it goes on."""

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokasaurus.config import FLAGS_OF_ACCESS, CommandConfig, ServerConfig
from tokasaurus.flags import Flag, FlagError, are_missing, count, flag, given_text
from tokasaurus.messages.sampling import CLIENT_PARAMETERS, GENERATE_TOKENS, MODEL_DEFAULTS
from tokasaurus.processes.stop_signals import Stopped, signals_raise

if TYPE_CHECKING:  # the functions that run the job import the library: the flags are read without it
    from tokasaurus.library.map.outputs import MapSummary
    from tokasaurus.library.sampling import Sampling

_USAGE = "toka map input='questions/*.parquet' output=answers prompt='{question}'"


_OF_ARROW = ("parquet", ".pq", ".arrow", ".arrows", ".feather", ".ipc")
"""Ends of the names of files, and a format of the output, that pyarrow reads or writes."""

_NOT_HERE = (*FLAGS_OF_ACCESS, "rl")


_PARAMETERS = {
    name: Flag(
        *(None if name in MODEL_DEFAULTS else each.default, each.meaning, each.minimum, each.maximum),
        none_means=f"the model's default, else {each.default:g}",
        heading="sampling",
        kind=type(each.default),
    )
    for name, each in CLIENT_PARAMETERS.items()
}
"""Some refuse their minimum, which Sampling checks."""


class MapConfig(CommandConfig, without=(*_NOT_HERE, "logprobs_mode"), further=_PARAMETERS):
    """The flags of a job, checked by `finalize`."""

    command_headings = ("map", "sampling")
    set_by_command = _NOT_HERE
    why_set = "others cannot reach the engine of toka map"

    input: str | None = flag(
        None,
        "rows: a file, a pattern or a directory of Parquet, JSON-lines, CSV or Arrow files",
        none_means="required",
        heading="map",
    )
    output: str | None = flag(
        None,
        "directory for the rows with their answers, in files that appear while the job runs; its state is in "
        "OUTPUT.toka",
        none_means="required",
    )
    prompt: str | None = flag(
        None,
        "a template such as 'Q: {question}', with columns in braces, or a column; @FILE reads it from a file, - from "
        "standard input",
        none_means="or messages=",
    )
    messages: str | None = flag(None, "column of lists of messages, in place of prompt=", none_means="or prompt=")
    embed: str | None = flag(
        None,
        "in place of prompt=, a template or a column of texts that become vectors, with task=embed: the new column "
        "embedding",
        none_means="or prompt=",
    )
    embed_dtype: str = flag("float32", "of the column embedding", choices=("float32", "float16"))
    dimensions: int | None = count(None, "with embed=, so many first numbers of each vector", none_means="all")
    chat: bool = flag(False, "send the prompt as the message of a user instead of text to continue")
    key: str | None = flag(
        None,
        "column whose values tell rows apart, so that the job goes on though rows have moved",
        none_means="the row's number in its file",
    )
    schema: str | None = flag(None, "file with a JSON schema that every answer then matches", none_means="no schema")
    tools: str | None = flag(
        None, "file with a JSON list of functions that the model may call, as in OpenAI's API", none_means="no tools"
    )
    columns: str | None = flag(
        None,
        "further columns of the answers, with commas between them: token_ids, logprobs, seed, reasoning, tool_calls",
        none_means="none, or tool_calls with tools=",
    )
    format: str | None = flag(
        None,
        "of the output's files",
        choices=("parquet", "jsonl"),
        none_means="jsonl for JSON lines, else parquet",
    )
    prefix: str | None = flag(
        None, "of the names of the new columns answer, finish_reason, error and columns=", none_means="nothing"
    )
    overwrite: bool = flag(False, "remove the rows of an earlier job from the output")
    retry_errors: bool = flag(False, "compute rows again that have an error in the output")
    concurrency: int | None = count(
        None, "most rows that are at the server at once", none_means="as many as it looks ahead over"
    )
    base_url: str | None = CommandConfig.declared("base_url", heading="map")
    api_key: str | None = ServerConfig.declared(
        "api_key",
        meaning="API key of the server at base_url",
        none_means="TOKA_API_KEY",
        heading="map",
    )

    n: int = count(1, "answers of each row; more than 1 are lists", heading="sampling")
    logit_bias: dict | None = flag(  # type: ignore[type-arg]  # pydra casts by it
        None, 'added to the logits of token ids, a JSON object such as {"17": -100}', none_means="nothing"
    )
    max_tokens: int | None = count(
        None, "most tokens of an answer", none_means=f"{GENERATE_TOKENS}, and for chats what the context leaves"
    )
    min_tokens: int = count(0, "fewest tokens of an answer", minimum=0)
    stop: str | None = flag(
        None, 'text before which an answer ends, or a JSON list of them such as ["\\n", "Q:"]', none_means="none"
    )
    stop_token_ids: str | None = flag(
        None, "token ids that end an answer, with commas between them", none_means="the model's"
    )
    ignore_eos: bool = flag(False, "the model's end token does not end an answer")
    seed: int | None = flag(None, "the same for all rows", minimum=0, none_means="a random one for each row")
    logprobs_mode: str | None = flag(  # type: ignore[assignment]  # of each request, and so of any server
        None,
        "of the column logprobs: the model's own, or of the distribution that tokens are drawn from",
        choices=("raw", "sampled"),
        none_means="the server's",
    )
    priority: int = flag(0, "among waiting requests, lower values start first")
    adapter: str | None = flag(None, "name of the adapter that answers, of lora= or of the server", none_means="none")

    log_level: str = ServerConfig.declared("log_level", default="warning")

    def further_errors(self) -> Iterator[str]:
        needed = ("input", "output", *(("prompt",) if self.messages is None and self.embed is None else ()))
        yield from are_missing([name for name in needed if getattr(self, name) is None], _USAGE)
        for name, value in {"input": self.input, "format": self.format}.items():
            if (value or "").lower().endswith(_OF_ARROW) and find_spec("pyarrow") is None:
                yield f"{name}={value}: needs pyarrow, which is not installed: pip install pyarrow"
        if self.input == "-":
            yield "input=-: must be files, which the same command reads again when it continues"
        if self.output == "-":
            yield "output=-: must be a directory, where the same command continues"
        if self.embed is not None and (self.prompt is not None or self.messages is not None):
            yield "embed: in place of prompt= and messages="
        if self.embed is None and self.dimensions is not None:
            yield "dimensions: goes with embed="
        if self.prompt is not None and self.messages is not None:
            yield "messages: either it or prompt= is given"
        if self.messages is not None and self.chat:
            yield "chat: goes with prompt=; messages= are a chat already"
        if self.api_key is not None and self.base_url is None:
            yield "api_key: only with base_url=, since nobody else reaches the engine that is started"
        if self.tools is not None and self.prompt is not None and "{" in self.prompt and not self.chat:
            yield "tools: need messages: chat=T sends the prompt as the message of a user"
        try:
            self.sampling_fields()
        except FlagError as error:
            yield from error.lines

    def answer_columns(self) -> list[str]:
        """Further columns of the answers."""
        return [] if self.columns is None else [name.strip() for name in self.columns.split(",")]

    def sampling_fields(self) -> dict[str, Any]:
        """The arguments of Sampling. Raises FlagError."""
        fields = {name: getattr(self, name) for name in SAMPLING_FLAGS if getattr(self, name) is not None}
        if self.stop is not None and self.stop.lstrip().startswith("["):
            fields["stop"] = self._list_of_texts(self.stop)
        if self.stop_token_ids is not None:
            try:
                fields["stop_token_ids"] = [int(text) for text in self.stop_token_ids.strip("[]").split(",")]
            except ValueError:
                raise FlagError(
                    f"stop_token_ids={self.stop_token_ids}: must be whole numbers with commas between them"
                ) from None
        if self.logit_bias is not None:
            try:
                fields["logit_bias"] = {int(token_id): bias for token_id, bias in self.logit_bias.items()}
            except ValueError:
                raise FlagError(f"logit_bias={json.dumps(self.logit_bias)}: its names must be token ids") from None
        return fields

    def read_schema(self) -> dict[str, Any] | None:
        """Raises FlagError."""
        schema = self._read_json("schema")
        if schema is not None and not isinstance(schema, dict):
            raise FlagError(f"schema={self.schema}: must be a JSON object, the schema of an answer")
        return schema

    def read_tools(self) -> list[dict[str, Any]] | None:
        """Raises FlagError."""
        tools = self._read_json("tools")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise FlagError(f"tools={self.tools}: must be a JSON list of objects, one for each function")
        return tools

    def _read_json(self, name: str) -> Any:
        """The content of the file that a flag names; None without the flag. Raises FlagError."""
        path = getattr(self, name)
        if path is None:
            return None
        try:
            return json.loads(Path(path).expanduser().read_text())
        except OSError as error:
            raise FlagError(f"{name}={path}: {error.strerror}") from None
        except ValueError as error:
            raise FlagError(f"{name}={path}: is not JSON: {error}") from None

    def _list_of_texts(self, text: str) -> list[str]:
        try:
            texts = json.loads(text)
        except ValueError:
            texts = None
        if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
            raise FlagError(f"stop={text}: must be a text, or a JSON list of texts")
        return texts


SAMPLING_FLAGS = [name for name, flag in MapConfig.flags.items() if flag.heading == "sampling"]
# Flags of the server with other defaults here: its log is beside the progress.
_OWN_DEFAULTS = ("log_level",)


def engine_flags(config: MapConfig, words: list[str]) -> dict[str, Any]:
    """The flags of the engine that the words name, and the defaults of `toka map` for it."""
    given = config.named_in(words, without=(*config.own_flags(), *_OWN_DEFAULTS))
    return {**given, **{name: getattr(config, name) for name in _OWN_DEFAULTS}}


def run_map(config: MapConfig, words: list[str]) -> int:
    """Run the job to its end; call from the main thread. Returns the exit code. Raises FlagError.

    0: every row is in the output, and none of this call has an error. 1: not; the last lines on stdout or one line on
    stderr say why. 2: the engine refused a flag or
    the model. 128 + N: stopped by signal N."""
    from tokasaurus.library.connection import ServerError
    from tokasaurus.library.engine import EngineError

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


def _sampling(config: MapConfig) -> "Sampling":
    from tokasaurus.library.sampling import Sampling

    try:
        return Sampling(**config.sampling_fields())
    except ValueError as error:
        raise FlagError(str(error).removeprefix("Sampling: ")) from None


def _run(config: MapConfig, sampling: "Sampling", words: list[str]) -> "MapSummary":
    from tokasaurus.library.client import Client
    from tokasaurus.library.llm import LLM
    from tokasaurus.library.map.job import check_arguments
    from tokasaurus.library.map.options import MapOptions

    assert config.input is not None
    assert config.output is not None
    keywords: dict[str, Any] = {
        "sampling": sampling,
        "schema": config.read_schema(),
        "tools": config.read_tools(),
        "prompt": None if config.prompt is None else given_text("prompt", config.prompt),
        "messages": config.messages,
        "chat": config.chat,
        "key": config.key,
        "columns": config.answer_columns(),
        "format": config.format,
        "prefix": config.prefix or "",
        "overwrite": config.overwrite,
        "retry_errors": config.retry_errors,
    }
    fields: dict[str, Any] = {}
    if config.embed is not None:
        keywords |= {"sampling": None, "embed": given_text("embed", config.embed)}
        keywords["embed_dtype"] = config.embed_dtype
        fields = {} if config.dimensions is None else {"dimensions": config.dimensions}
    # Now, since starting an engine may take minutes.
    check_arguments(config.input, Path(config.output).expanduser(), MapOptions(**keywords))
    client = (
        Client(config.base_url, api_key=config.api_key, concurrency=config.concurrency)
        if config.base_url is not None
        else LLM(concurrency=config.concurrency, **engine_flags(config, words))
    )
    with client:
        return client.map(config.input, config.output, **keywords, **fields)


def _describe(summary: "MapSummary") -> str:
    num_answered = summary.num_rows - summary.num_skipped - summary.num_errors
    rows = "row" if num_answered == 1 else "rows"
    errors = "1 error" if summary.num_errors == 1 else f"{summary.num_errors:,} errors"
    skipped = f", {summary.num_skipped:,} done before" if summary.num_skipped else ""
    num_tokens = summary.output_tokens or summary.prompt_tokens  # of vectors, there are no others
    rate = num_tokens / max(summary.seconds, 1e-9)
    sums = f"{num_tokens:,} tokens, {summary.seconds:.1f} s, {rate:,.1f} tokens/s"
    again = "; with retry_errors=T, the same command computes rows with errors again" if summary.num_errors else ""
    first, last = f"{num_answered:,} {rows} answered, {errors}{skipped}, {sums}", f"the rows are in {summary.output}"
    return "\n".join([first, *summary.reasons, f"{last}{again}"])


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
