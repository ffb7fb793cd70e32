"""Limits of files and batches, and how long they are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig

DAY_SECONDS = 86_400


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Each field but the last two has the name, the default and the meaning of a flag."""

    max_file_bytes: int = 200 << 20
    """Bytes of an uploaded file."""
    max_batch_lines: int = 50_000
    """Lines of a batch's input file."""
    max_line_bytes: int = 16 << 20
    """Bytes of one of them."""
    keep_days: int = 30
    """Days after which files and finished batches are removed."""
    max_sequences_in_engine: int = 2048
    """Sequences of batches that the engine may have; a line more may begin."""
    max_running_batches: int = 64
    """Batches whose lines run together, each with an open file; others wait for their turn, in the order of arrival."""


def batch_limits(config: ServerConfig) -> BatchLimits:
    """The limits that the flags set."""
    return BatchLimits(
        max_file_bytes=config.max_file_bytes,
        max_batch_lines=config.max_batch_lines,
        max_line_bytes=config.max_line_bytes,
        keep_days=config.keep_days,
        # more wait than run, so that the engine always has one to admit, however short the answers are
        max_sequences_in_engine=2 * config.max_seqs_per_forward * config.dp_size + 256,
    )
