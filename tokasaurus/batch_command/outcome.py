"""What the user is told of a batch that has ended."""

from collections import Counter
from typing import Any

import orjson

from tokasaurus.batch_command.api import BatchView
from tokasaurus.batch_command.errors import InputRefused, NothingToContinue
from tokasaurus.batch_command.input_file import show_errors

MAX_PRINTED_REASONS = 10
_MAX_REASON_CHARS = 200
# Codes of our server for failures that are none of the input's.
_NOT_THE_INPUTS = ("validation_failed", "input_file_missing")


class Outcome:
    """Of the lines of a result file: how many were cut by length, and why others failed."""

    def __init__(self) -> None:
        self.num_cut = 0
        """Lines of which at least one choice ended at max_tokens or at the end of the context."""
        self._reasons: Counter[str] = Counter()
        self._messages: dict[str, str] = {}
        """The first message of each reason."""

    def add(self, line: bytes) -> None:
        """line: a result as OpenAI's batches have it."""
        value = _object(orjson.loads(line))
        response = _object(value.get("response"))
        body = _object(response.get("body"))
        error = _object(value.get("error")) or _object(body.get("error"))
        if not error and response.get("status_code", 200) == 200:
            choices = body.get("choices")
            reasons = [_object(choice).get("finish_reason") for choice in choices] if isinstance(choices, list) else []
            self.num_cut += "length" in reasons
            return
        message = " ".join(str(error.get("message") or f"status {response.get('status_code')}").split())
        reason = str(error.get("code") or error.get("type") or message)[:_MAX_REASON_CHARS]
        self._reasons[reason] += 1
        self._messages.setdefault(reason, message[:_MAX_REASON_CHARS])

    def failures(self) -> list[str]:
        """A line for each reason, the most frequent first, up to MAX_PRINTED_REASONS."""
        lines = [
            f"failed: {count:,} x {reason}"
            + ("" if self._messages[reason] == reason else f": {self._messages[reason]}")
            for reason, count in self._reasons.most_common(MAX_PRINTED_REASONS)
        ]
        if len(self._reasons) > MAX_PRINTED_REASONS:
            lines.append(f"failed: {len(self._reasons) - MAX_PRINTED_REASONS} more reasons")
        return lines


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def why_failed(batch: BatchView) -> NothingToContinue:
    """The error of a failed batch without results: InputRefused if its input is bad."""
    if not batch.errors:
        return NothingToContinue(f"{batch.id} failed, and the server does not say why; run the same command again")
    if all(error.get("code") in _NOT_THE_INPUTS for error in batch.errors):
        reasons = "; ".join(str(error.get("message")) for error in batch.errors)
        return NothingToContinue(f"{batch.id} failed, not by its input: {reasons}; run the same command again")
    errors = [error for error in batch.errors if error.get("code") != "more_errors"]
    heading = f"{batch.id} failed, since its input is bad:"
    return InputRefused(show_errors(heading, errors, len(errors), is_least=len(errors) < len(batch.errors)))
