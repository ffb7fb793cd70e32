"""Shows each row as soon as it is measured."""

from tests.torture.helpers.rows import Row


def add_row(rows: list[Row], part: str, what: str, measured: str, limit: str, passed: bool) -> None:
    """Appends the row to `rows` and prints it."""
    rows.append(Row(part, what, measured, limit, passed))
    print(f"{'pass' if passed else 'FAIL'}  {part}: {what}: {measured} (limit: {limit})", flush=True)
