"""Shows each row as soon as it is measured."""

from tests.torture.helpers.rows import Row


def add_row(rows: list[Row], part: str, what: str, measured: str, limit: str, passed: bool) -> None:
    """Appends the row to `rows` and prints it."""
    rows += show_rows([Row(part, what, measured, limit, passed)])


def show_rows(rows: list[Row]) -> list[Row]:
    """Prints and returns the rows."""
    for row in rows:
        verdict = "pass" if row.passed else "FAIL"
        print(f"{verdict}  {row.part}: {row.what}: {row.measured} (limit: {row.limit})", flush=True)
    return rows
