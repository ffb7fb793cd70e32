"""An input that can be read only once, such as a pipe: it is copied to a file, which lies beside the run's state."""

import os
import stat
import sys
from pathlib import Path

from tokasaurus.batch_command.errors import CommandError
from tokasaurus.batch_command.input_file import Fingerprint, fingerprint
from tokasaurus.batch_command.state_file import RunState, StateFile

_STANDARD_INPUT = ("-", "/dev/stdin")


def is_stream(name: str) -> bool:
    """Whether the input can be read only once: standard input (-), a pipe, a terminal, a socket."""
    if name in _STANDARD_INPUT or name.startswith("/dev/fd/"):
        return True
    try:
        mode = Path(name).stat().st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)


def copy_input(name: str, state_file: StateFile, stored: RunState | None, max_bytes: int | None) -> Fingerprint:
    """Copy the input to `state_file.input_copy`: results are put in its order, and a later run can continue with it.

    stored: the state of the last run. max_bytes: None for no limit. Raises CommandError, also if that run had another
    input; if there was none, nothing is left.
    """
    copy = state_file.input_copy
    new_copy = copy.with_name(f"{copy.name}.part")
    is_begun = stored is not None and stored.file_id is not None
    try:
        found = _copy(name, new_copy, max_bytes)
        if is_begun and stored is not None and found != stored.input:
            what = "is empty" if found.num_bytes == 0 else "is not what its batch was begun with"
            kept = f"input={copy} continues with the copy" if copy.exists() else "give it the same input"
            raise CommandError(f"input={name}: {what}: {kept}, or delete {state_file.to_delete} to begin again")
        if found.num_bytes == 0:
            raise CommandError(f"input={name}: is empty")
        new_copy.replace(copy)
    except BaseException:
        new_copy.unlink(missing_ok=True)
        if not is_begun:
            state_file.remove()
        raise
    return found


def _copy(name: str, destination: Path, max_bytes: int | None) -> Fingerprint:
    """Copy up to the input's end; the copy is on the disk. Raises CommandError."""
    num_bytes = 0
    if name in _STANDARD_INPUT and sys.stdin is None:  # the descriptor is another file's meanwhile
        raise CommandError(f"input={name}: standard input is closed")
    try:
        # Opened again by its name, a socket could not be read, and on some systems no pipe either.
        source = 0 if name in _STANDARD_INPUT else os.open(name, os.O_RDONLY)
        with os.fdopen(source, "rb", closefd=source != 0) as stream, destination.open("wb") as copy:
            while part := stream.read(1 << 20):
                num_bytes += len(part)
                if max_bytes is not None and num_bytes > max_bytes:
                    raise CommandError(f"input={name}: has more than {max_bytes} bytes (max_file_bytes)")
                copy.write(part)
            copy.flush()
            os.fsync(copy.fileno())
    except OSError as error:
        raise CommandError(f"input={name}: {error.strerror}") from None
    return fingerprint(destination)
