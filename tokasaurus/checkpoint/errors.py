"""The error type of this package."""

from tokasaurus.messages.status import UserError, one_line


class CheckpointError(UserError):
    """A model cannot be found, downloaded, read or run. The message is one line for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))
