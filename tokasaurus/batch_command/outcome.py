"""What the user is told of a batch that has failed."""

from tokasaurus.batch_command.api import BatchView
from tokasaurus.batch_command.errors import InputRefused, NothingToContinue

MAX_PRINTED_ERRORS = 20
# Codes of our server for failures that are none of the input's.
_NOT_THE_INPUTS = ("validation_failed", "input_file_missing")


def why_failed(batch: BatchView) -> NothingToContinue:
    """The error of a failed batch without results: InputRefused if its input is bad."""
    if not batch.errors:
        return NothingToContinue(f"{batch.id} failed, and the server does not say why; run the same command again")
    if all(error.get("code") in _NOT_THE_INPUTS for error in batch.errors):
        reasons = "; ".join(str(error.get("message")) for error in batch.errors)
        return NothingToContinue(f"{batch.id} failed, not by its input: {reasons}; run the same command again")
    return InputRefused(show_errors(batch))


def show_errors(batch: BatchView) -> str:
    """A line for each bad line of the input, up to MAX_PRINTED_ERRORS."""
    errors = [error for error in batch.errors if error.get("code") != "more_errors"]
    lines = [f"{batch.id} failed, since its input is bad:"]
    for error in errors[:MAX_PRINTED_ERRORS]:
        place = "the file" if error.get("line") is None else f"line {error['line']}"
        param = f"{error['param']}: " if error.get("param") else ""
        lines.append(f"{place}: {param}{error.get('message')}")
    if len(errors) > MAX_PRINTED_ERRORS:
        at_least = "at least " if len(errors) < len(batch.errors) else ""
        lines.append(f"and {at_least}{len(errors) - MAX_PRINTED_ERRORS} more")
    return "\n".join(lines)
