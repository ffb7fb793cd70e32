"""Benchmarks how long a fast worker has nothing to do, with a real manager process and each of its measures off.

`python -m benchmarks.manager.fast_worker`
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.manager.__main__ import machine, progress_bar
from benchmarks.manager.fast_device import DeviceSpeed
from benchmarks.manager.fast_worker_process import IdleShare, choose_cores, measure_idle
from tokasaurus.manager.state.engine_state import Tuning

MAX_IDLE_SHARE = 0.03
CHECKED_SEQUENCES = 1024

MEASURES = tuple(field.name for field in dataclasses.fields(Tuning))


def variants(wanted: Sequence[str]) -> dict[str, Tuning]:
    """By name: the manager as it is, without each of the `wanted` measures, and without any measure."""
    found = {"all on": Tuning()}
    found |= {f"{name} off": Tuning(**{name: False}) for name in wanted}
    return found | ({"all off": Tuning(**dict.fromkeys(MEASURES, False))} if wanted else {})


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.manager.fast_worker", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[1024, 4096], metavar="N")
    parser.add_argument(
        "--off", nargs="*", default=list(MEASURES), choices=MEASURES, help="measures to turn off (default: each)"
    )
    parser.add_argument("--step-ms", type=float, default=2.0, help="time of a decode step (default: 2)")
    parser.add_argument("--prefill-ms", type=float, default=60.0, help="time of 8,192 prompt tokens (default: 60)")
    parser.add_argument("--steps-ahead", type=int, metavar="N", help="scheduling_steps_ahead (default: the server's)")
    parser.add_argument("--warm-seconds", type=float, default=8.0, help="time after the batch has filled (default: 8)")
    parser.add_argument("--windows", type=int, default=7, metavar="N", help="measured windows (default: 7)")
    parser.add_argument("--window-seconds", type=float, default=2.0, metavar="S", help="length of one (default: 2)")
    parser.add_argument("--niceness", type=int, default=0, help="of all processes; below 0 only as root (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the limit is missed")
    return parser.parse_args(argv)


def print_table(found: Sequence[IdleShare], console: Console) -> None:
    table = Table(title="Share of time in which the worker has nothing to do (medians over windows)")
    columns = ("sequences", "measures", "idle", "least", "most", "steps/s", "ms a step", "queued", "manager CPU")
    for column in (*columns, "manager waits", "worker stalled"):
        table.add_column(column, justify="left" if column == "measures" else "right")
    for one in found:
        medians, idle = one.medians, [window.idle_share for window in one.windows]
        table.add_row(
            f"{one.num_sequences:,}",
            one.name,
            *(f"{share:.1%}" for share in (medians.idle_share, min(idle), max(idle))),
            f"{medians.steps_per_s:.0f}",
            f"{medians.mean_step_ms:.1f}",
            f"{medians.mean_queued:.1f}",
            *(f"{share:.0%}" for share in (medians.manager_cpu_share, medians.manager_waiting_share)),
            f"{medians.stalled_share:.1%}",
        )
    console.print(table)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 if --check was given and the limit was missed, otherwise 0."""
    args = parse(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    facts, cores = machine(), choose_cores()
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), soft_wrap=True)
    console.print(
        f"The worker's clock spins on core {sorted(cores.worker)}; the manager runs on {sorted(cores.manager)}, "
        f"the requester on {sorted(cores.requester)}" + (": they share it." if cores.are_shared else ".")
    )
    console.print("Load averages: " + ", ".join(f"{load:.1f}" for load in os.getloadavg()))
    speed = DeviceSpeed(args.step_ms / 1e3, args.prefill_ms / 8192e3)
    found = []
    for num_sequences in args.sequences:
        for name, tuning in variants(args.off).items():
            with progress_bar(f"{num_sequences:,} sequences, {name}") as show:
                found.append(
                    measure_idle(
                        *(num_sequences, name, speed, args.niceness),
                        *(args.warm_seconds, args.windows, args.window_seconds, show),
                        steps_ahead=args.steps_ahead,
                        tuning=tuning,
                    )
                )
    print_table(found, console)
    checked = [one for one in found if one.name == "all on" and one.num_sequences == CHECKED_SEQUENCES]
    is_met = all(one.medians.idle_share <= MAX_IDLE_SHARE for one in checked)
    for one in checked:
        console.print(
            f"idle at {one.num_sequences:,} sequences: {one.medians.idle_share:.1%}, limit {MAX_IDLE_SHARE:.0%}: "
            + ("met" if is_met else "not met")
        )
    if args.json is not None:
        config = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        content = {"config": config, "started_at": started_at, "machine": facts, "runs": found, "is_met": is_met}
        args.json.write_text(json.dumps(content, indent=1, default=dataclasses.asdict) + "\n", encoding="utf-8")
    return 0 if is_met or not args.check else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
