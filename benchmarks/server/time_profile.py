"""Divides the wall time of a run into parts, by the server's own counters.

`python -m benchmarks.server.time_profile workload=monkeys` takes the flags of `toka bench`. It works only with this
server, which must have no other load.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.results import make_console
from benchmarks.server.target import read_counters
from tokasaurus.commands.bench.client import ServerError
from tokasaurus.commands.bench.config import BenchConfig
from tokasaurus.commands.bench.measure import Run, measure, requests_of
from tokasaurus.commands.bench.results import print_error
from tokasaurus.commands.bench.run import api_url, print_run
from tokasaurus.commands.running_server import url_of_server
from tokasaurus.flags import FlagError

PHASES = {
    "gemm": "gemms, with norms, gates and sums",
    "prefix_attention": "attention to shared prefixes",
    "attention": "all other attention",
    "heads": "rotary embedding, writing keys and values",
    "sampling": "sampling",
}
OVERHEAD = "worker, outside its kernels"
WAITING = "worker between steps: no input, or nothing to do"


@dataclass(frozen=True, slots=True)
class Profile:
    """Parts of the wall time of one run, and CPU time of the other processes."""

    wall_s: float
    seconds: dict[str, float]
    """Wall seconds by part; they add up to `wall_s`."""
    beside_cpu_s: dict[str, float]
    """CPU seconds of the processes that run beside the worker, by name."""

    @property
    def share_outside_kernels(self) -> float:
        """Share of the wall time in which the worker runs no kernel, from 0 to 1."""
        return (self.seconds[OVERHEAD] + self.seconds[WAITING]) / self.wall_s


def make_profile(
    before: Mapping[tuple[str, str], float], after: Mapping[tuple[str, str], float], wall_s: float, client_cpu_s: float
) -> Profile:
    """Differences of the counters. Raises ServerError if the server lacks a counter."""

    def spent(name: str, phase: str = "") -> float:
        if (name, phase) not in after:
            raise ServerError(f"the server has no counter {name}{f' of phase {phase}' if phase else ''}")
        return after[name, phase] - before.get((name, phase), 0.0)

    seconds = {label: spent("toka_forward_phase_seconds_total", phase) for phase, label in PHASES.items()}
    forward_s = spent("toka_forward_seconds_total")
    seconds[OVERHEAD] = forward_s - sum(seconds.values())
    seconds[WAITING] = wall_s - forward_s
    beside = {name: spent(f"toka_{name}_cpu_seconds_total") for name in ("manager", "server")}
    return Profile(wall_s, seconds, {**beside, "this client": client_cpu_s})


def print_profile(profile: Profile, console: Console) -> None:
    table = Table("part", "s", "%", title="Where the wall time goes", title_justify="left")
    for name, spent in profile.seconds.items():
        table.add_row(name, f"{spent:.2f}", f"{100 * spent / profile.wall_s:.1f}")
    table.add_section()
    table.add_row("wall time", f"{profile.wall_s:.2f}", "100.0")
    table.add_row("of which outside kernels", "", f"{100 * profile.share_outside_kernels:.1f}")
    table.add_section()
    for name, spent in profile.beside_cpu_s.items():
        table.add_row(f"beside the worker: CPU time of {name}", f"{spent:.2f}", f"{100 * spent / profile.wall_s:.1f}")
    console.print(table)


async def measure_profile(flags: Sequence[str]) -> tuple[Run, Profile]:
    """Run the load and read the counters before and after. flags: of `toka bench`. Raises ServerError and FlagError."""
    # The counters would include the steps of a warm-up.
    config = BenchConfig.parse(["stream=F", *flags, "warmup=0"])
    base_url = api_url(url_of_server(config))
    requests = requests_of(config, config.seed)
    before = await asyncio.to_thread(read_counters, base_url)
    run = await measure(config, requests, "server", base_url, config.model, config.seed)
    await asyncio.sleep(_SECONDS_TO_COUNT)
    after = await asyncio.to_thread(read_counters, base_url)
    return run, make_profile(before, after, run.summary.wall_s, run.client_cpu_s)


_SECONDS_TO_COUNT = 2.0
"""Wait after the run: counters reach the server up to a second after they change."""


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 if a request failed or no server of this project answered."""
    try:
        run, profile = asyncio.run(measure_profile(argv))
    except (ServerError, FlagError) as error:
        print_error(error)
        return 1
    console = make_console(120)
    print_run(run, console)
    print_profile(profile, console)
    return 1 if run.summary.num_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
