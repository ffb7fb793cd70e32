"""What a run must remember to continue after a crash: a small file, which one process at a time holds."""

import fcntl
import os
import secrets
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import orjson

from tokasaurus.commands.batch.errors import CommandError
from tokasaurus.commands.batch.input_file import Fingerprint
from tokasaurus.files import publish

# What a server and a run put into the directory of a run that has its own server.
_IN_DIRECTORY = ("lock", "database.sqlite", "database.sqlite-wal", "database.sqlite-shm", "files")
_COPY_NAME = "input.jsonl"
STATE_NAME = "run.json"


@dataclass(frozen=True, slots=True)
class RunState:
    """The input, and what is done."""

    input_bytes: int
    input_sha256: str
    base_url: str | None = None
    """None for a server of the run's own."""
    completion_window: str | None = None
    """The flag; once the input is uploaded, the batch's window."""
    file_id: str | None = None
    """None until the input is uploaded."""
    batch_id: str | None = None
    """None until the server has confirmed the batch."""
    output_sha256: str | None = None
    """Checksum of the complete output; None until it is written."""
    exit_code: int = 0
    """Of the run that has written the output."""

    @property
    def input(self) -> Fingerprint:
        return Fingerprint(self.input_bytes, self.input_sha256)


def directory_of_run(output: Path) -> Path:
    """The data directory of a run that has its own server."""
    return output.with_name(output.name + ".toka")


def path_of_results_so_far(output: Path) -> Path:
    """Readable while a run goes on; see ResultsSoFar."""
    return output.with_name(output.name + ".toka.partial")


def path_with_base_url(output: Path) -> Path:
    """The state of a run that uses a running server."""
    return output.with_name(output.name + ".toka.json")


def path_with_own_server(output: Path) -> Path:
    return directory_of_run(output) / STATE_NAME


class StateFile:
    """The state of one run, held until `close`. Errors of the file system are CommandErrors."""

    def __init__(self, path: Path) -> None:
        """Creates it if needed, empty. Raises CommandError if another process holds it."""
        self.path = path
        self._is_in_directory = path.name == STATE_NAME
        try:
            if self._is_in_directory:
                path.parent.mkdir(mode=0o700, exist_ok=True)
            self._file = _hold(path)
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror}") from None

    @property
    def to_delete(self) -> Path:
        """What the user deletes to begin again."""
        return self.path.parent if self._is_in_directory else self.path

    @property
    def input_copy(self) -> Path:
        """Where the copy of an input lies that can be read only once."""
        if self._is_in_directory:
            return self.path.with_name(_COPY_NAME)
        return self.path.with_name(f"{self.path.name.removesuffix('.json')}.{_COPY_NAME}")

    def read(self) -> RunState | None:
        """None if nothing is done."""
        content = self._file.read()
        self._file.seek(0)
        return None if not content else parse_state(content, self.path)

    def save(self, state: RunState) -> None:
        """Replace the stored state. It is on the disk when this returns."""
        temporary = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}.part")
        try:
            file = _create(temporary, os.O_EXCL)
            try:
                file.write(orjson.dumps(asdict(state), option=orjson.OPT_INDENT_2))
                file.flush()
                os.fsync(file.fileno())
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # before it has the name: nobody can be first
                publish(temporary, self.path)
            except BaseException:
                file.close()
                temporary.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise CommandError(f"{self.path}: {error.strerror}") from None
        file.seek(0)
        self._file.close()
        self._file = file

    def remove(self) -> None:
        """Remove all that is stored for the run. The state goes last, so that an interruption does not look new."""
        try:
            self.input_copy.unlink(missing_ok=True)
            if self._is_in_directory:
                for name in _IN_DIRECTORY:
                    stored = self.path.with_name(name)
                    if stored.is_dir():
                        shutil.rmtree(stored)
                    else:
                        stored.unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise CommandError(f"cannot remove {self.path.parent}: {error.strerror}") from None
        if self._is_in_directory:
            with suppress(OSError):  # something of the user's is in it
                self.path.parent.rmdir()

    def close(self) -> None:
        self._file.close()


def parse_state(content: bytes, path: Path) -> RunState:
    """Raises CommandError."""
    try:
        fields = orjson.loads(content)
        for name in ("api_key", "model"):  # of a run that an older version began
            fields.pop(name, None)
        return RunState(**fields)
    except (orjson.JSONDecodeError, TypeError, AttributeError):
        raise CommandError(f"{path} is damaged, or of another version: delete it to begin again") from None


def _hold(path: Path) -> BinaryIO:
    """Raises OSError, and CommandError if another process holds it."""
    while True:
        file = _create(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise CommandError(f"another toka batch is at work on this output (it holds {path})") from None
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        file.close()  # the other process has replaced or removed it meanwhile


def _create(path: Path, flags: int = 0) -> BinaryIO:
    """Readable and writable only for its owner."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600), "r+b")
