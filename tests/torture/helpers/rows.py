"""What the parts of `make torture` measured."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    part: str
    what: str
    """What was done."""
    measured: str
    """The figure, with its unit."""
    limit: str
    passed: bool


def print_table(rows: Sequence[Row]) -> None:
    """As Markdown."""
    print("| part | what | measured | limit | passed |")
    print("|---|---|---|---|---|")
    for row in rows:
        cells = (row.part, row.what, row.measured, row.limit, "yes" if row.passed else "NO")
        print("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |", flush=True)
