"""How far a call is, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


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
