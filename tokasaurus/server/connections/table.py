"""All open connections: limits their number, and checks their timeouts together once a second."""

from __future__ import annotations

import logging
import resource
from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig

# The web server's logger: its warnings are limited to one line per kind and second.
logger = logging.getLogger("uvicorn.error")

MAX_HEAD_BYTES_IN_ALL = 32 << 20
"""Bytes of all incomplete request lines and headers together."""
MAX_TICK_S = 2.0
"""A sweep counts at most this much: time in which the server itself stood still is not the clients' fault."""


class Connection(Protocol):
    """What the table needs of a connection."""

    def check(self, tick_s: float) -> None:
        """Close the connection if it exceeds a timeout. tick_s: seconds since the last call."""

    def evict(self) -> None:
        """Close the connection at once, in favour of a newer one."""


class ConnectionTable:
    """`config` gives the limits. With max_connections open, a new connection closes one that is waiting.

    The first choice is the connection that has waited longest without having sent a complete request, so clients that
    send none cannot keep others out; the second is the one that has been idle longest between requests.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.max_connections = config.max_connections or _connections_by_open_files()
        self.num_head_bytes = 0
        """Bytes of all incomplete request lines and headers; kept by the connections."""
        self._open: set[Connection] = set()
        self._newcomers: OrderedDict[Connection, None] = OrderedDict()
        self._idle: OrderedDict[Connection, None] = OrderedDict()
        self._swept_at_s: float | None = None

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> bool:
        """False if too many are open and none is waiting: the caller must refuse the connection."""
        has_space = len(self._open) < self.max_connections or self._evict()
        self._open.add(connection)
        self._newcomers[connection] = None  # a refused one, too: it is closed first
        return has_space

    def remove(self, connection: Connection) -> None:
        self._open.discard(connection)
        self.set_busy(connection)

    def set_busy(self, connection: Connection) -> None:
        """The connection has sent a complete request, and is not closed for newer ones until `set_idle`."""
        self._newcomers.pop(connection, None)
        self._idle.pop(connection, None)

    def set_idle(self, connection: Connection) -> None:
        self._newcomers.pop(connection, None)
        self._idle[connection] = None

    def add_head_bytes(self, num_bytes: int) -> None:
        """Count bytes of an incomplete head. Above the limit for all, the connections waiting longest are closed."""
        self.num_head_bytes += num_bytes
        while self.num_head_bytes > MAX_HEAD_BYTES_IN_ALL and self._evict():
            pass

    def sweep(self, now_s: float) -> None:
        """Check every connection's timeouts. now_s: by a monotonic clock."""
        tick_s = 0.0 if self._swept_at_s is None else min(now_s - self._swept_at_s, MAX_TICK_S)
        self._swept_at_s = now_s
        for connection in list(self._open):
            connection.check(tick_s)

    def _evict(self) -> bool:
        for group in (self._newcomers, self._idle):
            if group:
                victim, _ = group.popitem(last=False)
                self._open.discard(victim)
                logger.warning("closed a waiting connection for a newer one: %d are open", len(self._open))
                victim.evict()
                return True
        return False


def _connections_by_open_files() -> int:
    """The limit of open files, less a reserve for other files and for connections that are just being closed."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, limit - max(128, min(limit // 4, 4608)))
