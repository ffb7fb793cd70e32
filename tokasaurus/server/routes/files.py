"""/v1/files"""

import asyncio
import logging
from typing import Annotated, BinaryIO

import apsw
from fastapi import APIRouter, Query, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from tokasaurus.server.errors import ClientGone, NotFound, ServerStopping, UnsupportedMediaType, shorten
from tokasaurus.server.event_stream import run_while_connected
from tokasaurus.server.jobs.files import (
    Upload,
    check_upload_size,
    delete_file,
    find_file,
    open_file,
)
from tokasaurus.server.jobs.objects import file_list, file_object, json_response, page_to_json
from tokasaurus.server.jobs.service import BatchService, batches_of
from tokasaurus.server.jobs.store.data_dir import StoreError
from tokasaurus.server.jobs.store.database import run_blocking
from tokasaurus.server.jobs.store.records import FileRecord, list_files
from tokasaurus.server.openapi import BODY_ERRORS, answers, error_responses
from tokasaurus.server.protocol.files import (
    CONTENT_SCHEMA,
    UPLOAD_SCHEMA,
    FileDeleted,
    FileList,
    FileObject,
    ListFiles,
)
from tokasaurus.server.state import is_head

logger = logging.getLogger(__name__)
router = APIRouter(tags=["files"])

FORM = "multipart/form-data"
PART_BYTES = 1 << 18
"""Bytes that are written or read by one call in a thread, and kept in memory for each connection."""


class FileContent(Response):
    """Sends a file in parts and closes it."""

    media_type = "application/octet-stream"

    def __init__(self, record: FileRecord, content: BinaryIO) -> None:
        super().__init__(headers={"content-length": str(record.bytes)})
        self._record = record
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            num_bytes = 0 if is_head(scope) else self._record.bytes
            await run_while_connected(receive, self._send(num_bytes, send))
        except (ClientGone, ServerStopping):
            return  # the connection closes if the answer is not complete
        except StoreError as error:
            logger.error("the download of %s is cut off: %s", self._record.id, error)
        finally:
            self._content.close()

    async def _send(self, num_left: int, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if num_left == 0:
            await send({"type": "http.response.body", "body": b""})
        while num_left > 0:
            part = await run_blocking(self._content.read, min(PART_BYTES, num_left))
            if not part:
                raise StoreError("its content was cut off")
            num_left -= len(part)
            await send({"type": "http.response.body", "body": part, "more_body": num_left > 0})


@router.post(
    "/v1/files",
    responses=answers(FileObject, *BODY_ERRORS, 501, 507),
    openapi_extra={"requestBody": {"required": True, "content": {FORM: {"schema": UPLOAD_SCHEMA}}}},
)
async def upload_file(request: Request) -> Response:
    """Store a file for batches. When this answers, the file survives a crash of the server and of the machine."""
    service = batches_of(request)
    named = request.headers.get("content-type", FORM)  # without one, it lacks a boundary
    if named.partition(";")[0].strip().lower() != FORM:
        raise UnsupportedMediaType(f"the body must be {FORM}, not {shorten(named)!r}")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal():
        check_upload_size(int(announced), service.config.max_file_bytes)
    return json_response(file_object(await _receive(request, service)))


async def _receive(request: Request, service: BatchService) -> FileRecord:
    """The stored file. Raises ApiError and StoreError; then nothing of it is left."""
    upload = Upload(service.store, service.config, request.headers.get("content-type", ""))
    try:
        part = bytearray()
        async for chunk in request.stream():
            part += chunk
            if len(part) >= PART_BYTES:
                await run_blocking(upload.feed, bytes(part))
                part.clear()
        await run_blocking(upload.feed, bytes(part))
        return await upload.store()
    except asyncio.CancelledError:  # as in `run_while_connected`
        upload.discard()  # at once: the event loop is about to end, and a thread would not be waited for
        raise ServerStopping("the server is stopping") from None
    except BaseException as error:
        await run_blocking(upload.discard)
        if isinstance(error, ClientDisconnect):
            raise ClientGone from None
        raise


@router.get("/v1/files", responses=answers(FileList, 400, 404, 501))
async def list_all_files(request: Request, query: Annotated[ListFiles, Query()]) -> Response:
    """The files, page by page."""

    def read(connection: apsw.Connection) -> bytes:
        try:
            page = list_files(connection, query.purpose, query.after, query.limit, query.order == "desc")
        except KeyError:
            raise NotFound(f"after: there is no file with the id {shorten(query.after or '')!r}", "after") from None
        return page_to_json(file_list(*page))

    return Response(await batches_of(request).store.database.read(read), media_type="application/json")


@router.get("/v1/files/{file_id}", responses=answers(FileObject, 404, 501))
async def retrieve_file(request: Request, file_id: str) -> Response:
    """What is known of a file."""
    return json_response(file_object(await find_file(batches_of(request).store, file_id)))


@router.get(
    "/v1/files/{file_id}/content",
    response_class=Response,
    responses={
        200: {"content": {FileContent.media_type: {"schema": CONTENT_SCHEMA}}},
        **error_responses(404, 501),
    },
)
async def retrieve_content(request: Request, file_id: str) -> Response:
    """The content of a file."""
    return FileContent(*await open_file(batches_of(request).store, file_id))


@router.delete("/v1/files/{file_id}", responses=answers(FileDeleted, 404, 409, 501, 507))
async def remove_file(request: Request, file_id: str) -> Response:
    """Delete a file. A file that an unfinished batch reads cannot be deleted."""
    await delete_file(batches_of(request).store, file_id)
    return json_response(FileDeleted(file_id))
