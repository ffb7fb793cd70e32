"""toka's processes behind a replica of Ray Serve, which ends when they do: Serve starts another replica."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading

from tokasaurus.library.engine import SOCKET_NAME, EngineError, PrivateDirectory
from tokasaurus.processes.private_server import PrivateServer, ServerEnded

logger = logging.getLogger("ray.serve")


class OwnedServer:
    """One start of toka on a Unix socket. Any thread may call a method, one at a time."""

    def __init__(self, words: list[str]) -> None:
        """words: flags, already checked."""
        self._directory = PrivateDirectory()
        self.socket_path = str(self._directory.path / SOCKET_NAME)
        # The replica has no request any more when it is stopped: Serve waits for them.
        flags = ["drain_seconds=0", *words, f"unix_socket={self.socket_path}"]
        self._server = PrivateServer(flags, logger.info, directory=self._directory.path)
        self._is_stopping = False
        self._watch = threading.Thread(target=self._end_with_server, name="engine watch", daemon=True)

    @property
    def kv_cache_tokens(self) -> int:
        """KV cache of all the server's replicas together, in tokens."""
        return self._server.kv_cache_tokens

    def start(self) -> None:
        """Returns when it serves. Raises EngineError."""
        try:
            self._server.start()
            self._server.wait_until_serving()
        except (ServerEnded, OSError, RuntimeError) as error:
            self._directory.remove()
            raise EngineError(f"the engine did not start: {error}") from None
        self._watch.start()

    def stop(self) -> None:
        """End all processes and remove the directory; may be called again."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self._server.end()
        self._watch.join()
        self._server.stop()
        self._directory.remove()

    def end_if_dead(self) -> None:
        """After a lost connection: end this process if toka has ended, since the last of its processes may take a
        while, and the replica would be sent request after request meanwhile."""
        with socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)
            # EAGAIN: many clients wait already.
            if client.connect_ex(self.socket_path) not in (0, errno.EAGAIN):
                self._end("it accepts no connection")

    def _end_with_server(self) -> None:
        self._end(str(self._server.wait_for_end()))

    def _end(self, why: str) -> None:
        if not self._is_stopping:
            logger.error(f"toka: the engine died: {why}; the replica ends with it")
            self._directory.remove()
            os._exit(1)
