"""What a part of `make torture` found out: one row per check."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One check. measured: the figure with its unit. limit: what it must not exceed or must be."""

    part: str
    what: str
    measured: str
    limit: str
    passed: bool


def print_table(rows: Iterable[Row]) -> None:
    """Prints a Markdown table."""
    print("| part | what | measured | limit | passed |")
    print("|---|---|---|---|---|")
    for row in rows:
        cells = (row.part, row.what, row.measured, row.limit, "yes" if row.passed else "**no**")
        print("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
