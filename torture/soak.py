"""A real server under a dense mixed load for a long time, while its processes are killed again and again.

`python -m torture.soak [MINUTES [SECONDS_BETWEEN_KILLS]]` prints the table.
"""

import asyncio
import itertools
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka
from tests.helpers.tiny_model import save_tiny_model
from torture.helpers.soak_client import REQUEST_LIMIT_S, SoakClient, Tally, repeat
from torture.helpers.soak_loads import LOADS, learn
from torture.process_memory import MB
from torture.process_samples import (
    MAX_GROWTH_BYTES,
    MAX_GROWTH_SHARE,
    MAX_MORE_FILES,
    Samples,
    compare_lives,
    compare_thirds,
)
from torture.rows import Row, add_row, print_table

PART = "soak"
FLAGS = ("dtype=float32", "kv_cache_num_tokens=32768", "max_seqs_per_forward=64", "max_tokens_per_forward=512")
SAMPLE_INTERVAL_S = 10.0
RESTART_LIMIT_S = 60.0
VICTIMS = ("toka-worker-0", "toka-manager")
LAUNCHER, SERVER = "launcher", "toka-server"


async def soak(toka: TokaProcess, minutes: float, kill_every_s: float) -> tuple[Tally, Samples]:
    tally, samples = Tally(), Samples()
    ends_s = time.monotonic() + 60 * minutes
    timeout = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(toka.url, connector=connector, timeout=timeout) as session:
        client = SoakClient(session, tally)
        await learn(client)
        loads = [repeat(load, client, seed, lambda: time.monotonic() >= ends_s) for seed, load in enumerate(LOADS)]
        watchers = [
            asyncio.create_task(_sample(toka, samples)),
            asyncio.create_task(_kill(toka, session, tally, kill_every_s, ends_s)),
        ]
        await asyncio.gather(*loads)
        for watcher in watchers:
            watcher.cancel()
        results = await asyncio.gather(*watchers, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                tally.add_fault(f"{type(result).__name__} {result}")
    return tally, samples


async def _sample(toka: TokaProcess, samples: Samples) -> None:
    began_s = time.monotonic()
    while True:
        at_s = time.monotonic() - began_s
        processes = await asyncio.to_thread(toka.children)
        for title, pid in [(LAUNCHER, toka.process.pid), *processes.items()]:
            samples.add(title, pid, at_s)
        await asyncio.sleep(SAMPLE_INTERVAL_S)


async def _kill(
    toka: TokaProcess, session: aiohttp.ClientSession, tally: Tally, kill_every_s: float, ends_s: float
) -> None:
    """The last life is as long as the others."""
    for victim in itertools.cycle(VICTIMS):
        await asyncio.sleep(kill_every_s)
        if time.monotonic() + kill_every_s / 2 > ends_s:
            return
        tally.killed_s = time.monotonic()
        os.kill(toka.children()[victim], signal.SIGKILL)
        tally.counts["kills"] += 1
        await asyncio.sleep(1)
        while True:
            async with session.get("/ready") as answer:
                if answer.status == 200:
                    break
            if time.monotonic() - tally.killed_s > RESTART_LIMIT_S:
                tally.add_fault(f"not ready {RESTART_LIMIT_S:.0f} s after {victim} was killed")
                break
            await asyncio.sleep(0.2)


def run_soak(minutes: float = 30, kill_every_s: float = 180) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        save_tiny_model(model, "llama")
        with running_toka(f"model={model}", *FLAGS) as toka:
            tally, samples = asyncio.run(soak(toka, minutes, kill_every_s))
            num_restarts = toka.gauge("toka_engine_restarts_total")
            num_left = sum(toka.gauge(f"toka_{name}") for name in ("requests_running", "requests_waiting"))
            num_blocks = toka.gauge("toka_kv_blocks_used")
            _add_memory(rows, samples, minutes, kill_every_s)
            exit_code = toka.stop()
    kills = tally.counts["kills"]
    shown = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in sorted(tally.counts.items()))
    kinds = {load.__name__ for load in LOADS}
    is_whole = not tally.faults and all(tally.counts[kind] for kind in kinds)
    first = f"; first: {tally.faults[0][:300]}" if tally.faults else ""
    add_row(rows, PART, f"answers: {shown}", f"{len(tally.faults)} faults{first}", "0 lost, doubled or wrong", is_whole)
    measured = f"{num_restarts:.0f} restarts after {kills} kills"
    add_row(rows, PART, "kill -9 of worker or manager", measured, "one each", kills > 0 and num_restarts == kills)
    measured = f"{num_left:.0f} sequences, {num_blocks:.0f} KV blocks; exit code {exit_code}"
    add_row(rows, PART, "left at the end", measured, "0; 0", not num_left and not num_blocks and exit_code == 0)
    return rows


def _add_memory(rows: list[Row], samples: Samples, minutes: float, kill_every_s: float) -> None:
    rss_limit = f"growth {MAX_GROWTH_SHARE:.0%} or {MAX_GROWTH_BYTES // MB} MB"
    for title, lives in samples.lives.items():
        all_lives = list(lives.values())
        if title in (LAUNCHER, SERVER):
            comparison = compare_thirds(all_lives[0]) if len(all_lives) == 1 else None
        else:
            comparison = compare_lives(all_lives, kill_every_s - 2 * SAMPLE_INTERVAL_S)
        what = f"{title} in {minutes:g} minutes"
        if comparison is None:
            add_row(rows, PART, f"{what}: memory", f"too few samples, {len(all_lives)} lives", rss_limit, False)
            continue
        measured = f"{comparison.earlier_rss / MB:.0f} MB, then {comparison.later_rss / MB:.0f} MB ({comparison.of})"
        add_row(rows, PART, f"{what}: memory", measured, rss_limit, comparison.is_flat)
        measured = f"{comparison.earlier_files:.0f}, then {comparison.later_files:.0f}"
        limit = f"equal within {MAX_MORE_FILES}"
        add_row(rows, PART, f"{what}: open files", measured, limit, comparison.has_equal_files)


if __name__ == "__main__":
    found = run_soak(*map(float, sys.argv[1:]))
    print_table(found)
    sys.exit(0 if all(row.passed for row in found) else 1)
