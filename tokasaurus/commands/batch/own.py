"""The batch of a run without `base_url=`: in a data directory of its own, run by processes of its own.

The command and its server meet in the database: the command stores the batch, the server runs its lines into the
ledger, and the command reads the results from there.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import apsw
import orjson

from tokasaurus.commands.batch.errors import CommandError, InputRefused
from tokasaurus.commands.batch.input_file import Fingerprint, InputLimits, check_input, find_endpoint, fingerprint
from tokasaurus.commands.batch.progress import BatchView
from tokasaurus.commands.batch.results import OutputFile, ResultsSoFar
from tokasaurus.messages.status import BatchTokens, ServerTotals
from tokasaurus.processes.private_server import STOP_S, PrivateServer, ServerEnded
from tokasaurus.processes.stop_signals import Stopped
from tokasaurus.server.jobs.store.data_dir import DataDir, DataDirInUse, StoreError
from tokasaurus.server.jobs.store.database import explain, open_connection
from tokasaurus.server.jobs.store.ledger import add_lines, first_results
from tokasaurus.server.jobs.store.records import (
    BatchRecord,
    FileRecord,
    NewLine,
    add_batch,
    add_file,
    get_batch,
    new_batch,
    start_batch,
)
from tokasaurus.server.jobs.store.store import PRIVATE_OWNER, open_store
from tokasaurus.server.protocol.batches import window_seconds

Result = TypeVar("Result")

# Time for the processes of a run that was killed to end.
_FREE_S = 20.0
INPUT_ID = "file-input"
"""Id of the input in the data directory."""
_LINES_PER_TRANSACTION = 10_000
_MAX_BYTES_PER_READ = 4 << 20
"""Bytes of results that are read at once; one result may exceed it."""


def store_batch(root: Path, input_path: Path, input_name: str, limits: InputLimits, max_bytes: int, window: str) -> str:
    """The id of a new batch of the input in the data directory; it replaces what an interrupted call has left there.

    input_name: as the user gave it. max_bytes: of the input. Raises CommandError, and InputRefused if it is bad."""
    endpoint = find_endpoint(input_path)
    data_dir = DataDir(root)
    now = int(time.time())
    try:
        num_bytes = input_path.stat().st_size
        if num_bytes > max_bytes:
            raise InputRefused(f"input={input_name}: has more than {max_bytes} bytes (max_file_bytes)")
        for suffix in ("", "-wal", "-shm"):
            data_dir.database.with_name(data_dir.database.name + suffix).unlink(missing_ok=True)
        data_dir.remove_content(INPUT_ID)
        with open_store(root, PRIVATE_OWNER) as store:
            new = new_batch(endpoint, INPUT_ID, window, window_seconds(window))
            batch = store.database.submit(lambda connection: add_batch(connection, new)).result()
            part: list[NewLine] = []
            num_lines = 0

            def add_part() -> None:
                seeds = [secrets.randbits(64) for _ in part]
                store.database.submit(lambda connection: add_lines(connection, batch.number, part, seeds)).result()
                part.clear()

            def add(custom_id: str, start: int, size: int) -> None:
                nonlocal num_lines
                part.append(NewLine(num_lines, custom_id, start, size))
                num_lines += 1
                if len(part) == _LINES_PER_TRANSACTION:
                    add_part()

            check_input(input_path, endpoint, limits, input_name, add)
            add_part()
            link_input(root, input_path)
            file = FileRecord(INPUT_ID, "batch", input_path.name, num_bytes, now)
            store.database.submit(lambda connection: add_file(connection, file)).result()
            start = functools.partial(start_batch, number=batch.number, num_lines=num_lines, now=now)
            return store.database.submit(start).result().id
    except StoreError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{error.filename or root}: {error.strerror}") from None


def link_input(root: Path, input_path: Path) -> None:
    """The server reads the input where it lies: the file in its data directory is a link. Raises OSError."""
    link = DataDir(root).content_path(INPUT_ID)
    link.unlink(missing_ok=True)
    link.symlink_to(input_path.resolve())


class OwnBatch:
    """A batch in the database of the run, which another process runs. Methods raise CommandError."""

    max_pause_s = 1.0
    """Longest time between two looks at the batch."""

    def __init__(self, root: Path, batch_id: str, input_path: Path, expected: Fingerprint) -> None:
        """expected: of the input."""
        self._id = batch_id
        self._input = input_path
        self._expected = expected
        self._input_version = self._version_of_input()
        self._server: OwnServer | None = None
        if fingerprint(input_path) != expected:
            raise self._input_changed()
        try:
            link_input(root, input_path)
            self._connection = open_connection(DataDir(root).database, can_write=False)
        except OSError as error:
            raise CommandError(f"{root}: {error.strerror}") from None
        except apsw.Error as error:
            raise CommandError(str(explain(error))) from None
        self._number = self.record().number

    def close(self) -> None:
        self._connection.close()

    def run_by(self, server: OwnServer) -> None:
        """server: runs the lines, from now on."""
        self._server = server

    def record(self) -> BatchRecord:
        record = self._read(lambda connection: get_batch(connection, self._id))
        if record is None:
            raise CommandError(f"the batch {self._id} is not in the database any more")
        return record

    def view(self) -> BatchView:
        """The batch as it is now."""
        record = self.record()
        tokens = None if self._server is None else self._server.tokens
        return BatchView(
            id=record.id,
            status=record.status,
            num_lines=record.num_lines,
            num_completed=record.num_completed,
            num_failed=record.num_failed,
            output_tokens=record.output_tokens,
            errors=[] if record.errors is None else orjson.loads(record.errors),
            has_results=record.num_completed + record.num_failed > 0,
            completion_window=record.completion_window,
            num_generated=max(record.output_tokens, 0 if tokens is None else tokens.num_generated),
            num_expected=None if tokens is None else tokens.num_expected,
            time_left=None if tokens is None else tokens.time_left,
            tells_progress=True,
            problem=tokens.problem if tokens is not None and record.status == "in_progress" else "",
        )

    def wait(self, seconds: float) -> None:
        """Wait, as `Batch.wait`; also raises CommandError if the server ends, or if somebody changes the input."""
        assert self._server is not None
        self._server.wait(seconds)
        version = self._version_of_input()
        if version != self._input_version:
            # the server still reads a file that another one has replaced, but none that was written to
            if version[0] == self._input_version[0] or fingerprint(self._input) != self._expected:
                raise self._input_changed()
            self._input_version = version

    def read_results(self, first: int) -> list[bytes]:
        """Results from line `first` on; a `ReadResults`."""
        number = self._number
        return self._read(lambda connection: first_results(connection, number, first, _MAX_BYTES_PER_READ))

    @contextmanager
    def results(self, batch: BatchView, so_far: ResultsSoFar, _name: Path) -> Iterator[OutputFile]:
        """All results, in the order of the input: what there is so far, and the rest. Raises OSError."""
        yield so_far.complete(self.read_results, batch.num_lines)

    def _input_changed(self) -> CommandError:
        return CommandError(f"input={self._input}: was changed while the batch ran")

    def _version_of_input(self) -> tuple[int, int, int]:
        """(which file it is, its size, when it was changed last)"""
        try:
            status = self._input.stat()
        except OSError as error:
            raise CommandError(f"input={self._input}: {error.strerror}") from None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _read(self, operation: Callable[[apsw.Connection], Result]) -> Result:
        try:
            with self._connection:
                result = operation(self._connection)
        except apsw.Error as error:
            raise CommandError(str(explain(error))) from None
        return result


class OwnServer:
    """Processes that run the batches of a data directory, within the context."""

    def __init__(self, words: list[str], data_dir: Path, drain_s: float, show: Callable[[str], None]) -> None:
        """words: flags. show: shows the user a line; another thread calls it for the processes' logs."""
        self._data_dir = data_dir
        self._drain_s = drain_s
        self._show = show
        self._server = PrivateServer([*words, f"data_dir={data_dir}"], show, stop_s=drain_s + STOP_S)

    def __enter__(self) -> OwnServer:
        """Returns when the model is loaded. Raises CommandError."""
        self._wait_until_free()
        self._server.start()
        try:
            self._server.wait_until_serving()
        except BaseException as error:
            self._server.stop()
            if isinstance(error, ServerEnded):
                raise CommandError(f"the server did not start: {error}", error.exit_code) from None
            raise
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Stopped) and self._drain_s:
            self._show(
                f"stopping: lines that run may take {self._drain_s:g} s to end, the tokens of the others are kept; "
                "Ctrl-C again kills"
            )
        self._server.stop()

    @property
    def totals(self) -> ServerTotals | None:
        """What it has done, once it was stopped; None if it was killed."""
        return self._server.totals

    @property
    def model(self) -> str:
        """Name of the model that it serves."""
        return self._server.model

    @property
    def tokens(self) -> BatchTokens | None:
        """How far the lines are; None until the server has told."""
        return self._server.tokens

    def wait(self, seconds: float) -> None:
        """Raises CommandError if the server ends meanwhile."""
        try:
            self._server.wait(seconds)
        except ServerEnded as ended:
            raise CommandError(f"the server has ended: {ended}") from None

    def _wait_until_free(self) -> None:
        """Wait for the processes of a run that was killed a moment ago. Raises CommandError."""
        deadline = time.monotonic() + _FREE_S
        data_dir = DataDir(self._data_dir)
        while True:
            try:
                data_dir.open("toka batch, which starts a server")
            except DataDirInUse as error:
                if time.monotonic() >= deadline:
                    raise CommandError(str(error)) from None
                time.sleep(0.1)
            except StoreError as error:
                raise CommandError(str(error)) from None
            else:
                data_dir.close()
                return
