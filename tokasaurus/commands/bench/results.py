"""What measurements share: facts of the machine, progress bars, and results as JSON."""

import dataclasses
import itertools
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from tokasaurus import __version__
from tokasaurus.files import replace_text

_COLUMNS = 140


def machine_facts(*packages: str) -> dict[str, object]:
    """Facts of this machine, and the versions of this project and of `packages`."""
    cpuinfo = Path("/proc/cpuinfo")
    models = (
        [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")] if cpuinfo.exists() else []
    )
    return {
        "cpu_model": models[0].partition(":")[2].strip() if models else platform.processor(),
        "num_cores": os.cpu_count(),
        "load_average_1min": os.getloadavg()[0],
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "tokasaurus": __version__,
        **{name: version(name) for name in packages},
    }


def utc_now() -> str:
    """UTC time in ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def write_json(path: Path, results: object) -> None:
    """results: of dataclasses, mappings, sequences and plain values."""
    replace_text(path, json.dumps(results, indent=1, default=dataclasses.asdict) + "\n")


def console() -> Console:
    """Standard output, wide enough for tables where it is no terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _COLUMNS)


def print_error(error: object) -> None:
    """One line in red on standard error."""
    Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(description: str, total: float = 1.0, *columns: ProgressColumn) -> Iterator[Callable[[float], None]]:
    """Shows a progress bar on the terminal while the block runs. Yields a function of what is done, up to `total`.

    columns: shown between the bar and the time."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
        refresh_per_second=2,
    ) as progress:
        task = progress.add_task(description, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def counting_bar(description: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar with numbers. Yields a function to call when one more is done."""
    done = itertools.count(1)
    with progress_bar(description, total, MofNCompleteColumn()) as show:
        yield lambda: show(next(done))
