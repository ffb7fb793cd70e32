"""Records of the store → the objects that clients see."""

from dataclasses import fields, is_dataclass
from typing import Any

import orjson
from fastapi import Response

from tokasaurus.messages.status import TimeLeft
from tokasaurus.server.engine_client.pending import JobPace
from tokasaurus.server.jobs.store.records import BatchRecord, FileRecord
from tokasaurus.server.protocol.batches import (
    BatchError,
    BatchErrors,
    BatchList,
    BatchObject,
    BatchProgress,
    BatchRequestCounts,
    BatchUsage,
    InputTokensDetails,
    OutputTokensDetails,
)
from tokasaurus.server.protocol.files import FileList, FileObject
from tokasaurus.text.json_lines import write_json

# Fields that have the same name and meaning in a record and in the object.
_SAME_IN_BATCHES = (
    *("id", "endpoint", "input_file_id", "completion_window", "status", "created_at", "expires_at", "model"),
    *("output_file_id", "error_file_id", "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
    *("cancelling_at", "cancelled_at"),
)


def file_object(record: FileRecord) -> FileObject:
    return FileObject(record.id, record.bytes, record.created_at, record.filename, record.purpose, record.expires_at)


def batch_progress(record: BatchRecord, pace: JobPace) -> BatchProgress:
    """pace: of the batch, whose lines run."""
    num_generated, left = record.output_tokens + pace.num_running_tokens, pace.num_tokens_left
    return BatchProgress(num_generated, None if left is None else num_generated + left, seconds_of(pace.time_left))


def seconds_of(left: TimeLeft | None) -> list[float] | None:
    return None if left is None else [round(end_s, 1) for end_s in left]


def batch_object(record: BatchRecord, progress: BatchProgress | None = None, problem: str | None = None) -> BatchObject:
    same: dict[str, Any] = {name: getattr(record, name) for name in _SAME_IN_BATCHES}
    return BatchObject(
        **same,
        progress=progress,
        problem=problem,
        request_counts=BatchRequestCounts(record.num_lines, record.num_completed, record.num_failed),
        usage=BatchUsage(
            record.input_tokens,
            InputTokensDetails(record.cached_tokens),
            record.output_tokens,
            OutputTokensDetails(record.reasoning_tokens),
            record.input_tokens + record.output_tokens,
        ),
        metadata=None if record.metadata is None else orjson.loads(record.metadata),
        errors=None
        if record.errors is None
        else BatchErrors([BatchError(**one) for one in orjson.loads(record.errors)]),
    )


def file_list(records: list[FileRecord], has_more: bool) -> FileList:
    return FileList([file_object(record) for record in records], has_more, *_ends(records))


def batch_list(records: list[BatchRecord], has_more: bool) -> BatchList:
    return BatchList([batch_object(record) for record in records], has_more, *_ends(records))


def to_json(value: object) -> bytes:
    """value: a dataclass; fields that are None are left out, at any depth."""
    return write_json(_without_nulls(value))


def page_to_json(page: FileList | BatchList) -> bytes:
    """The page as JSON. Unlike `to_json`, it writes fields of the page itself that are None, as an empty page has, as
    null."""
    return write_json({field.name: _without_nulls(getattr(page, field.name)) for field in fields(page)})


def json_response(value: object) -> Response:
    """An answer with this object, as `to_json` writes it."""
    return Response(to_json(value), media_type="application/json")


def _ends(records: list[FileRecord] | list[BatchRecord]) -> tuple[str | None, str | None]:
    return (records[0].id, records[-1].id) if records else (None, None)


def _without_nulls(value: object) -> object:
    """Dataclasses, also in lists, as dictionaries. Faster than `asdict`, which copies every value."""
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    if not is_dataclass(value):
        return value
    pairs = ((field.name, getattr(value, field.name)) for field in fields(value))
    return {name: _without_nulls(one) for name, one in pairs if one is not None}
