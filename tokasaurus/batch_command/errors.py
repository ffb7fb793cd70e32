"""Why `toka batch` cannot go on."""


class CommandError(Exception):
    """The message is one line for the user, or one for each bad line of the input."""


class NothingToContinue(CommandError):
    """What the run has stored is of no use: it is removed, so that the next run begins again."""


class InputRefused(NothingToContinue):
    """The input cannot be run as it is."""


class NotOnServer(CommandError):
    """The server does not have what the run has stored there."""
