"""`toka batch list`, `show` and `cancel`: batches in a data directory, whether a server runs on it or not, and a
server's batches."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import apsw
import orjson

from tokasaurus.addresses import URL_OF_SOCKETS, socket_of
from tokasaurus.commands.batch.api import BatchApi
from tokasaurus.commands.batch.config import StoredConfig, key_of_environment
from tokasaurus.commands.batch.errors import CommandError, NotOnServer
from tokasaurus.server.jobs.objects import batch_object, to_json
from tokasaurus.server.jobs.store.data_dir import DataDir, DataDirInUse, StoreError
from tokasaurus.server.jobs.store.database import MIGRATIONS, explain, open_connection
from tokasaurus.server.jobs.store.records import BatchRecord, cancel_batch, get_batch, list_batches
from tokasaurus.server.jobs.store.store import default_data_dir, open_store

Result = TypeVar("Result")

_MAX_SILENCE_SECONDS = 5.0
# Statuses of batches that can be cancelled.
_RUNNING = ("validating", "in_progress")


def list_stored(config: StoredConfig, _words: list[str]) -> int:
    """Print a line for each batch, the newest first. Returns the exit code."""

    def listing() -> str:
        if config.base_url is not None:
            with _api(config, config.base_url) as api:
                return _listing(*api.newest(config.limit), config, config.base_url)
        root = _root(config)
        records, has_more = _read(root, lambda connection: list_batches(connection, None, config.limit))
        return _listing([_stored_fields(record) for record in records], has_more, config, str(root))

    return _report(listing)


def show_stored(config: StoredConfig, words: list[str]) -> int:
    """Print a batch with its errors. words: its id. Returns the exit code."""
    (batch_id,) = words

    def show() -> str:
        if config.base_url is not None:
            with _api(config, config.base_url) as api:
                fields = api.fields(batch_id)
        else:
            root = _root(config)
            batch = _read(root, lambda connection: get_batch(connection, batch_id))
            if batch is None:
                raise _no_batch(root, batch_id)
            fields = _stored_fields(batch)
        return orjson.dumps(fields).decode() if config.json else _describe(fields)

    return _report(show)


def cancel_stored(config: StoredConfig, words: list[str]) -> int:
    """Cancel a batch: by the server at base_url, by the one that runs on the directory, or, if there is none, in its
    database, so that the next server writes what is done. words: its id. Returns the exit code."""
    (batch_id,) = words

    def cancel() -> str:
        if config.base_url is not None:
            with _api(config, config.base_url) as api:
                return _cancelled(batch_id, _cancel_by(api, batch_id))
        root = _root(config)
        _check_exists(root)
        try:
            status = _cancel_in_database(root, batch_id)
        except DataDirInUse:
            return _cancelled(batch_id, _cancel_on_directory(root, config, batch_id))
        text = _cancelled(batch_id, status)
        return f"{text}; the next server on {root} writes the results that it has" if status == "cancelling" else text

    return _report(cancel)


def _report(action: Callable[[], str]) -> int:
    """Print what the action returns, if it is not empty. Returns the exit code. Raises CommandError."""
    try:
        text = action()
    except StoreError as error:
        raise CommandError(str(error)) from None
    if text:
        print(text)
    return 0


@contextmanager
def _api(config: StoredConfig, base_url: str) -> Iterator[BatchApi]:
    """The server's API within the context. Raises CommandError."""
    key = config.api_key or key_of_environment()
    with closing(BatchApi(base_url, key, _note, _MAX_SILENCE_SECONDS, is_local=False)) as api:
        yield api


def _note(line: str) -> None:
    print(line, file=sys.stderr)


def _root(config: StoredConfig) -> Path:
    """The data directory. Raises CommandError."""
    try:
        return default_data_dir(config.port) if config.data_dir is None else Path(config.data_dir).expanduser()
    except RuntimeError:
        flag = f"port={config.port}" if config.data_dir is None else f"data_dir={config.data_dir}"
        raise CommandError(f"{flag}: there is no such home directory; data_dir= names another directory") from None


def _check_exists(root: Path) -> None:
    """Raises CommandError."""
    try:
        exists = DataDir(root).database.exists()
    except OSError as error:
        raise CommandError(f"cannot read {root}: {error.strerror}") from None
    if not exists:
        raise CommandError(
            f"{root} has no batches: no server has stored any there (data_dir=, or port=, names another)"
        )


def _no_batch(root: Path, batch_id: str) -> CommandError:
    return CommandError(f"{root} has no batch {batch_id}; toka batch list shows those there are")


def _cancelled(batch_id: str, status: str) -> str:
    """The line for a batch that is cancelled or will be. Raises CommandError for any other status."""
    if status not in ("cancelling", "cancelled"):
        raise CommandError(f"{batch_id} cannot be cancelled: it is {status}")
    return f"{batch_id} is {status}"


def _read(root: Path, operation: Callable[[apsw.Connection], Result]) -> Result:
    """Raises CommandError and StoreError."""
    _check_exists(root)
    try:
        connection = open_connection(DataDir(root).database, can_write=False)
        try:
            version = connection.pragma("user_version")
            if version != len(MIGRATIONS):
                raise CommandError(
                    f"the database in {root} has the version {version}, and this Tokasaurus reads version "
                    f"{len(MIGRATIONS)}: use the same one, or start a server of this one there to bring it up to date"
                )
            with connection:
                result = operation(connection)
        finally:
            connection.close()
    except apsw.Error as error:
        raise explain(error) from None
    return result


def _stored_fields(batch: BatchRecord) -> dict[str, Any]:
    """The batch as the API has it."""
    fields: dict[str, Any] = orjson.loads(to_json(batch_object(batch)))
    return fields


def _listing(batches: Sequence[dict[str, Any]], has_more: bool, config: StoredConfig, place: str) -> str:
    """place: the directory or the server. batches: as the API has them."""
    if config.json:
        return "\n".join(orjson.dumps(batch).decode() for batch in batches)
    lines = [_line(batch) for batch in batches]
    if has_more:
        lines.append(f"and older ones (limit={config.limit})")
    return "\n".join(lines) if lines else f"{place} has no batches"


def _line(batch: dict[str, Any]) -> str:
    counts = batch.get("request_counts") or {}
    completed, failed, total = (counts.get(name, 0) for name in ("completed", "failed", "total"))
    done = f"{completed + failed:,} of {total:,} lines done, {failed:,} failed"
    began = _time(batch.get("created_at", 0))
    return f"{batch.get('id')}  {began}  {batch.get('status'):<11}  {done}  {batch.get('endpoint')}"


def _describe(fields: dict[str, Any]) -> str:
    """A line for each field of the API's object that has a value, and one for each error."""
    errors = (fields.pop("errors", None) or {}).get("data") or []
    fields.pop("object", None)
    lines = []
    for name, value in fields.items():
        if value is None:
            continue
        if name.endswith("_at"):
            text = _time(value)
        elif isinstance(value, dict):
            text = orjson.dumps(value).decode()
        else:
            text = str(value)
        lines.append(f"{name:<18} {text}")
    for error in errors:
        place = f"line {error['line']}: " if error.get("line") is not None else ""
        param, message = error.get("param"), str(error.get("message"))
        param = "" if param is None or param in message else f"{param}: "
        lines.append(f"{'error':<18} {place}{param}{message} ({error.get('code')})")
    return "\n".join(lines)


def _time(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _cancel_in_database(root: Path, batch_id: str) -> str:
    """The batch's status, in a directory that no server uses. Raises CommandError and StoreError."""
    with open_store(root, "toka batch cancel") as store:
        status = store.database.submit(lambda connection: _cancel(connection, batch_id)).result()
    return _require(status, root, batch_id)


def _cancel(connection: apsw.Connection, batch_id: str) -> str | None:
    """The batch's status; None if there is no such batch."""
    batch = get_batch(connection, batch_id)
    return None if batch is None else cancel_batch(connection, batch.number, int(time.time())).status


def _require(status: str | None, root: Path, batch_id: str) -> str:
    if status is None:
        raise _no_batch(root, batch_id)
    return status


def _cancel_on_directory(root: Path, config: StoredConfig, batch_id: str) -> str:
    """The status of a batch, cancelled by the server that runs on the directory. Raises CommandError and StoreError."""
    address = DataDir(root).read_owner()
    unix_socket = socket_of(address)
    if unix_socket is not None:
        address = URL_OF_SOCKETS
    if not address.startswith("http"):
        raise CommandError(f"{root} is in use ({address}); try again")
    for any_address, loopback in (("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:")):
        address = address.replace(any_address, loopback)
    key = config.api_key or os.environ.get("TOKA_API_KEY")
    try:
        return _cancel_by_server(f"{address}/v1", key, batch_id, unix_socket)
    except NotOnServer:
        raise _no_batch(root, batch_id) from None


def _cancel_by_server(base_url: str, key: str | None, batch_id: str, unix_socket: str | None) -> str:
    """The batch's status, from a server on this machine. Raises CommandError."""
    api = BatchApi(base_url, key, _note, _MAX_SILENCE_SECONDS, is_local=True, unix_socket=unix_socket)
    with closing(api):
        return _cancel_by(api, batch_id)


def _cancel_by(api: BatchApi, batch_id: str) -> str:
    """The batch's status. Raises CommandError."""
    batch = api.retrieve(batch_id)
    return api.cancel(batch_id).status if batch.status in _RUNNING else batch.status
