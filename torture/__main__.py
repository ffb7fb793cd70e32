"""`python -m torture [PART…] [--soak MINUTES]`: what the server must survive, measured.

Without names, all parts but the soak run, in about half an hour. Prints each row when it is known, and a Markdown table
at the end; the exit code is 1 if any check did not pass.
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable

from torture import (
    batches,
    connections,
    deaths,
    drain,
    health,
    limits,
    maps,
    numerics,
    replicas,
    soak,
    updates,
)
from torture.fuzz import fuzz_bodies, fuzz_checkpoints
from torture.fuzz.reports import Report
from torture.rows import Row, print_table, show_rows

NUM_FUZZ_CASES = 10_000
PARTS: dict[str, Callable[[], list[Row]]] = {
    "fuzz_checkpoints": lambda: _run_fuzzer("fuzz_checkpoints", fuzz_checkpoints.run),
    "fuzz_bodies": lambda: _run_fuzzer("fuzz_bodies", fuzz_bodies.run),
    "limits": limits.run_limits,
    "connections": connections.run_connections,
    "health": health.run_health,
    "numerics": numerics.run_numerics,
    "drain": drain.run_drain,
    "stops": deaths.run_stops,
    "deaths": deaths.run_deaths,
    "replicas": replicas.run_replicas,
    "batches": batches.run_batches,
    "maps": maps.run_maps,
    "updates": updates.run_updates,
}


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m torture")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}; none: all of them")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="the soak, and the parts that are named")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part: {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    names = arguments.parts or ([] if arguments.soak else PARTS)
    runs = [(name, PARTS[name]) for name in names]
    if arguments.soak:
        runs.append(("soak", lambda: soak.run_soak(arguments.soak)))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_DATA_HOME"] = directory  # servers keep their files and batches apart from the user's
        for name, run in runs:
            rows += _run_part(name, run)
    print()
    print_table(rows)
    return 0 if rows and all(row.passed for row in rows) else 1


def _run_part(name: str, run: Callable[[], list[Row]]) -> list[Row]:
    """The part's rows. A part that raises has a single row, which did not pass."""
    started_s = time.monotonic()
    try:
        rows = run()
    except Exception as error:
        traceback.print_exc()
        rows = show_rows([Row(name, "to its end", f"{type(error).__name__}: {error}"[:200], "no exception", False)])
    print(f"{name}: {time.monotonic() - started_s:.0f} s", flush=True)
    return rows


def _run_fuzzer(name: str, run: Callable[[int], Report]) -> list[Row]:
    started_s = time.monotonic()
    report = run(NUM_FUZZ_CASES)
    report.show(time.monotonic() - started_s)
    num_faults = len(report.faults)
    what = f"{report.num_cases:,} damaged or mutated cases: tracebacks, hangs, wrong answers"
    passed = num_faults == 0 and report.num_cases >= NUM_FUZZ_CASES
    return show_rows([Row(name, what, str(num_faults), "0", passed)])


if __name__ == "__main__":
    sys.exit(main())
