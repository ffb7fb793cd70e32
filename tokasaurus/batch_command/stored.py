"""`toka batch list`, `show` and `cancel`: batches in a data directory, whether a server runs on it or not."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import apsw
import orjson

from tokasaurus.batch_command.api import BatchApi
from tokasaurus.batch_command.config import StoredConfig
from tokasaurus.batch_command.errors import CommandError
from tokasaurus.batch_command.own_server import GivenServer
from tokasaurus.batch_command.state_file import STATE_NAME, parse_state
from tokasaurus.server.batches.location import default_data_dir
from tokasaurus.server.batches.objects import batch_object, to_json
from tokasaurus.server.batches.store.batches import cancel_batch, get_batch, list_batches
from tokasaurus.server.batches.store.data_dir import DataDir
from tokasaurus.server.batches.store.database import explain, open_connection
from tokasaurus.server.batches.store.errors import DataDirInUse, StoreError
from tokasaurus.server.batches.store.records import BatchRecord
from tokasaurus.server.batches.store.schema import MIGRATIONS
from tokasaurus.server.batches.store.store import open_store

Result = TypeVar("Result")

_CANCEL_RETRY_S = 5.0


def list_stored(config: StoredConfig) -> int:
    """Print a line for each batch, the newest first. Returns the exit code."""
    return _report(config, lambda root: _read(root, lambda connection: _listing(connection, config, root)))


def show_stored(config: StoredConfig, batch_id: str) -> int:
    """Print a batch with its errors. Returns the exit code."""

    def show(root: Path) -> str:
        batch = _read(root, lambda connection: get_batch(connection, batch_id))
        if batch is None:
            raise CommandError(f"{root} has no batch {batch_id}; toka batch list shows those there are")
        return to_json(batch_object(batch)).decode() if config.json else _fields(batch)

    return _report(config, show)


def cancel_stored(config: StoredConfig, batch_id: str) -> int:
    """Cancel a batch: by the server that runs on the directory, or, if there is none, in its database, so that the next
    server writes what is done. Returns the exit code."""

    def cancel(root: Path) -> str:
        _check_exists(root)
        try:
            with open_store(root, "toka batch cancel") as store:
                batch = store.database.submit(lambda connection: _cancel(connection, batch_id)).result()
                if batch is None:
                    raise CommandError(f"{root} has no batch {batch_id}; toka batch list shows those there are")
                status = batch.status
        except DataDirInUse:
            return f"{batch_id} is {_cancel_on_server(root, config, batch_id)}"
        if status == "cancelling":
            return f"{batch_id} is cancelling; the next server on {root} writes the results that it has"
        return f"{batch_id} is {status}"

    return _report(config, cancel)


def _report(config: StoredConfig, action: Callable[[Path], str]) -> int:
    root = default_data_dir(config.port) if config.data_dir is None else Path(config.data_dir).expanduser()
    try:
        print(action(root))
    except (CommandError, StoreError) as error:
        print(f"toka batch: {error}", file=sys.stderr)
        return 1
    return 0


def _check_exists(root: Path) -> None:
    """Raises CommandError."""
    if not DataDir(root).database.exists():
        raise CommandError(
            f"{root} has no batches: no server has stored any there (data_dir=, or port=, names another)"
        )


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


def _listing(connection: apsw.Connection, config: StoredConfig, root: Path) -> str:
    batches, has_more = list_batches(connection, None, config.limit)
    if config.json:
        return "\n".join(to_json(batch_object(batch)).decode() for batch in batches)
    lines = [_line(batch) for batch in batches]
    if has_more:
        lines.append(f"and older ones (limit={config.limit})")
    return "\n".join(lines) if lines else f"{root} has no batches"


def _line(batch: BatchRecord) -> str:
    num_done = batch.num_completed + batch.num_failed
    counts = f"{num_done:,} of {batch.num_lines:,} lines done, {batch.num_failed:,} failed"
    return f"{batch.id}  {_time(batch.created_at)}  {batch.status:<11}  {counts}  {batch.endpoint}"


def _fields(batch: BatchRecord) -> str:
    """A line for each field of the API's object that has a value, and one for each error."""
    fields = orjson.loads(to_json(batch_object(batch)))
    errors = (fields.pop("errors", None) or {}).get("data", [])
    del fields["object"]
    lines = []
    for name, value in fields.items():
        if name.endswith("_at"):
            text = _time(value)
        elif isinstance(value, dict):
            text = orjson.dumps(value).decode()
        else:
            text = str(value)
        lines.append(f"{name:<18} {text}")
    for error in errors:
        place = f"line {error['line']}: " if "line" in error else ""
        param = f"{error['param']}: " if "param" in error else ""
        lines.append(f"{'error':<18} {place}{param}{error['message']} ({error['code']})")
    return "\n".join(lines)


def _time(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _cancel(connection: apsw.Connection, batch_id: str) -> BatchRecord | None:
    batch = get_batch(connection, batch_id)
    return None if batch is None else cancel_batch(connection, batch.number, int(time.time()))


def _cancel_on_server(root: Path, config: StoredConfig, batch_id: str) -> str:
    """The batch's status. Raises CommandError."""
    address = DataDir(root).read_owner()
    if not address.startswith("http"):
        raise CommandError(f"{root} is in use ({address}); try again")
    for any_address, loopback in (("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:")):
        address = address.replace(any_address, loopback)
    key = config.api_key or _key_of_run(root) or os.environ.get("TOKA_API_KEY")
    api = BatchApi(
        f"{address}/v1",
        key,
        GivenServer(),
        note=lambda line: print(line, file=sys.stderr),
        retry_s=_CANCEL_RETRY_S,
        is_local=True,
    )
    try:
        return api.cancel(batch_id).status
    finally:
        api.close()


def _key_of_run(root: Path) -> str | None:
    """The random key of the server that `toka batch` has started, if it has; the environment has keys of other servers."""
    try:
        content = (root / STATE_NAME).read_bytes()
    except OSError:
        return None
    return parse_state(content, root / STATE_NAME).api_key
