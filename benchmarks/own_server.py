"""Starts a server of this project for one benchmark."""

import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.client import ServerError

_STOP_TIMEOUT_S = 20
_NUM_LINES_KEPT = 20


@contextmanager
def running_server(flags: Sequence[str]) -> Iterator[str]:
    """Run `toka` with these flags on a free port while the block runs.

    Yields its base URL, up to and including /v1, once it is ready. If it does not start, raises ServerError with its
    last lines of output."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "tokasaurus", f"port={port}", "uvicorn_log_level=warning", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            lines = deque[str](maxlen=_NUM_LINES_KEPT)
            while not any(line.startswith("ready:") for line in lines):
                if not (line := process.stdout.readline()):
                    raise ServerError("the server did not start:\n" + "".join(lines))
                lines.append(line)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            try:
                process.communicate(timeout=_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
