"""/v1/batches"""

from typing import Annotated

import apsw
import orjson
from fastapi import APIRouter, Query, Request, Response

from tokasaurus.server.endpoints import EndpointUrl
from tokasaurus.server.errors import Conflict, NotFound, shorten
from tokasaurus.server.jobs.objects import batch_list, batch_object, json_response, page_to_json
from tokasaurus.server.jobs.service import batches_of
from tokasaurus.server.jobs.store.ledger import first_results
from tokasaurus.server.jobs.store.records import BatchRecord, get_batch, list_batches, new_batch
from tokasaurus.server.json_body import JsonBodyRoute
from tokasaurus.server.openapi import BODY_ERRORS, answers, error_responses, example_body
from tokasaurus.server.protocol.batches import (
    BatchList,
    BatchObject,
    CompletionWindow,
    ListBatches,
    Metadata,
    ReadResults,
    window_seconds,
)
from tokasaurus.server.protocol.fields import StrictObject
from tokasaurus.server.protocol.files import ExpiresAfter

MAX_RESULTS_BYTES = 4 << 20
"""Bytes of an answer with results, which may have one result more."""
LINE_SCHEMA = {"type": "string", "description": "A result per line, as in the output file of a batch."}

router = APIRouter(route_class=JsonBodyRoute, tags=["batches"])


class CreateBatch(StrictObject):
    """input_file_id: a file with the purpose "batch".
    completion_window: "24h"; our extension: any time up to 30 days, such as "90m". Lines unfinished then expire.
    metadata: up to 16 pairs; a key has up to 64 characters, a value up to 512.
    output_expires_after: when the output files are removed."""

    input_file_id: str
    endpoint: EndpointUrl
    completion_window: CompletionWindow
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


@router.post(
    "/v1/batches",
    responses=answers(BatchObject, *BODY_ERRORS, 404, 501, 507),
    openapi_extra=example_body(
        {"input_file_id": "file-…", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    ),
)
async def create_batch(request: Request, body: CreateBatch) -> Response:
    """Run the lines of an uploaded file, each a body for `endpoint`. The batch survives restarts of the server."""
    new = new_batch(
        body.endpoint,
        body.input_file_id,
        body.completion_window,
        window_seconds(body.completion_window),
        metadata=None if body.metadata is None else orjson.dumps(body.metadata).decode(),
        output_expires_after=None if body.output_expires_after is None else body.output_expires_after.seconds,
    )
    return json_response(batch_object(await batches_of(request).create(new)))


@router.get("/v1/batches", responses=answers(BatchList, 400, 404, 501))
async def list_all_batches(request: Request, query: Annotated[ListBatches, Query()]) -> Response:
    """The batches, the newest first, page by page."""

    def read(connection: apsw.Connection) -> bytes:
        try:
            page = list_batches(connection, query.after, query.limit)
        except KeyError:
            raise NotFound(f"after: there is no batch with the id {shorten(query.after or '')!r}", "after") from None
        return page_to_json(batch_list(*page))

    return Response(await batches_of(request).store.database.read(read), media_type="application/json")


@router.get("/v1/batches/{batch_id}", responses=answers(BatchObject, 404, 501))
async def retrieve_batch(request: Request, batch_id: str) -> Response:
    """The batch as it is now."""
    service = batches_of(request)
    batch = _require(await service.store.database.read(lambda connection: get_batch(connection, batch_id)), batch_id)
    return json_response(batch_object(batch, service.progress(batch), service.problem(batch) or None))


@router.get(
    "/v1/batches/{batch_id}/results",
    responses={200: {"content": {"application/x-ndjson": {"schema": LINE_SCHEMA}}}, **error_responses(400, 404, 501)},
)
async def read_results(request: Request, batch_id: str, query: Annotated[ReadResults, Query()]) -> Response:
    """Our extension: results of a batch that runs, as its output and error files will have them. Lines are in the order
    of the input, up to the first that has no result. Ask again from the next line on until nothing is returned."""

    def read(connection: apsw.Connection) -> bytes:
        batch = _require(get_batch(connection, batch_id), batch_id)
        return b"".join(first_results(connection, batch.number, query.first, MAX_RESULTS_BYTES))

    content = await batches_of(request).store.database.read(read)
    return Response(content, media_type="application/x-ndjson")


@router.post("/v1/batches/{batch_id}/cancel", responses=answers(BatchObject, 404, 409, 501, 507))
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Stop the batch. Lines that have finished keep their results, which the output file will have."""
    batch = _require(await batches_of(request).cancel(batch_id), batch_id)
    if batch.status != "cancelling":
        raise Conflict(f"the batch cannot be cancelled: its status is {batch.status!r}")
    return json_response(batch_object(batch))


def _require(batch: BatchRecord | None, batch_id: str) -> BatchRecord:
    if batch is None:
        raise NotFound(f"there is no batch with the id {shorten(batch_id)!r}")
    return batch
