"""The list of clients in docs/clients.md, made from the sets of clients and what tests have recorded of them.

`python -m tests.clients.table` writes it into the page, after a change of words. `make test-clients RECORD=1` records
versions and days, and writes it too.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from tests.clients.environments import ENVIRONMENTS

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
RECORDS = Path(__file__).with_name("recorded.json")
_HEADER = "Client, versions (tested on): what is tested.\n\n"
_TABLE = re.compile(re.escape(_HEADER) + r"(- .*\n)*")


class Record(TypedDict):
    """Of one environment whose tests passed."""

    day: str
    """As 2026-11-28."""
    versions: dict[str, str]
    """Package -> the version that was installed, for each of the environment's clients."""


def read_records() -> dict[str, Record]:
    """Environment -> its record."""
    records: dict[str, Record] = json.loads(RECORDS.read_text())
    return records


def table(records: Mapping[str, Record]) -> str:
    """One row for each client and what is tested of it, with dashes where nothing is recorded of it.

    Environments that test the same of a client share a row, with the oldest of their days."""
    rows: dict[tuple[str, str], list[Record]] = {}
    for environment in ENVIRONMENTS:
        node = {package.rpartition("@")[0] for package in environment.npm_packages}
        for package, tested in environment.clients.items():
            shown = f"{package} for Node" if package in node else package
            entries = rows.setdefault((shown, tested), [])
            if record := records.get(environment.name):
                entries.append({"day": record["day"], "versions": {shown: record["versions"][package]}})
    lines = []
    for (client, tested), entries in sorted(rows.items(), key=lambda row: row[0][0].lstrip("@")):
        versions = sorted({entry["versions"][client] for entry in entries}, key=_numbers)
        day = min((entry["day"] for entry in entries), default="–")
        lines.append(f"- {client} {', '.join(versions) or '–'} ({day}): {tested}\n")
    return _HEADER + "".join(lines)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def shown_table() -> str:
    """The table that the page has."""
    found = _TABLE.search(PAGE.read_text())
    assert found is not None, f"{PAGE} has no table that starts with {_HEADER!r}"
    return found.group()


def write_table() -> None:
    """Puts the table of all records into the page."""
    PAGE.write_text(PAGE.read_text().replace(shown_table(), table(read_records())))


if __name__ == "__main__":
    write_table()
