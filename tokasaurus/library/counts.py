"""How far a call is, in numbers, and why rows of it failed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MAX_PRINTED_REASONS = 10
_MAX_REASON_CHARS = 200


class Failures:
    """Why rows or lines failed, and how many of each reason."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._messages: dict[str, str] = {}
        """The first message of each reason."""
        self._num_told = 0

    def add(self, code: str, message: str) -> None:
        """code: a word for the reason; the message itself if there is none."""
        reason = code[:_MAX_REASON_CHARS]
        self._counts[reason] += 1
        if reason not in self._messages:
            self._messages[reason] = " ".join(message.split())[:_MAX_REASON_CHARS]

    def new_reasons(self) -> list[str]:
        """`context_length_exceeded: …` for each reason that has come up since the last call."""
        new = list(self._messages.items())[self._num_told : MAX_PRINTED_REASONS]
        self._num_told += len(new)
        return [reason if message == reason else f"{reason}: {message}" for reason, message in new]

    def total(self) -> int:
        return self._counts.total()

    def reasons(self, max_reasons: int = MAX_PRINTED_REASONS) -> list[str]:
        """`3 x context_length_exceeded: …` for each reason with its first message, the most frequent first."""
        reasons = [
            f"{count:,} x {reason}" + ("" if self._messages[reason] == reason else f": {self._messages[reason]}")
            for reason, count in self._counts.most_common(max_reasons)
        ]
        if len(self._counts) > max_reasons:
            reasons.append(f"{len(self._counts) - max_reasons} more reasons")
        return reasons

    def summary(self, num_rows: int) -> str:
        """`3 of 100 prompts failed: 2 x context_length_exceeded: …; 1 x bad_prompt: …`"""
        prompts = "1 prompt" if num_rows == 1 else f"{num_rows:,} prompts"
        return f"{self.total():,} of {prompts} failed: {'; '.join(self.reasons(3))}"

    def lines(self) -> list[str]:
        """`failed: 3 x context_length_exceeded: …` and so on."""
        return [f"failed: {reason}" for reason in self.reasons()]


@dataclass(slots=True)
class Counts:
    """How far a call is."""

    num_rows: int = 0
    """Read so far."""
    num_skipped: int = 0
    num_finished: int = 0
    """Finished rows; skipped rows do not count."""
    num_errors: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    failures: Failures = field(default_factory=Failures)
    """Why rows failed."""
