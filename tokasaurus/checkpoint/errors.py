"""The error of this room."""

from tokasaurus.messages.lifecycle import UserError


class CheckpointError(UserError):
    """A model cannot be found, fetched, read or run as it is. The message is one line for the user."""
