"""What a server leaves behind besides processes: its port, shared memory, temporary files."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Leftovers:
    temporary: Path
    """TMPDIR of the servers."""
    shared_before: frozenset[str]

    def found(self, port: int) -> list[str]:
        """What is there now. port: the server's, which must be free."""
        names = [f"{SHARED_MEMORY}/{name}" for name in shared_memory() - self.shared_before]
        names += [str(path) for path in self.temporary.iterdir()]
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are ending may remain
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                names.append(f"port {port}")
        return names


@contextmanager
def watched_leftovers() -> Iterator[Leftovers]:
    """Servers started inside have an empty TMPDIR of their own."""
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TMPDIR"] = directory
        try:
            yield Leftovers(Path(directory), frozenset(shared_memory()))
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before


def shared_memory() -> set[str]:
    """What no process uses: the semaphores of a server that runs beside are no leftovers."""
    names = {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.exists() else set()
    if not names:
        return names
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended
            names -= {line.rpartition("/")[2] for line in maps.read_text().splitlines() if f" {SHARED_MEMORY}/" in line}
    return names
