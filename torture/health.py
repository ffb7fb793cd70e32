"""/health under the largest requests, at their full size: the longest time that it takes.

`python -m torture.health` prints the table. The engine behind the server is scripted.
"""

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.helpers.small_tokenizer import save_small_tokenizer
from tests.server.http.helpers.health_loads import LOADS, make_engine, many_choices
from tests.server.http.helpers.server_process import probing_health, server_process
from torture.rows import Row, add_row, print_table

LIMIT_S = 0.25
NUM_STREAMS = 5
MIN_PROBES = 4


def five_streams_at_once(http: httpx.Client, share: float) -> None:
    """Each of 65,536 choices."""
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        for stream in [pool.submit(many_choices, http, share) for _ in range(NUM_STREAMS)]:
            stream.result()


def run_health() -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        directory = save_small_tokenizer(Path(folder))
        with server_process(directory, make_engine()) as http:
            for load in [*LOADS, five_streams_at_once]:
                started = time.perf_counter()
                wrong = ""
                with probing_health(http) as health:
                    try:
                        while not wrong and len(health.seconds) < MIN_PROBES:  # a fast machine ends a load at once
                            load(http, 1.0)
                    except (AssertionError, httpx.HTTPError, LookupError, ValueError) as error:
                        wrong = f"; {type(error).__name__} {error}"
                name = load.__name__.replace("_", " ")
                shown = str(health) if health.seconds else "/health did not answer"
                measured = f"{shown}, {len(health.seconds)} times in {time.perf_counter() - started:.0f} s{wrong}"
                is_quick = len(health.seconds) >= MIN_PROBES and max(health.seconds) < LIMIT_S
                add_row(rows, "health", name, measured, f"{1000 * LIMIT_S:.0f} ms", is_quick and not wrong)
    return rows


if __name__ == "__main__":
    found = run_health()
    print_table(found)
    sys.exit(0 if all(row.passed for row in found) else 1)
