"""The server of a run without `base_url=`: toka on a Unix socket in a private directory, with the run's data directory.
It ends with the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tokasaurus.commands.batch.errors import CommandError
from tokasaurus.library.engine import SOCKET_NAME, EngineError, PrivateDirectory
from tokasaurus.messages.status import ServerTotals
from tokasaurus.processes.private_server import STOP_S, PrivateServer, ServerEnded
from tokasaurus.processes.stop_signals import Stopped
from tokasaurus.server.jobs.store.data_dir import DataDir, DataDirInUse, StoreError

# Time for the processes of a run that was killed to end.
_FREE_S = 20.0


class OwnServer:
    """Serves within the context."""

    def __init__(self, words: list[str], data_dir: Path, drain_s: float, show: Callable[[str], None]) -> None:
        """words: flags. show: shows the user a line; another thread calls it for the processes' logs. Raises
        CommandError."""
        self._data_dir = data_dir
        self._drain_s = drain_s
        self._show = show
        try:
            self._directory = PrivateDirectory()
        except EngineError as error:
            raise CommandError(str(error)) from None
        self.socket_path = str(self._directory.path / SOCKET_NAME)
        flags = [*words, f"data_dir={data_dir}", f"unix_socket={self.socket_path}"]
        self._server = PrivateServer(flags, show, directory=self._directory.path, stop_s=drain_s + STOP_S)

    def __enter__(self) -> OwnServer:
        """Returns when the model is loaded. Raises CommandError."""
        try:
            self._wait_until_free()
            self._server.start()
        except BaseException:
            self._directory.remove()
            raise
        try:
            self._server.wait_until_serving()
        except BaseException as error:
            self._stop()
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
        self._stop()

    @property
    def totals(self) -> ServerTotals | None:
        """What it has done, once it was stopped; None if it was killed."""
        return self._server.totals

    @property
    def model(self) -> str:
        """Name of the model that it serves."""
        return self._server.model

    def wait(self, seconds: float) -> None:
        """Raises CommandError if the server ends meanwhile."""
        try:
            self._server.wait(seconds)
        except ServerEnded as ended:
            raise CommandError(f"the server has ended: {ended}") from None

    def _stop(self) -> None:
        try:
            self._server.stop()
        finally:
            self._directory.remove()

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
