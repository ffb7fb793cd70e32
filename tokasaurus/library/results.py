"""What a job gives back: a result for each prompt, with its samples or the reason why there are none."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from pydantic_core import to_jsonable_python
from typing_extensions import TypeVar

from tokasaurus.library.counts import Failures

if TYPE_CHECKING:
    import pandas

ParsedT = TypeVar("ParsedT", default=Any)
"""The class that a call names as its schema."""

_MAX_SHOWN_CHARS = 60
_MAX_SHOWN_RESULTS = 3
_MAX_TABLE_ROWS = 20
_MAX_CELL_CHARS = 300


@dataclass(frozen=True, slots=True, repr=False)
class ToolCall:
    """A call that the model asks for."""

    id: str
    """Made by the server; the message with the call's result names it."""
    name: str
    """Name of the function."""
    arguments: str
    """Arguments as the model wrote them: JSON, unless the completion was cut or the model made a mistake."""

    def __repr__(self) -> str:
        return f"ToolCall({self.name}, {_cut(self.arguments)!r})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Sample(Generic[ParsedT]):
    """One completion of a prompt."""

    text: str
    """All of the completion if the prompt is a text or token ids. In a chat, the content of the message, without tool
    calls and reasoning."""
    token_ids: NDArray[np.int32]
    """[T]: the tokens as sampled, with the end token and the tokens of a stop string."""
    logprobs: NDArray[np.float32] | None
    """[T]: log-probability of each token, finite, by `Sampling.logprobs_mode`; None if `Sampling.logprobs` is False."""
    finish_reason: str
    """"stop", "length" or "tool_calls"; "abort" if a trainer has ended the completion early, for new weights."""
    seed: int
    """The request's seed. The same request with it gives the same n samples."""
    index: int = 0
    """Which of the n samples it is."""
    parsed: ParsedT | None = None
    """With a schema: an instance of its class, or what the JSON is. None if the text was cut, or if a validator of the
    class refuses it."""
    parse_error: str | None = None
    """Why there is a schema and `parsed` is None."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Only of a chat with tools."""
    reasoning: str | None = None
    """The text between marks such as `<think>` and `</think>`. In a chat, the server splits it off the text; else it
    remains there, and counts where the text begins with a mark."""
    prompt_tokens: int = 0
    """Tokens of the prompt."""
    cached_tokens: int = 0
    """Tokens of the prompt that did not have to be computed for any sample."""
    top_token_ids: NDArray[np.int32] | None = None
    """[T, N]: the N most likely tokens at each position, most likely first; None if `Sampling.top_logprobs` is 0."""
    top_logprobs: NDArray[np.float32] | None = None
    """[T, N]: their log-probabilities; -inf after the last possible token, where fewer than N are possible."""
    weight_version: str | None = None
    """Name of the weights that the last token is from; None if the server's weights cannot be replaced (flag rl)."""

    def __repr__(self) -> str:
        return f"Sample({_cut(self.text)!r}, {self.finish_reason}, {len(self.token_ids)} tokens)"

    def to_dict(self) -> dict[str, Any]:
        """Its fields; arrays are lists, and an object is what its JSON is."""
        return _plain_fields(self)


@dataclass(frozen=True, slots=True, repr=False)
class RowError:
    """Why a prompt has no samples."""

    code: str
    """A word for programs, such as "context_length_exceeded"."""
    message: str
    """For people; `str(error)` is the same."""
    param: str | None = None
    """The field of the request that is wrong, if one is."""
    status: int | None = None
    """The HTTP status that a single request would have got; None for what never reached the server."""

    def __str__(self) -> str:
        return self.message

    def __repr__(self) -> str:
        return f"RowError({self.code}, {_cut(self.message)!r})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Result(Generic[ParsedT]):
    """The samples of one prompt, or its error. In a notebook it is a table."""

    key: Any
    """The row's key; by default its number in the input, from 0."""
    row: Any
    """The prompt, the messages, or the row with them, as it was given."""
    samples: tuple[Sample[ParsedT], ...]
    """`Sampling.n` of them; none if there is an error."""
    error: RowError | None = None
    """Why there are no samples."""

    @property
    def text(self) -> str | None:
        """Text of the first sample; None if there is an error."""
        return self.samples[0].text if self.samples else None

    @property
    def parsed(self) -> ParsedT | None:
        """Parsed answer of the first sample; None if there is an error."""
        return self.samples[0].parsed if self.samples else None

    @property
    def finish_reason(self) -> str | None:
        """Finish reason of the first sample; None if there is an error."""
        return self.samples[0].finish_reason if self.samples else None

    def __repr__(self) -> str:
        if self.error is not None:
            return f"Result({_cut(repr(self.key))}, {self.error!r})"
        samples = f", {len(self.samples)} samples" if len(self.samples) > 1 else ""
        return f"Result({_cut(repr(self.key))}, {_cut(self.text or '')!r}{samples})"

    def _repr_html_(self) -> str:
        return _table([self])

    def to_dict(self) -> dict[str, Any]:
        """`key`, `row`, `samples` and `error`, of lists, dictionaries and plain values."""
        return _plain_fields(self)


class Results(list[Result[ParsedT]]):
    """The results of a call, in the order of its prompts. In a notebook they are a table.

    `Results(llm.stream(…))` makes one of any results.
    """

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:_MAX_SHOWN_RESULTS]))
        left = len(self) - _MAX_SHOWN_RESULTS
        return f"Results([{shown}{f', … {left:,} more' if left > 0 else ''}])"

    def _repr_html_(self) -> str:
        return _table(self)

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each sample, and one for each prompt with an error. The columns are `key` and `row` of the result,
        the fields of its `Sample`, and `error`, a text. Raises ImportError without pandas."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_pandas needs pandas: pip install pandas") from None
        pairs = [(result, sample) for result in self for sample in result.samples or (None,)]
        columns: dict[str, Any] = {
            "key": pandas.Series([result.key for result, _ in pairs]),
            "row": pandas.Series([result.row for result, _ in pairs], dtype=object),
        }
        for field in dataclasses.fields(Sample):
            values = [None if sample is None else getattr(sample, field.name) for _, sample in pairs]
            columns[field.name] = pandas.Series(values, dtype=_PANDAS_TYPES.get(field.name, "object"))
        errors = [None if result.error is None else str(result.error) for result, _ in pairs]
        columns["error"] = pandas.Series(errors, dtype=object)
        return pandas.DataFrame(columns)


_PANDAS_TYPES = {"seed": "UInt64", "index": "Int64", "prompt_tokens": "Int64", "cached_tokens": "Int64"}
"""Whole numbers beside missing ones: as floats, seeds would be others."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Score:
    """The log-probabilities of a given completion."""

    token_ids: NDArray[np.int32]
    """[T]: the tokens of the completion. A token that begins in the prompt and ends in the completion belongs to it."""
    logprobs: NDArray[np.float32]
    """[T]: log-probability of each, given the prompt and the tokens before it. NaN for the first token of all: a model
    without a start token has no probability for it."""
    error: RowError | None = None
    """Why there are none; the arrays are then empty."""

    @property
    def total(self) -> float:
        """Log-probability of the whole completion; NaN if there is an error, or if one of its tokens has NaN."""
        return float("nan") if self.error else float(self.logprobs.sum(dtype=np.float64))

    def __repr__(self) -> str:
        if self.error is not None:
            return f"Score({self.error!r})"
        return f"Score(total={self.total:.4g}, {len(self.token_ids)} tokens)"

    def to_dict(self) -> dict[str, Any]:
        """Its fields; arrays are lists."""
        return _plain_fields(self)


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """What a model that makes vectors or scores gives for one text or pair."""

    numbers: NDArray[np.float32]
    """[D]; none if there is an error."""
    label: str | None = None
    """Of a classifier."""
    error: RowError | None = None


def stacked(rows: Sequence[Pooled]) -> NDArray[np.float32]:
    """[rows, D]: NaN where there is an error."""
    size = max((len(row.numbers) for row in rows), default=0)
    found = np.full((len(rows), size), np.nan, np.float32)
    for number, row in enumerate(rows):
        if row.error is None:
            found[number] = row.numbers
    return found


class RowsFailed(UserWarning):
    """Prompts of a call have errors: a warning, or an exception with raise_on_error=True. One line counts them by
    reason."""

    def __init__(self, message: str, results: Sequence[Result[Any] | Score | Pooled] = ()) -> None:
        """results: all of the call; none of a stream."""
        super().__init__(message)
        self.results = results


NO_TOKENS = (np.zeros(0, np.int32), np.zeros(0, np.float32))
"""Token ids and log-probabilities of a score with an error."""


def row_error(status: int, body: Mapping[str, Any]) -> RowError:
    """The error of an answer. body: the server's error object, or what another program has answered."""
    error = body.get("error")
    if not isinstance(error, dict):
        return RowError("unknown", f"the server answered {status} without a reason", None, status)
    code = error.get("code") or error.get("type") or "unknown"
    return RowError(str(code), str(error.get("message")), error.get("param"), status)


def failures_of(errors: Iterable[RowError | None]) -> Failures:
    failures = Failures()
    for error in errors:
        if error is not None:
            failures.add(error.code, error.message)
    return failures


def _cut(value: object, max_chars: int = _MAX_SHOWN_CHARS) -> str:
    text = str(value)
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def _plain_fields(value: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _plain(value: Any) -> Any:
    """As `json` writes it, but for values of the user's row that no JSON has."""
    if isinstance(value, Sample | ToolCall | RowError):
        return _plain_fields(value)
    if isinstance(value, BaseModel) or dataclasses.is_dataclass(value):
        return to_jsonable_python(value, fallback=str)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _table(results: Sequence[Result[Any]]) -> str:
    """A row for each sample or error, up to _MAX_TABLE_ROWS."""
    rows = [
        (result.key, _prompt_text(result.row), *answer)
        for result in results[:_MAX_TABLE_ROWS]
        for answer in (
            [(sample.text, sample.finish_reason) for sample in result.samples] or [(f"{result.error}", "error")]
        )
    ]
    lines = [
        "<tr>" + "".join(f"<td {_CELL}>{escape(_cut(cell, _MAX_CELL_CHARS))}</td>" for cell in row) + "</tr>"
        for row in rows[:_MAX_TABLE_ROWS]
    ]
    head = "".join(f"<th {_CELL}>{name}</th>" for name in ("key", "prompt", "answer", "finish_reason"))
    num_left = sum(len(result.samples) or 1 for result in results) - len(lines)
    left = f"<p>{num_left:,} more</p>" if num_left else ""
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>{left}"


_CELL = 'style="text-align: left; vertical-align: top; white-space: pre-wrap"'


def _prompt_text(row: Any) -> str:
    """Of messages, the last one."""
    if isinstance(row, Mapping):
        row = row.get("prompt", row.get("messages"))
    if isinstance(row, list | tuple) and row and isinstance(row[-1], Mapping):
        row = row[-1].get("content")
    return str(row)
