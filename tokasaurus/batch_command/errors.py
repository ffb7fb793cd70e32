"""Why `toka batch` cannot go on."""


class CommandError(Exception):
    """The message is one line for the user, or one for each bad line of the input."""


class InputRefused(CommandError):
    """The input cannot be run as it is: what was stored for it is of no use."""


class NotOnServer(CommandError):
    """The server does not have what the run has stored there."""
