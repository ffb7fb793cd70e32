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


def add_row(rows: list[Row], part: str, what: str, measured: str, limit: str, passed: bool) -> None:
    """Appends the row to `rows` and prints it."""
    rows += show_rows([Row(part, what, measured, limit, passed)])


def show_rows(rows: list[Row]) -> list[Row]:
    """Prints and returns the rows."""
    for row in rows:
        verdict = "pass" if row.passed else "FAIL"
        print(f"{verdict}  {row.part}: {row.what}: {row.measured} (limit: {row.limit})", flush=True)
    return rows
