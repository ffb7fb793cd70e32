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
_HEAD_BYTES_KEPT = 0.9
"""Share of them that is left when connections are closed for them: sorting is rare."""
MAX_TICK_S = 2.0
"""A sweep counts at most this much: time in which the server itself stood still is not the clients' fault."""


class Connection(Protocol):
    """What the table needs of a connection."""

    def check(self, tick_s: float) -> None:
        """Close the connection if it exceeds a timeout. tick_s: seconds since the last call."""

    def evict(self) -> None:
        """Close the connection at once, in favour of a newer one."""

    def drop_head(self) -> None:
        """Free the incomplete head's memory, and refuse its request after the answers to earlier ones."""


class ConnectionTable:
    """`config` gives the limits. With as many open as the limit of open files allows, a new connection closes
    one that is waiting.

    The first choice is the connection that has waited longest with no request, or with a request that is incomplete
    although all earlier ones are answered: clients that complete none cannot keep others out. The second is the one
    that has been idle longest between requests.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.max_connections = connections_by_open_files()
        self._num_head_bytes_of: dict[Connection, int] = {}
        """Received of each incomplete head."""
        self._num_head_bytes = 0
        """Their sum."""
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
        self.forget_head(connection)

    def set_busy(self, connection: Connection) -> None:
        """The connection has sent a complete request, and is not closed for newer ones until it waits again."""
        self._newcomers.pop(connection, None)
        self._idle.pop(connection, None)

    def set_idle(self, connection: Connection) -> None:
        """The connection has sent complete requests, and all are answered."""
        self._newcomers.pop(connection, None)
        self._idle[connection] = None

    def set_unfinished(self, connection: Connection) -> None:
        """The rest of a request is missing, and all earlier ones are answered."""
        self._idle.pop(connection, None)
        self._newcomers[connection] = None  # if it was one, it keeps its place

    def add_head_bytes(self, connection: Connection, num_bytes: int) -> int:
        """Count bytes of an incomplete head -> bytes of this head; 0 if the connection was closed.

        Above the limit for all heads, only the connections with the largest ones are closed: waiting connections at
        once, others after their answers.
        """
        self._num_head_bytes += num_bytes
        self._num_head_bytes_of[connection] = self._num_head_bytes_of.get(connection, 0) + num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES_IN_ALL:
            self._evict_largest_heads()
        return self._num_head_bytes_of.get(connection, 0)

    def forget_head(self, connection: Connection) -> None:
        """The head is complete, or not needed any more."""
        self._num_head_bytes -= self._num_head_bytes_of.pop(connection, 0)

    def sweep(self, now_s: float) -> None:
        """Check every connection's timeouts. now_s: by a monotonic clock."""
        tick_s = 0.0 if self._swept_at_s is None else min(now_s - self._swept_at_s, MAX_TICK_S)
        self._swept_at_s = now_s
        for connection in list(self._open):
            connection.check(tick_s)

    def _evict(self) -> bool:
        for group in (self._newcomers, self._idle):
            if group:
                victim = next(iter(group))
                self.remove(victim)
                logger.warning("closed a waiting connection for a newer one: %d are open", len(self._open))
                victim.evict()
                return True
        return False

    def _evict_largest_heads(self) -> None:
        for victim, num_bytes in sorted(self._num_head_bytes_of.items(), key=lambda head: head[1], reverse=True):
            if self._num_head_bytes <= _HEAD_BYTES_KEPT * MAX_HEAD_BYTES_IN_ALL:
                break
            logger.warning("dropped %d bytes of a connection's unfinished headers: all have too many", num_bytes)
            if victim in self._newcomers or victim in self._idle:
                self.remove(victim)
                victim.evict()
            else:
                self.forget_head(victim)
                victim.drop_head()


def connections_by_open_files() -> int:
    """The limit of open files, less a reserve for other files and for connections that are just being closed."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, limit - max(128, min(limit // 4, 4608)))
