"""The columns that are added to the rows: their names, their types, and a sample's values in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokasaurus.library.results import Sample

if TYPE_CHECKING:
    import pyarrow as pa

VECTOR_DTYPES = ("float32", "float16")
COLUMNS = ("token_ids", "logprobs", "seed", "reasoning", "tool_calls")
"""Further columns on request, named as the fields of Sample."""
_OF_ALL_SAMPLES = ("seed",)
"""Columns with one value however many samples there are."""


@dataclass(frozen=True, slots=True)
class AnswerNames:
    """Names of the columns that are added to the rows."""

    answer: str
    """Text, or a list of n texts; null if there is an error."""
    finish_reason: str
    """The finish reason, or a list of n; null if there is an error."""
    error: str
    """Null unless the row could not be answered."""
    more: tuple[str, ...] = ()
    """Names of the further columns, in the order of `fields`."""
    fields: tuple[str, ...] = ()
    """Some of COLUMNS."""
    vector_size: int | None = None
    """Numbers of the vector that the answer is, in place of a text, in which case there is no finish reason; 0 while it
    is not known."""
    vector_dtype: str = "float32"

    def __iter__(self) -> Any:
        if self.vector_size is not None:
            return iter((self.answer, self.error))
        return iter((self.answer, self.finish_reason, self.error, *self.more))


def answer_names(
    columns: Sequence[str], prefix: str, fields: Sequence[str] = (), are_vectors: bool = False
) -> AnswerNames:
    """columns: of the rows. fields: further columns. Raises ValueError and TypeError."""
    if are_vectors and fields:
        raise ValueError("columns: only of answers, and embed= has none")
    if isinstance(fields, str) or not all(isinstance(field, str) for field in fields):
        raise TypeError(f"columns must be a list of names, such as ['token_ids'], not {fields!r}")
    for field in fields:
        if field not in COLUMNS:
            raise ValueError(f"columns: {field!r} must be one of {', '.join(COLUMNS)}")
    fields = tuple(dict.fromkeys(fields))
    more = tuple(f"{prefix}{field}" for field in fields)
    names = AnswerNames(f"{prefix}answer", f"{prefix}finish_reason", f"{prefix}error", more, fields)
    if are_vectors:
        names = AnswerNames(f"{prefix}embedding", "", f"{prefix}error", vector_size=0)
    taken = [name for name in names if name in columns]
    if taken:
        raise ValueError(
            f"the rows have a column {taken[0]!r} already, as a column of the answers would be named: "
            f"prefix={prefix + 'model_'!r} names it {prefix + 'model_' + taken[0].removeprefix(prefix)!r}"
        )
    return names


def further_values(samples: Sequence[Sample], fields: Sequence[str], is_list: bool) -> list[Any]:
    """The values of a row in the further columns, as JSON has them. is_list: a list of them, one for each sample."""
    values = []
    for field in fields:
        of_samples = [_value(sample, field) for sample in samples]
        values.append(of_samples if is_list and field not in _OF_ALL_SAMPLES else of_samples[0])
    return values


def _value(sample: Sample, field: str) -> Any:
    value = getattr(sample, field)
    if field == "tool_calls":
        return [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in value]
    return value.tolist() if field in ("token_ids", "logprobs") and value is not None else value


@dataclass(frozen=True, slots=True)
class AnswerColumn:
    """A column of the answers."""

    name: str
    values: Sequence[Any]
    """One for each row; None where there is none."""
    is_list: bool
    """Whether they are lists with a value for each sample."""
    field: str = ""
    """Which of COLUMNS it is; "" for a column of texts."""
    vector_size: int | None = None
    """Numbers of each of the vectors that the values are."""
    vector_dtype: str = "float32"

    def array(self) -> pa.Array:
        import pyarrow as pa

        return pa.array(self.values, self.kind())

    def kind(self) -> pa.DataType:
        import pyarrow as pa

        if self.vector_size is not None:
            return pa.list_(pa.float16() if self.vector_dtype == "float16" else pa.float32(), self.vector_size)
        call = pa.struct([(name, pa.string()) for name in ("id", "name", "arguments")])
        kinds = {
            "token_ids": pa.list_(pa.int32()),
            "logprobs": pa.list_(pa.float32()),
            "seed": pa.uint64(),
            "tool_calls": pa.list_(call),
        }
        kind = kinds.get(self.field, pa.string())
        return pa.list_(kind) if self.is_list and self.field not in _OF_ALL_SAMPLES else kind
