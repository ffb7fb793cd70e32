"""kill -9 of a program that maps rows and of its engine, many times: each key once, shards readable at every moment."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import polars
import pyarrow
import pyarrow.parquet

from tests.helpers.limits import join, read_line
from tests.helpers.tiny_model import save_tiny_model
from torture.rows import Row, show_rows

PART = "maps"
NUM_ROWS = 50_000
NUM_KILLS = 20
_ROUND_TIMEOUT_S = 600.0
_END_TIMEOUT_S = 3600.0


class _Reader:
    """Reads all shards again and again, as another program would."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self.num_reads = 0
        self.faults: list[str] = []
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "_Reader":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        join(self._thread)

    def _run(self) -> None:
        most = 0
        while not self._has_ended.wait(0.2):
            shards = sorted(self._output.glob("*.parquet"))
            try:
                num_rows = sum(pyarrow.parquet.read_table(shard).num_rows for shard in shards)
                if shards:
                    num_seen = polars.read_parquet([*shards]).height
                    if num_seen != num_rows:
                        self.faults.append(f"pyarrow reads {num_rows} rows, Polars {num_seen}")
            except Exception as error:
                self.faults.append(f"{type(error).__name__}: {error}")
                continue
            if num_rows < most:
                self.faults.append(f"{num_rows} rows, after {most}")
            most = num_rows
            self.num_reads += 1


def run_maps(num_rows: int = NUM_ROWS, num_kills: int = NUM_KILLS, seed: int = 1) -> list[Row]:
    """Half of the kills are of the program, half of a process of its engine."""
    rng = random.Random(seed)
    victims = ["program", "engine"] * (num_kills // 2)
    rng.shuffle(victims)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        save_tiny_model(directory / "model", "llama")
        rows = {"id": list(range(num_rows)), "text": [f"word {number % 97}" for number in range(num_rows)]}
        pyarrow.parquet.write_table(pyarrow.table(rows), directory / "rows.parquet")
        output, log = directory / "out", directory / "log"
        log.touch()
        began_s = time.monotonic()
        repeats, kills = 0, Counter[str]()
        with _Reader(output) as reader:
            program = _start(directory)
            # evenly over the first nine tenths of the rows, at random within each part
            for number, victim in enumerate(victims):
                _wait_for_rows(log, program, round(0.9 * num_rows * (number + rng.random()) / num_kills))
                if victim == "program":
                    program.kill()
                    program.wait()
                    sent, done = _read(log)
                    repeats += len(sent.keys() - done)
                    program = _start(directory)
                    kills["program"] += 1
                else:
                    name, pid = _process_of_engine(program, rng)
                    os.kill(pid, signal.SIGKILL)
                    kills[name] += 1
            code = program.wait(_END_TIMEOUT_S)
            seconds = time.monotonic() - began_s
            time.sleep(1)
        table = polars.read_parquet([*sorted(output.glob("*.parquet"))])
        sent, _ = _read(log)
    keys = Counter(table["id"].to_list())
    wrong = num_rows - len(keys) + sum(count - 1 for count in keys.values()) + table["error"].count()
    again = sent.total() - num_rows
    listed = ", ".join(f"{name} {count}" for name, count in sorted(kills.items()))
    what = f"map of {num_rows:,} rows, {kills.total()} kills ({listed})"
    faults = "; ".join(reader.faults[:3]) or "0"
    return show_rows(
        [
            Row(PART, f"{what}: keys lost or doubled, rows with errors", str(wrong), "0", wrong == 0 and code == 0),
            Row(PART, "rows sent again", f"{again:,}", f"in flight at the kills: {repeats:,}", again <= repeats),
            Row(PART, f"{reader.num_reads} times all shards by pyarrow and Polars: faults", faults, "0",
                reader.num_reads > 0 and not reader.faults),
            Row(PART, "time, starts included", f"{seconds:.0f} s", "none", True),
        ]
    )  # fmt: skip


def _start(directory: Path) -> subprocess.Popen[str]:
    """Returns when its engine serves."""
    paths = [str(directory / name) for name in ("model", "rows.parquet", "out", "log")]
    command = [sys.executable, "-m", "torture.helpers.map_program", *paths]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    first = read_line(program, program.stdout, _ROUND_TIMEOUT_S)
    assert first == "ready\n", f"the program did not start: {first}"
    return program


def _wait_for_rows(log: Path, program: subprocess.Popen[str], num_rows: int) -> None:
    deadline = time.monotonic() + _ROUND_TIMEOUT_S
    while log.read_bytes().count(b"d ") < num_rows:
        assert program.poll() is None, "the program has ended by itself"
        assert time.monotonic() < deadline, f"{num_rows} rows are not done after {_ROUND_TIMEOUT_S:g} s"
        time.sleep(0.05)


def _read(log: Path) -> tuple[Counter[str], set[str]]:
    """(times that each row was sent, rows that are done) so far. A last line that was cut counts as nothing."""
    events = [line.split() for line in log.read_text().split("\n")[:-1]]
    return Counter(row for kind, row in events if kind == "s"), {row for kind, row in events if kind == "d"}


def _process_of_engine(program: subprocess.Popen[str], rng: random.Random) -> tuple[str, int]:
    """(title, id) of a process of the engine that runs now."""
    launchers = _children(program.pid)
    return rng.choice([*launchers, *(child for _, pid in launchers for child in _children(pid))])


def _children(parent: int) -> list[tuple[str, int]]:
    """(title, id) of its child processes."""
    children = []
    for listing in Path(f"/proc/{parent}/task").glob("*/children"):
        for pid in listing.read_text().split():
            with suppress(FileNotFoundError):  # it has ended
                title = Path(f"/proc/{pid}/comm").read_text().strip()
                children.append((title if title.startswith("toka-") else "launcher", int(pid)))
    return children
