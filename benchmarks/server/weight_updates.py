"""How long a server stands still for new weights, and what many updates do to its memory.

`python -m benchmarks.server.weight_updates [--model NAME | --random-1b] [--updates N] [name=value ...]`
Starts a server. While requests run, it gets its own weights again and again.
"""

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import psutil
from rich.table import Table

from benchmarks.results import add_result_arguments, begin_results, end_results, make_console
from benchmarks.server.own_server import OwnServer, own_server
from tests.helpers.tiny_model import family_config, save_random_model
from tokasaurus.checkpoint import resolve_checkpoint
from tokasaurus.commands.bench.client import ServerError
from tokasaurus.commands.bench.results import machine_facts, print_error, progress_bar

NUM_REQUESTS = 64
"""Running all the time."""
MAX_TOKENS = 200
_PAUSE_S = 0.5
"""Between two updates."""
_MODES = ("keep", "abort")
_TIMEOUT = aiohttp.ClientTimeout(1800)


@contextmanager
def checkpoint_of(args: argparse.Namespace) -> Iterator[Path]:
    """The model's directory."""
    if not args.random_1b:
        yield resolve_checkpoint(args.model).directory
        return
    config = family_config("llama", tied=True, vocab_size=128_256, num_layers=16)
    config.hidden_size, config.intermediate_size, config.max_position_embeddings = 2048, 8192, 2048
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 32, 8, 64
    with tempfile.TemporaryDirectory() as name:
        save_random_model(Path(name), config)
        yield Path(name)


class Load:
    """Requests that are sent again as soon as they end, the first one as a stream whose gaps are measured."""

    def __init__(self, base_url: str) -> None:
        self._url = f"{base_url}/completions"
        self.arrivals: list[float] = []
        self.num_ended = 0
        self.num_aborted = 0

    async def run(self, number: int) -> None:
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
            while True:
                await self._ask(session, number)
                self.num_ended += 1

    async def _ask(self, session: aiohttp.ClientSession, number: int) -> None:
        prompt = f"Story {number} of many. Once upon a time"
        body = {"model": "default", "prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True}
        async with session.post(self._url, json=body | {"stream": number == 0}) as answer:
            if answer.status != 200:
                raise ServerError(f"HTTP {answer.status}: {await answer.text()}")
            if number == 0:
                async for line in answer.content:
                    if line.startswith(b"data:"):
                        self.arrivals.append(time.perf_counter())
            else:
                self.num_aborted += (await answer.json())["choices"][0]["finish_reason"] == "abort"

    def longest_gap(self, began_s: float, ended_s: float) -> float:
        """Of the stream, around an update, in seconds; from the last token before it to the first one after it."""
        before = max((one for one in self.arrivals if one <= began_s), default=began_s)
        after = min((one for one in self.arrivals if one >= ended_s), default=ended_s)
        moments = [before, *(one for one in self.arrivals if before < one < after), after]
        return max(later - earlier for earlier, later in itertools.pairwise(moments))


async def measure(
    server: OwnServer, directory: Path, num_updates: int, mode: str
) -> tuple[list[float], list[float], dict[str, float]]:
    """Seconds of each /update_weights, the stream's longest gap around it, and the memory after the first one."""
    load = Load(server.base_url)
    tasks = [asyncio.create_task(load.run(number)) for number in range(NUM_REQUESTS)]
    seconds: list[float] = []
    resident: dict[str, float] = {}
    moments: list[tuple[float, float]] = []
    url = f"{server.base_url.removesuffix('/v1')}/update_weights"
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        await asyncio.sleep(3.0)
        with progress_bar(f"updates, {mode}", num_updates) as advance:
            for _ in range(num_updates):
                began_s = time.perf_counter()
                async with session.post(url, json={"weight_dir": str(directory), "mode": mode}) as answer:
                    if answer.status != 200:
                        raise ServerError(f"HTTP {answer.status}: {await answer.text()}")
                moments.append((began_s, time.perf_counter()))
                if len(moments) == 1:
                    resident = resident_mib(server)
                seconds.append(moments[-1][1] - began_s)
                advance(1)
                await asyncio.sleep(_PAUSE_S)
        await asyncio.sleep(1.0)
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    return seconds, [load.longest_gap(*moment) for moment in moments], resident


def resident_mib(server: OwnServer) -> dict[str, float]:
    """Memory of each process of the server."""
    children = psutil.Process(server.launcher_pid).children()
    return {child.name(): child.memory_info().rss / (1 << 20) for child in children}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server.weight_updates", description=__doc__)
    parser.add_argument("--model", help="as toka model=; by default the demo model")
    parser.add_argument("--random-1b", action="store_true", help="random weights in the shapes of a Llama 3.2 1B")
    parser.add_argument("--updates", type=int, default=20, metavar="N", help="in each mode (default: 20)")
    add_result_arguments(parser)
    args, flags = parser.parse_known_args(argv)
    console = make_console(100)
    results = begin_results(args, machine_facts("torch"), console)
    table = Table(title=f"{args.updates} updates, {NUM_REQUESTS} requests running", title_justify="left")
    for column in ("mode", "update, s: median", "longest", "gap of a stream, s: median", "longest"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    try:
        with checkpoint_of(args) as directory, own_server([f"model={directory}", "rl=T", *flags]) as server:
            for mode in _MODES:
                seconds, gaps, before = asyncio.run(measure(server, directory, args.updates, mode))
                figures = [statistics.median(seconds), max(seconds), statistics.median(gaps), max(gaps)]
                table.add_row(mode, *(f"{figure:.3f}" for figure in figures))
                after = resident_mib(server)
                results[mode] = {"update_s": seconds, "gap_s": gaps, "resident_mib": (before, after)}
    except ServerError as error:
        print_error(error)
        return 1
    console.print(table)
    for mode in _MODES:
        before, after = results[mode]["resident_mib"]
        shown = ", ".join(f"{name} {before[name]:,.0f} -> {after[name]:,.0f}" for name in before)
        console.print(f"{mode}: MiB resident after the first update and the last: {shown}")
    return end_results(results, [], args, console)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
