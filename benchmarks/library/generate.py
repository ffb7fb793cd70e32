"""Throughput of `Client.generate` beside that of a plain /v1/bulk request and of 64 HTTP connections.

`python -m benchmarks.library.generate`. Starts a server, and sends equal prompts in each of the ways, in turns. The
library asks for token ids and log-probabilities, as it does by default, and so does one of the bulk requests; the
others ask for texts alone. Clients are made before the clock starts.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import aiohttp
import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.results import Check, add_result_arguments, at_least, begin_results, end_results, make_console
from benchmarks.server.own_server import running_server
from tokasaurus import Client, Sampling
from tokasaurus.commands.bench.client import UNREACHABLE, ServerError
from tokasaurus.commands.bench.results import machine_facts, print_error
from tokasaurus.commands.bench.workloads import DATA, load_jsonl

CONNECTIONS = 64
TIMEOUT = aiohttp.ClientTimeout(1800)


def make_prompts(count: int, seed: int) -> list[str]:
    """Different in each round, so that none finds the cached prompts of another."""
    lines = load_jsonl(DATA / "gsm8k_test_200.jsonl")
    questions = [" ".join(line["question"].split()[:12]) for line in lines]
    return [
        f"Round {seed}, {number}. Question: {' '.join(questions[number % len(questions)].split()[:12])}\nAnswer:"
        for number in range(count)
    ]


def body(prompt: str, max_tokens: int) -> dict[str, object]:
    return {"model": "default", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def by_library(base_url: str, prompts: Sequence[str], max_tokens: int) -> tuple[list[str], float]:
    with Client(base_url) as client:
        started = time.perf_counter()
        results = client.generate(prompts, Sampling(temperature=0, max_tokens=max_tokens, ignore_eos=True))
        seconds = time.perf_counter() - started
    return [result.text or str(result.error) for result in results], seconds


LIKE_THE_LIBRARY = {"logprobs": 0, "logprobs_in_fingerprint": True}
"""What it asks for besides the text."""


def by_bulk(
    base_url: str, prompts: Sequence[str], max_tokens: int, fields: Mapping[str, object] = MappingProxyType({})
) -> tuple[list[str], float]:
    """fields: further ones of each body."""

    async def run() -> tuple[list[str], float]:
        headers = {"Content-Type": "application/x-ndjson"}
        async with aiohttp.ClientSession(timeout=TIMEOUT, read_bufsize=1 << 20) as session:
            started = time.perf_counter()
            lines = [
                orjson.dumps(
                    {
                        "custom_id": str(number),
                        "url": "/v1/completions",
                        "body": body(prompt, max_tokens) | dict(fields),
                    }
                )
                for number, prompt in enumerate(prompts)
            ]
            async with session.post(f"{base_url}/bulk", data=b"\n".join(lines), headers=headers) as answer:
                results = [orjson.loads(line) async for line in answer.content]
            texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in results}
            return [texts[str(number)] for number in range(len(prompts))], time.perf_counter() - started

    return asyncio.run(run())


def by_connections(base_url: str, prompts: Sequence[str], max_tokens: int) -> tuple[list[str], float]:
    async def run() -> tuple[list[str], float]:
        free = asyncio.Semaphore(CONNECTIONS)
        connector = aiohttp.TCPConnector(limit=CONNECTIONS)
        async with aiohttp.ClientSession(timeout=TIMEOUT, connector=connector) as session:

            async def ask(prompt: str) -> str:
                async with free, session.post(f"{base_url}/completions", json=body(prompt, max_tokens)) as answer:
                    return str(orjson.loads(await answer.read())["choices"][0]["text"])

            started = time.perf_counter()
            return await asyncio.gather(*map(ask, prompts)), time.perf_counter() - started

    return asyncio.run(run())


WAYS: dict[str, Callable[[str, Sequence[str], int], tuple[list[str], float]]] = {
    "library": by_library,
    "bulk": by_bulk,
    "bulk with log-probabilities": partial(by_bulk, fields=LIKE_THE_LIBRARY),
    "64 connections": by_connections,
}


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.library.generate", description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=512, metavar="N", help="per round and way (default: 512)")
    parser.add_argument("--max-tokens", type=int, default=32, metavar="T", help="of each completion (default: 32)")
    parser.add_argument("--rounds", type=int, default=5, metavar="R", help="(default: 5)")
    parser.add_argument("--flags", nargs="*", default=[], metavar="NAME=VALUE", help="flags of the server")
    add_result_arguments(parser)
    args = parser.parse_args(argv)
    console = make_console(100)
    results = begin_results(args, machine_facts("torch", "aiohttp"), console)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    num_different = 0
    try:
        with running_server(args.flags) as base_url:
            for round_number in range(args.rounds + 1):
                prompts = make_prompts(args.prompts, round_number)
                ways = list(WAYS.items())
                for way, ask in ways[round_number % len(ways) :] + ways[: round_number % len(ways)]:
                    # each way has prompts of its own, of equal length
                    own = [f"{[*WAYS].index(way)} {prompt}" for prompt in prompts]
                    _, way_s = ask(base_url, own, args.max_tokens)
                    if round_number:  # the first round warms up
                        seconds[way].append(way_s)
                        console.print(f"round {round_number}: {way} {way_s:.2f} s")
            same = make_prompts(min(args.prompts, 1000), -1)
            compared = [ask(base_url, same, args.max_tokens)[0] for ask in (by_library, by_bulk)]
            num_different = sum(one != other for one, other in zip(*compared, strict=True))
    except (ServerError, *UNREACHABLE) as error:
        print_error(error)
        return 1
    return end_results(results | {"seconds": seconds}, _print(seconds, num_different, args, console), args, console)


def _print(
    seconds: dict[str, list[float]], num_different: int, args: argparse.Namespace, console: Console
) -> list[Check]:
    table = Table(title=f"{args.prompts} prompts, {args.max_tokens} tokens each; medians", title_justify="left")
    for column in ("way", "seconds", "tokens/s", "library's throughput over it"):
        table.add_column(column, justify="left" if column == "way" else "right")
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    checks = []
    for way, median in medians.items():
        ratios = [other / own for own, other in zip(seconds["library"], seconds[way], strict=True)]
        ratio = statistics.median(ratios)
        table.add_row(way, f"{median:.2f}", f"{args.prompts * args.max_tokens / median:,.0f}", f"{ratio:.3f}")
        if way != "library":
            checks.append(at_least(f"library / {way}", ratio, 1.0))
    console.print(table)
    console.print(f"{num_different} greedy texts differ between library and bulk")
    return checks


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
