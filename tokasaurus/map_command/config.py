"""The flags of `toka map`: its own, those of sampling, and those of the server that it starts."""

import json
from pathlib import Path
from typing import Any

from tokasaurus.config import ServerConfig
from tokasaurus.flags import FlagError, count, flag

# Flags of how others reach a server, or of what only they use.
_NOT_OF_AN_ENGINE = ("host", "port", "unix_socket", "api_keys_file", "allowed_hosts", "data_dir")
_DEFAULT_URL = "http://127.0.0.1:10210/v1"

_USAGE = "toka map input='questions/*.parquet' output=answers prompt='{question}'"


class MapConfig(ServerConfig, without=_NOT_OF_AN_ENGINE):
    """The flags of a job, checked by `finalize`."""

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
        None, "a template such as 'Q: {question}', with columns in braces, or a column", none_means="or messages="
    )
    messages: str | None = flag(None, "column of lists of messages, in place of prompt=", none_means="or prompt=")
    chat: bool = flag(False, "send the prompt as the message of a user instead of text to continue")
    key: str | None = flag(
        None,
        "column whose values tell rows apart, so that the job goes on though rows have moved",
        none_means="the row's number in its file",
    )
    schema: str | None = flag(None, "file with a JSON schema that every answer then matches", none_means="no schema")
    format: str | None = flag(
        None, "of the output's files", choices=("parquet", "jsonl"), none_means="jsonl for JSON lines, else parquet"
    )
    prefix: str | None = flag(
        None, "of the names of the new columns answer, finish_reason and error", none_means="nothing"
    )
    overwrite: bool = flag(False, "remove the rows of an earlier job from the output")
    concurrency: int | None = count(
        None, "most rows that are at the server at once", none_means="as many as it looks ahead over"
    )
    base_url: str | None = flag(
        None,
        f"URL of a running server, such as {_DEFAULT_URL}; without it, an engine is started, with the flags below",
    )
    api_key: str | None = ServerConfig.declared(
        "api_key",
        meaning="API key of the server at base_url",
        none_means="TOKA_API_KEY",
        variables=("TOKA_API_KEY",),
        heading="map",
    )

    n: int = count(1, "answers of each row; more than 1 are lists", heading="sampling")
    temperature: float = flag(1.0, "0 always takes the most likely token", minimum=0, maximum=2)
    top_p: float = flag(1.0, "keep the most likely tokens that together have this probability", minimum=0, maximum=1)
    top_k: int = flag(-1, "keep this many most likely tokens; -1 keeps all", minimum=-1)
    min_p: float = flag(0.0, "keep tokens this many times as likely as the most likely one", minimum=0, maximum=1)
    presence_penalty: float = flag(
        0.0, "subtracted from the logit of tokens that the answer has already", minimum=-2, maximum=2
    )
    frequency_penalty: float = flag(
        0.0, "subtracted for each time that the answer has the token", minimum=-2, maximum=2
    )
    repetition_penalty: float = flag(1.0, "divides the logits of tokens of prompt and answer", minimum=0)
    logit_bias: dict | None = flag(  # type: ignore[type-arg]  # pydra casts by it
        None, 'added to the logits of token ids, a JSON object such as {"17": -100}', none_means="nothing"
    )
    max_tokens: int | None = count(
        None, "most tokens of an answer", none_means="256, and for chats what the context leaves"
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
    priority: int = flag(0, "among waiting requests, lower values start first")

    log_level: str = ServerConfig.declared("log_level", default="warning")
    uvicorn_log_level: str = ServerConfig.declared("uvicorn_log_level", default="warning")

    @classmethod
    def parse(cls, words: list[str]) -> "MapConfig":
        names = [word.partition("=")[0] for word in words]
        for name in names:
            if name in _NOT_OF_AN_ENGINE:
                raise FlagError(f"{name}: others cannot reach the engine of toka map; base_url= names a running server")
        config = super().parse(words)
        of_server = [name for name in names if name not in _OWN_FLAGS]
        if config.base_url is not None and of_server:
            raise FlagError(f"{of_server[0]}: a flag of the server, which runs already at base_url={config.base_url}")
        return config

    def read_environment(self) -> None:
        """Only for a server at base_url: the variables are for its key."""
        if self.base_url is not None:
            super().read_environment()

    def finalize(self) -> None:
        """Raises FlagError for a wrong value or a missing one."""
        super().finalize()
        for name in ("input", "output"):
            if getattr(self, name) is None:
                raise FlagError(f"{name} is missing: {_USAGE}")
        if self.prompt is None and self.messages is None:
            raise FlagError(f"prompt is missing: {_USAGE}")
        if self.prompt is not None and self.messages is not None:
            raise FlagError("messages: either it or prompt= is given")
        if self.messages is not None and self.chat:
            raise FlagError("chat: goes with prompt=; messages= are a chat already")
        if self.api_key is not None and self.base_url is None:
            raise FlagError("api_key: only with base_url=, since nobody else reaches the engine that is started")
        self.sampling_fields()

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
        if self.schema is None:
            return None
        try:
            schema = json.loads(Path(self.schema).expanduser().read_text())
        except OSError as error:
            raise FlagError(f"schema={self.schema}: {error.strerror}") from None
        except ValueError as error:
            raise FlagError(f"schema={self.schema}: is not JSON: {error}") from None
        if not isinstance(schema, dict):
            raise FlagError(f"schema={self.schema}: must be a JSON object, the schema of an answer")
        return schema

    def _list_of_texts(self, text: str) -> list[str]:
        try:
            texts = json.loads(text)
        except ValueError:
            texts = None
        if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
            raise FlagError(f"stop={text}: must be a text, or a JSON list of texts")
        return texts


SAMPLING_FLAGS = [name for name, flag in MapConfig.flags.items() if flag.heading == "sampling"]
_OWN_FLAGS = [name for name, flag in MapConfig.flags.items() if flag.heading in ("map", "sampling")]
# Flags of the server with other defaults here: its log is beside the progress.
_OWN_DEFAULTS = ("log_level", "uvicorn_log_level")


def engine_flags(config: MapConfig, words: list[str]) -> dict[str, Any]:
    """The flags of the engine that the words name, and the defaults of `toka map` for it."""
    names = {word.partition("=")[0] for word in words}
    given = {
        name: getattr(config, name)
        for name, flag in ServerConfig.flags.items()
        if name not in _OWN_FLAGS and (name in names or flag.alias in names) and name not in _OWN_DEFAULTS
    }
    return {**given, **{name: getattr(config, name) for name in _OWN_DEFAULTS}}
