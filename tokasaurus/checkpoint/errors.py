"""The error type of this package."""

from tokasaurus.messages.lifecycle import UserError


class CheckpointError(UserError):
    """A model cannot be found, downloaded, read or run. The message is one line for the user."""
