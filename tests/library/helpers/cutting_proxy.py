"""A proxy in front of a server that cuts every connection after some bytes of its answers."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit


class CuttingProxy:
    """Passes bytes on in both directions. Each of the first connections is cut after its number of answered bytes."""

    def __init__(self, url: str, cuts: list[int], bytes_per_s: float) -> None:
        """cuts: answered bytes until a connection is cut; later connections are not. bytes_per_s: of requests."""
        self._bytes_per_s = bytes_per_s
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self._cuts = iter(cuts)
        self.num_connections = 0
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._transports: list[asyncio.WriteTransport] = []

    def run(self, is_ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        listener = socket.create_server(("127.0.0.1", 0))
        if self._bytes_per_s < float("inf"):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # else it takes megabytes at once
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, sock=listener))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        is_ready.set()
        self._loop.run_forever()

    def cut(self) -> None:
        """Cuts all connections."""
        self._loop.call_soon_threadsafe(self._cut)

    def stop(self) -> None:
        """Cuts all connections, and takes no more."""
        self._loop.call_soon_threadsafe(self._stop)

    def _cut(self) -> None:
        for transport in self._transports:
            transport.abort()
        self._transports.clear()

    def _stop(self) -> None:
        self._cut()
        if self._server is not None:
            self._server.close()
        self._loop.call_later(0.1, self._loop.stop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        num_left = next(self._cuts, None)
        up_reader, up_writer = await asyncio.open_connection(*self._target)
        self._transports += [writer.transport, up_writer.transport]

        async def pass_on() -> None:
            with suppress(ConnectionError):
                while content := await reader.read(1 << 16):
                    up_writer.write(content)
                    await up_writer.drain()
                    await asyncio.sleep(len(content) / self._bytes_per_s)

        forwarding = asyncio.create_task(pass_on())
        with suppress(ConnectionError):
            while content := await up_reader.read(1 << 12):
                if num_left is not None:
                    content = content[:num_left]
                    num_left -= len(content)
                writer.write(content)
                await writer.drain()
                if num_left == 0:
                    break
        forwarding.cancel()
        for one in (writer, up_writer):
            one.transport.abort()


@contextmanager
def cutting_proxy(url: str, cuts: list[int], bytes_per_s: float = float("inf")) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(url, cuts, bytes_per_s)
    is_ready = threading.Event()
    thread = threading.Thread(target=proxy.run, args=(is_ready,), daemon=True)
    thread.start()
    assert is_ready.wait(10)
    try:
        yield proxy
    finally:
        proxy.stop()
        thread.join(10)
