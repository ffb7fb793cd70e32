"""Why `toka batch` cannot go on."""

from tokasaurus.messages.status import UserError


class CommandError(UserError):
    """The message is one line for the user, or one for each bad line of the input."""

    def __init__(self, why: str, exit_code: int = 1) -> None:
        super().__init__(why)
        self.exit_code = exit_code


class NothingToContinue(CommandError):
    """What the run has stored is of no use: it is removed, so that the next run begins again."""


class InputRefused(NothingToContinue):
    """The input cannot be run as it is."""


class NotOnServer(CommandError):
    """The server does not have what the run has stored there."""
