"""Fields and objects of /v1/batches, as OpenAI's reference documents them. Times are seconds since 1970."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from tokasaurus.server.protocol.fields import value_error

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
LINE_URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"),
    *("/v1/embeddings", "/v1/rerank", "/v1/score", "/classify", "/pooling", "/get_reward"),
)
"""Paths of ALL_ENDPOINTS, for `toka batch`: importing them takes half a second."""
MAX_WINDOW_SECONDS = 30 * 86_400
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def window_seconds(window: str) -> int:
    """ "90m" → 5400. Raises ValueError if this is no completion window."""
    match = _WINDOW.fullmatch(window)
    if match is None:
        raise ValueError(window)
    seconds = int(match[1]) * _UNIT_SECONDS[match[2]]
    if seconds > MAX_WINDOW_SECONDS:
        raise ValueError(window)
    return seconds


def _check_window(window: str) -> str:
    try:
        window_seconds(window)
    except ValueError:
        raise value_error('must be "24h", or another whole number with s, m, h or d after it, at most 30d') from None
    return window


CompletionWindow = Annotated[
    str,
    AfterValidator(_check_window),
    WithJsonSchema({"type": "string", "pattern": "^[1-9][0-9]{0,6}[smhd]$", "examples": ["24h"]}),
]


def _check_number_of_pairs(value: object) -> object:
    """Before pydantic looks at the pairs: it would create an error for each, and there may be a million."""
    if isinstance(value, dict) and len(value) > _MAX_PAIRS:
        raise value_error(f"may have at most {_MAX_PAIRS} items")
    return value


_MAX_PAIRS = 16
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=_MAX_PAIRS),
    BeforeValidator(_check_number_of_pairs),
]


class ListBatches(BaseModel):
    """Query of GET /v1/batches. after: the id of the last batch of the page before."""

    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    after: str | None = None


class ReadResults(BaseModel):
    """Query of GET /v1/batches/{batch_id}/results. first: number of the first line, from 0, without blank lines."""

    model_config = ConfigDict(extra="forbid")

    first: Annotated[int, Field(ge=0, lt=1 << 32)] = 0


@dataclass(frozen=True, slots=True)
class BatchError:
    """What is wrong with the input file. line: from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class BatchErrors:
    data: list[BatchError]
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True)
class BatchRequestCounts:
    """Lines: all, those whose results are in the output file, and those in the error file."""

    total: int
    completed: int
    failed: int


@dataclass(frozen=True, slots=True)
class InputTokensDetails:
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class OutputTokensDetails:
    reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class BatchUsage:
    """Sums over the lines that have a result."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """How far a batch is; our extension. generated_tokens: tokens of finished and running lines; those of running lines
    are counted about once a second. expected_tokens: tokens that all lines are expected to have at the end, from the
    lengths of finished lines and the scheduler's prediction for running ones. seconds_left: until the end, as a range
    [lowest, highest]. Both are left out until there is a basis."""

    generated_tokens: int
    expected_tokens: int | None
    seconds_left: list[float] | None = None


@dataclass(frozen=True, slots=True)
class BulkProgress:
    """How far the unfinished lines are. requests: how many the engine has. generated_tokens: tokens that they have so
    far, counted about once a second. expected_tokens: tokens that they and all lines to come will have at their ends;
    seconds_left: until then, as a range [lowest, highest]. Both are null until there is a basis, which includes that
    the client has said how many lines there will be."""

    requests: int
    generated_tokens: int
    expected_tokens: int | None
    seconds_left: list[float] | None


@dataclass(frozen=True, slots=True)
class BatchObject:
    """A batch. Fields without a value are left out. problem: our extension: why the batch cannot go on now, for example
    because the disk is full; it goes on by itself."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus
    created_at: int
    expires_at: int
    request_counts: BatchRequestCounts
    usage: BatchUsage
    progress: BatchProgress | None = None
    problem: str | None = None
    model: str | None = None
    metadata: dict[str, str] | None = None
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    object: Literal["batch"] = "batch"


@dataclass(frozen=True, slots=True)
class BatchList:
    """has_more: whether a page follows, after `last_id`."""

    data: list[BatchObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
    object: Literal["list"] = "list"
