"""How many requests the manager accepts in one round, so that a burst does not keep it from sending steps."""

INTAKE_SHARE = 0.25
"""Share of the time for which the worker has work that one round spends on new requests."""

IDLE_SECONDS = 0.005
"""Time for new requests while the worker has no work: their first step should start soon."""

LEAST_MESSAGES = 4
"""Messages accepted in every round: no burst waits for ever. It also bounds what a wrong estimate can do."""

NEW_WEIGHT = 0.1
"""Weight of the newest round in the moving average."""


class Intake:
    """Bounds the requests and cancellations of a round by the time that those before have taken."""

    def __init__(self) -> None:
        self._message_seconds = 1e-4

    def most_messages(self, seconds_left: float, is_idle: bool) -> int:
        """Most messages to accept now. seconds_left: how long the worker is busy with the steps it has.

        is_idle: it has none.
        """
        seconds = IDLE_SECONDS if is_idle else INTAKE_SHARE * seconds_left
        return max(LEAST_MESSAGES, int(seconds / self._message_seconds))

    def note(self, num_messages: int, seconds: float) -> None:
        """To read and queue these messages took `seconds`."""
        if num_messages:
            self._message_seconds += NEW_WEIGHT * (max(1e-6, seconds / num_messages) - self._message_seconds)
