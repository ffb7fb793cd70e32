"""Records of the store → the objects that clients see."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import orjson
from fastapi import Response

from tokasaurus.server.engine_client.client import PendingRequest
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


def batch_progress(record: BatchRecord, pending: Sequence[PendingRequest]) -> BatchProgress:
    """pending: the batch's requests in the engine. A line that no prediction knows is expected to be like the others:
    the finished lines, and the running ones at their expected ends. With the finished ones alone, which are the
    shortest, the estimate would be too low; so there is none while lines run of which nothing is predicted."""
    lines: dict[str, list[PendingRequest]] = defaultdict(list)
    for request in pending:
        lines[request.request.request_id.rpartition("-")[0]].append(request)  # a line has a request for each prompt
    num_generated = record.output_tokens + sum(request.num_generated_tokens for request in pending)
    predictions = [[request.num_expected_tokens for request in line] for line in lines.values()]
    totals = [sum(known) for line in predictions if len(known := [one for one in line if one is not None]) == len(line)]
    num_known = record.num_completed + len(totals)
    if num_known == 0 or (pending and not totals):
        return BatchProgress(num_generated, None)
    num_tokens = record.output_tokens + sum(totals)
    num_left = max(0, record.num_lines - record.num_failed - num_known)
    return BatchProgress(num_generated, max(num_generated, num_tokens + round(num_left * num_tokens / num_known)))


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
