"""Calls of `map` with a session that answers at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tests.library.map.helpers.instant_session import InstantSession
from tokasaurus.library.blocking import BulkSession
from tokasaurus.library.map.job import map_rows
from tokasaurus.library.map.options import MapOptions
from tokasaurus.library.model_files import ModelFiles
from tokasaurus.library.requests import RequestFormat, Schema
from tokasaurus.library.sampling import Sampling


def call_map(
    rows: object,
    output: Path | None = None,
    session: InstantSession | None = None,
    sampling: Sampling | None = None,
    schema: Schema | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    model_files: ModelFiles | None = None,
    **arguments: Any,
) -> Any:
    session = InstantSession() if session is None else session
    request_format = RequestFormat("test-model", sampling, schema=schema, tools=tools)
    options = MapOptions(**{"progress": False, **arguments})
    return map_rows(cast(BulkSession, session), request_format, rows, output, options, model_files)


def expected_rows(rows: list[dict[str, Any]], prompts: list[str | None]) -> list[dict[str, Any]]:
    """With the answers of an InstantSession; the prompt None is an error, whose message is not told."""
    expected = []
    for row, prompt in zip(rows, prompts, strict=True):
        is_error = prompt is None or prompt.startswith("too long")
        answer = None if is_error else f"{prompt} → {len(prompt or '')}"
        expected.append({**row, "answer": answer, "finish_reason": None if is_error else "stop", "is_error": is_error})
    return expected


def without_messages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of an output, with whether there is an error in place of its message."""
    return [
        {**{name: value for name, value in row.items() if name != "error"}, "is_error": row["error"] is not None}
        for row in rows
    ]
