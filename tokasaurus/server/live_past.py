"""The last 15 minutes of a server, kept whether somebody watches or not: a few figures every five seconds.

All of them come from what managers and routes have told anyway: no process does anything more for them.
"""

from collections import deque

from tokasaurus.server.protocol.live import LiveMoment
from tokasaurus.text.json_lines import write_json

KEPT_SECONDS = 900.0
SECONDS_BETWEEN = 5.0
"""Between two moments. The page and `toka top` take a pause of more than twice this for a gap."""
_MAX_MOMENTS = round(KEPT_SECONDS / SECONDS_BETWEEN)


class LivePast:
    """Moments as JSON, oldest first: half a kilobyte each for a replica, 90 KB in all."""

    def __init__(self) -> None:
        self._moments: deque[tuple[float, bytes]] = deque(maxlen=_MAX_MOMENTS)
        """(seconds since 1970, JSON)."""

    def add(self, moment: LiveMoment) -> None:
        """If time goes back, the server restarted: earlier samples are dropped."""
        if self._moments and moment["time"] <= self._moments[-1][0]:
            self._moments.clear()
        self._moments.append((moment["time"], write_json(moment)))

    def added_to(self, event: bytes, now: float) -> bytes:
        """The JSON of an event, with the moments of the last KEPT_SECONDS before `now` as its field `past`."""
        moments = (moment for time, moment in self._moments if now - KEPT_SECONDS <= time < now)
        return b'%s,"past":[%s]}' % (event.removesuffix(b"}"), b",".join(moments))
