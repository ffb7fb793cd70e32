"""A transport that closes so that the client can read the last answer, and what the kernel knows of its peer."""

import asyncio
import select
import socket
import struct
from typing import Any

# Offset of tcpi_bytes_acked (u64) in Linux's struct tcp_info.
_BYTES_ACKED_OFFSET = 120


class LingeringTransport(asyncio.Transport):
    """Passes everything on to a transport, but lets `close` linger while the client is sending.

    A socket that is closed with unread input resets the connection, and the client may lose the answer to what it is
    sending. So the sending direction is closed first; whoever owns the transport drops further input, and aborts the
    connection if the client does not close it in time.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._inner = transport
        self.is_client_sending = False
        """Set by the protocol: a request has begun to arrive and is incomplete."""
        self.is_lingering = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.is_lingering:
            self._inner.write(data)

    def close(self) -> None:
        if not self.is_client_sending or self._inner.is_closing():
            self._inner.close()
        elif not self.is_lingering:
            self.is_lingering = True
            self._inner.resume_reading()
            self._inner.write_eof()

    def abort(self) -> None:
        self._inner.abort()

    def is_closing(self) -> bool:
        return self.is_lingering or self._inner.is_closing()

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._inner.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)

    def num_bytes_acked(self) -> int:
        """Bytes that the client's machine has confirmed; where the system does not tell, minus the bytes unsent."""
        try:
            info = self._socket().getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
            return int(struct.unpack_from("Q", info, _BYTES_ACKED_OFFSET)[0])
        except (AttributeError, OSError, struct.error):
            return -self._inner.get_write_buffer_size()

    def is_hung_up(self) -> bool:
        """Whether the connection was reset. A client that closed it normally counts only once it was sent something,
        since only its answer, a reset, tells it from one that is done sending and still reads."""
        poll = select.poll()
        poll.register(self._socket().fileno(), 0)
        return bool(poll.poll(0))

    def _socket(self) -> socket.socket:
        found: socket.socket = self._inner.get_extra_info("socket")
        return found


def watch_for_lost_peers(listener: socket.socket, unread_timeout_s: int) -> None:
    """The kernel will end a connection that `listener` accepts once the client's machine is gone.

    That is two minutes without an answer to probes, or `unread_timeout_s` without confirmation of sent bytes.
    """
    options = [("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)]
    options += [("TCP_USER_TIMEOUT", 1000 * unread_timeout_s)]
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options:
        if hasattr(socket, name):  # Linux has them all
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
