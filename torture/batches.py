"""kill -9 of every process of a server that runs batches, many times: each line has one result, the right one."""

import random
import tempfile
import time
from pathlib import Path

from tests.end_to_end.helpers.batch_lines import ENDPOINTS
from tests.end_to_end.helpers.killed_batches import VICTIMS, KilledBatches
from tests.helpers.tiny_model import save_tiny_model
from torture.rows import Row, show_rows

PART = "batches"
NUM_LINES = 2000
"""Of each of the two batches."""
NUM_ROUNDS = 5
"""Each process is killed once in each, in a random order."""


def run_batches(num_lines: int = NUM_LINES, num_rounds: int = NUM_ROUNDS, seed: int = 1) -> list[Row]:
    """num_rounds kills of each process, and three at moments of their own: a server that validates, a launcher right
    after the validation, and a server that finalizes."""
    rng = random.Random(seed)
    victims = [victim for _ in range(num_rounds) for victim in rng.sample(VICTIMS, len(VICTIMS))]
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        save_tiny_model(directory / "model", "llama")
        batches = KilledBatches(directory / "model", directory, num_lines, seed)
        batches.prepare()
        began_s = time.monotonic()
        expected = batches.run_undisturbed()
        undisturbed_s = time.monotonic() - began_s
        with batches.killed_run(victims, kill_at_end=True) as outcome:
            killed_s = time.monotonic() - began_s - undisturbed_s
        faults = batches.find_faults(outcome, expected)
        integrity = batches.integrity()
    for fault in faults[:20]:
        print(f"{PART}: {fault[:500]}")
    results = [result for results in outcome.results for result in results]
    num_ids = sum(len({result["custom_id"] for result in results}) for results in outcome.results)
    num_all = len(ENDPOINTS) * num_lines
    kills = ", ".join(f"{name} {count}" for name, count in sorted(batches.kills.items()))
    what = f"two batches of {num_lines:,} lines, {batches.kills.total()} kills ({kills}), {batches.num_starts} starts"
    usage = sum(batch["usage"]["total_tokens"] for batch in outcome.batches)
    times = f"{killed_s:.0f} s; undisturbed {undisturbed_s:.0f} s"
    return show_rows(
        [
            Row(PART, f"{what}: wrong, lost or doubled results, usage or counts", str(len(faults)), "0", not faults),
            Row(PART, "results; distinct custom_ids", f"{len(results)}; {num_ids}", f"{num_all} each",
                len(results) == num_ids == num_all),
            Row(PART, "tokens in the usage, equal to the sum over the results", f"{usage:,}", "equal", not faults),
            Row(PART, "PRAGMA integrity_check", integrity, "ok", integrity == "ok"),
            Row(PART, "time, starts included", times, "none", True),
        ]
    )  # fmt: skip
