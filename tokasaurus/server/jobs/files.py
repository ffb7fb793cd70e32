"""Files that clients send, read and delete."""

import logging
import time
from typing import BinaryIO

import apsw
from pydantic import ValidationError

from tokasaurus.config import ServerConfig
from tokasaurus.server.errors import BodyTooLarge, Conflict, InvalidRequest, NotFound, one_error, shorten, unknown_field
from tokasaurus.server.jobs.multipart import FILE_FIELD, FormReader
from tokasaurus.server.jobs.store.data_dir import NewContent, StoreError
from tokasaurus.server.jobs.store.database import run_blocking
from tokasaurus.server.jobs.store.records import (
    FileRecord,
    add_file,
    batch_that_needs,
    get_file,
    new_file_id,
    remove_file_row,
)
from tokasaurus.server.jobs.store.store import Store
from tokasaurus.server.json_values import problems_of
from tokasaurus.server.protocol.files import UploadFields
from tokasaurus.server.protocol.known_fields import advice
from tokasaurus.server.resources import DAY_SECONDS
from tokasaurus.server.value_words import MAX_TOLD

logger = logging.getLogger(__name__)

MAX_BYTES_BESIDE_FILE = 1 << 16
"""Bytes of an upload's body that are not in the file."""
_MAX_FILENAME_CHARS = 512
_SECONDS = "expires_after[seconds]"
_FIELDS = ("purpose", "expires_after[anchor]", _SECONDS)


def check_upload_size(num_bytes: int, max_file_bytes: int) -> None:
    """num_bytes: of an upload's whole body. Raises BodyTooLarge if its file must be larger than allowed."""
    if num_bytes > max_file_bytes + MAX_BYTES_BESIDE_FILE:
        raise _too_large(max_file_bytes)


class Upload:
    """A file that arrives. Its methods block, except `store`, and raise ApiError and OSError."""

    def __init__(self, store: Store, config: ServerConfig, content_type: str) -> None:
        """content_type: the header of the request."""
        self._store = store
        self._config = config
        self._reader = FormReader(content_type, self)
        self._fields: dict[str, str] = {}
        self._problems: list[InvalidRequest] = []
        """What is wrong with the fields so far."""
        self._num_bytes = 0
        self._file_id = new_file_id()
        self._filename = ""
        self._content: NewContent | None = None

    def feed(self, content: bytes) -> None:
        """The next bytes of the body."""
        self._num_bytes += len(content)
        check_upload_size(self._num_bytes, self._config.max_file_bytes)
        self._reader.feed(content)

    def discard(self) -> None:
        """Nothing remains. To be called unless the file is stored."""
        if self._content is not None:
            self._content.discard()

    async def store(self) -> FileRecord:
        """The stored file; nothing of it is lost from now on. Called after the last bytes. Raises StoreError: then
        nothing is stored."""
        self._reader.finish()
        fields = self._checked_fields()
        assert self._content is not None, "it is among the fields that are checked"
        now = int(time.time())
        seconds = self._config.keep_days * DAY_SECONDS
        if fields.expires_after is not None:
            seconds = fields.expires_after.seconds
        num_bytes = self._content.num_bytes
        record = FileRecord(self._file_id, fields.purpose, self._filename, num_bytes, now, now + seconds)
        await run_blocking(self._content.commit)
        try:
            await self._store.database.write(lambda connection: add_file(connection, record))
        except StoreError:
            await run_blocking(self._store.data_dir.remove_content, record.id)
            raise
        return record

    # Called by the reader as the form's parts arrive

    def add_field(self, name: str, value: str) -> None:
        if name not in _FIELDS:
            self._problems.append(unknown_field(shorten(name), advice(name, (*_FIELDS, FILE_FIELD))))
        elif name in self._fields:
            self._problems.append(InvalidRequest(f"{name} is given twice", name))
        elif name == "purpose" and value != "batch":
            self._problems.append(
                InvalidRequest(
                    f"purpose must be 'batch', not {shorten(value)!r}: this server has files for batches only", name
                )
            )
        self._fields[name] = value
        if len(self._problems) == MAX_TOLD:
            raise one_error(self._problems)

    def begin_file(self, filename: str) -> None:
        if self._problems:  # before the file arrives, if possible
            raise one_error(self._problems)
        if self._content is not None:
            raise InvalidRequest("the body has two parts named file: send each file in a request of its own", "file")
        if len(filename) > _MAX_FILENAME_CHARS or not filename.isprintable():
            raise InvalidRequest(
                f"the file's name may have at most {_MAX_FILENAME_CHARS} characters, all of them printable", "file"
            )
        self._filename = filename
        self._content = self._store.new_content(self._file_id)

    def write(self, content: bytes) -> None:
        assert self._content is not None, "begin_file was called"
        if self._content.num_bytes + len(content) > self._config.max_file_bytes:
            raise _too_large(self._config.max_file_bytes)
        self._content.write(content)

    def _checked_fields(self) -> UploadFields:
        """Raises InvalidRequest, which tells all that is wrong."""
        problems, num_more = self._problems, 0
        if self._content is None:
            problems.append(InvalidRequest("file is required: the body has no part of this name", "file"))
        fields: dict[str, object] = {}
        if "purpose" in self._fields:
            fields["purpose"] = "batch"  # a wrong one is among the problems
        expires_after: dict[str, object] = {}
        if (anchor := self._fields.get("expires_after[anchor]")) is not None:
            expires_after["anchor"] = anchor
        if (seconds := self._fields.get(_SECONDS)) is not None:
            is_number = seconds.isdecimal() and len(seconds) <= 10
            expires_after["seconds"] = int(seconds) if is_number else seconds
        if expires_after:
            fields["expires_after"] = expires_after
        try:
            checked = UploadFields.model_validate(fields)
        except ValidationError as error:
            found, num_more = problems_of(error.errors(include_url=False, include_input=False), UploadFields)
            problems += found
        if problems:
            raise one_error(problems, num_more)
        return checked


def _too_large(max_file_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"a file may have at most {max_file_bytes} bytes (max_file_bytes)", "file")


async def find_file(store: Store, file_id: str) -> FileRecord:
    """Raises NotFound and StoreError."""
    return require_file(await store.database.read(lambda connection: get_file(connection, file_id)), file_id)


def require_file(record: FileRecord | None, file_id: str, param: str | None = None) -> FileRecord:
    """Raises NotFound if the record is None. param: the field of the request that names the file."""
    if record is None:
        raise NotFound(f"there is no file with the id {shorten(file_id)!r}", param)
    return record


async def open_file(store: Store, file_id: str) -> tuple[FileRecord, BinaryIO]:
    """The file and its content, which can be read even if the file is deleted meanwhile. Raises NotFound and
    StoreError."""
    record = await find_file(store, file_id)
    content = await run_blocking(store.data_dir.open_content, file_id)
    num_bytes = await run_blocking(content.seek, 0, 2)
    await run_blocking(content.seek, 0)
    if num_bytes != record.bytes:
        content.close()
        raise StoreError(
            f"the content of {file_id} is damaged: it has {num_bytes} bytes and should have {record.bytes}"
        )
    return record, content


async def delete_file(store: Store, file_id: str) -> None:
    """Raises NotFound, Conflict if a batch still needs the file, and StoreError."""

    def delete(connection: apsw.Connection) -> None:
        require_file(get_file(connection, file_id), file_id)
        batch_id = batch_that_needs(connection, file_id)
        if batch_id is not None:
            raise Conflict(f"the file cannot be deleted: {batch_id} reads it and is not finished")
        remove_file_row(connection, file_id)

    await store.database.write(delete)
    await remove_contents(store, [file_id])


async def remove_contents(store: Store, file_ids: list[str]) -> None:
    """Remove the contents of files whose rows are removed. If that fails, the next start of the server does it."""

    def remove() -> None:
        for file_id in file_ids:
            store.data_dir.remove_content(file_id)

    try:
        await run_blocking(remove)
    except StoreError as error:
        logger.warning("the contents of deleted files remain until the server is started again: %s", error)
