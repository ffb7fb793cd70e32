"""Measures what ranks and pipeline stages cost on a CPU, pinned to cores of their own and not: tokens/s, memory.

`python -m benchmarks.parallelism.costs [--requests 8 --samples 4] [--flags name=value ...]`, Linux only
"""

import argparse
import os
import re
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.server.own_server import OwnServer, child_pids, own_server

MAX_TOKENS = 64
PROMPT = "Once upon a time, there was a number, and it was "


@dataclass(frozen=True)
class Setup:
    """One row of the table."""

    name: str
    flags: tuple[str, ...]
    is_pinned: bool = False
    """Whether each worker is pinned to an equal number of cores of its own."""


@dataclass
class Measured:
    """What the rounds of a setup have shown."""

    tokens_per_s: list[float] = field(default_factory=list)
    worker_mb: list[float] = field(default_factory=list)
    """PSS of each worker in the last round."""
    manager_mb: float = 0.0


SETUPS = (
    Setup("tp_size=1", ()),
    Setup("tp_size=2", ("tp_size=2",)),
    Setup("tp_size=2, pinned", ("tp_size=2",), is_pinned=True),
    Setup("tp_size=3", ("tp_size=3",)),
    Setup("pp_size=2", ("pp_size=2",)),
    Setup("pp_size=2, pinned", ("pp_size=2",), is_pinned=True),
)


def pids_by_title(server: OwnServer) -> dict[str, int]:
    return {Path(f"/proc/{pid}/comm").read_text().strip(): pid for pid in child_pids(server.launcher_pid)}


def pin_workers(server: OwnServer) -> None:
    """All threads of each worker: to its share of the cores that this process may use."""
    workers = [pid for title, pid in sorted(pids_by_title(server).items()) if title.startswith("toka-worker")]
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // len(workers)
    for index, pid in enumerate(workers):
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), cores[index * share : (index + 1) * share])


def pss_mb(pid: int) -> float:
    """Memory of a process, with its share of what several processes have in common."""
    found = re.search(r"^Pss:\s+(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), flags=re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def ask(base_url: str, number: int, num_samples: int) -> int:
    """Tokens of the answer."""
    body = {"model": "default", "prompt": f"{PROMPT}{number}", "n": num_samples, "max_tokens": MAX_TOKENS}
    answer = httpx.post(f"{base_url}/completions", json=body | {"seed": number, "ignore_eos": True}, timeout=600)
    answer.raise_for_status()
    return int(answer.json()["usage"]["completion_tokens"])


def run_round(setup: Setup, flags: Sequence[str], num_requests: int, num_samples: int, measured: Measured) -> None:
    with own_server((*flags, *setup.flags)) as server:
        if setup.is_pinned:
            pin_workers(server)
        ask(server.base_url, num_requests, num_samples)  # the first step of a kind takes longer
        began_s = time.perf_counter()
        with ThreadPoolExecutor(num_requests) as pool:
            answers = pool.map(lambda number: ask(server.base_url, number, num_samples), range(num_requests))
            num_tokens = sum(answers)
        measured.tokens_per_s.append(num_tokens / (time.perf_counter() - began_s))
        pids = pids_by_title(server)
        measured.worker_mb = [pss_mb(pid) for title, pid in sorted(pids.items()) if title.startswith("toka-worker")]
        measured.manager_mb = pss_mb(pids["toka-manager"])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parallelism.costs", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8, help="at once")
    parser.add_argument("--samples", type=int, default=4, help="of each request")
    parser.add_argument("--setups", nargs="*", default=[setup.name for setup in SETUPS], help="some of the rows")
    parser.add_argument("--flags", nargs="*", default=[], help="of the server, such as model=DIRECTORY")
    arguments = parser.parse_args()
    flags = ("device=cpu", "kv_cache_num_tokens=8192", *arguments.flags)
    setups = [setup for setup in SETUPS if setup.name in arguments.setups]
    results = {setup.name: Measured() for setup in setups}
    for _ in range(arguments.rounds):
        for setup in setups:
            run_round(setup, flags, arguments.requests, arguments.samples, results[setup.name])
            print(f"{setup.name}: {results[setup.name].tokens_per_s[-1]:.0f} tokens/s", flush=True)
    print("\n| | tokens/s: median (all rounds) | a worker | the manager |\n|---|---|---|---|")
    for name, measured in results.items():
        rounds = ", ".join(f"{speed:.0f}" for speed in measured.tokens_per_s)
        workers = ", ".join(f"{size:.0f}" for size in measured.worker_mb)
        median = statistics.median(measured.tokens_per_s)
        print(f"| {name} | {median:.0f} ({rounds}) | {workers} MB | {measured.manager_mb:.0f} MB |")


if __name__ == "__main__":
    main()
