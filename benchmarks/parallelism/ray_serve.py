"""Ray Serve: tokens per second over one and two replicas beside a plain server; how much of the prompts two replicas
find cached, by the router that chooses the replica.

All run on this machine, each engine with one thread: more replicas are gained from only where there are more cores. A
Ray cluster is started for the benchmark.
"""

import argparse
import asyncio
import os
import random
import statistics
import string
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.server.own_server import running_server
from tokasaurus.addresses import bind

ROOT = Path(__file__).parents[2]
NUM_CPUS = 8
"""That Ray believes there are, so that it starts all actors."""
OBJECT_STORE_BYTES = 100 << 20
NUM_TOKENS_OF_CHECK = 16
_LETTERS = string.ascii_lowercase


@dataclass(frozen=True)
class Load:
    """Chats, each of whose turns is sent when the one before it is answered."""

    chats: list[list[str]]
    """What each turn adds."""
    num_at_once: int
    num_tokens: int
    """Of each answer."""
    is_streamed: bool = False


@dataclass(frozen=True)
class Done:
    """All answers of a load."""

    seconds: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int


def words(rng: random.Random, count: int) -> str:
    return " ".join("".join(rng.choices(_LETTERS, k=rng.randint(2, 7))) for _ in range(count))


def unrelated(num_requests: int, num_at_once: int, num_tokens: int, is_streamed: bool, seed: int) -> Load:
    rng = random.Random(seed)
    return Load([[words(rng, 30)] for _ in range(num_requests)], num_at_once, num_tokens, is_streamed)


def behind_prefixes(num_requests: int, num_prefixes: int, seed: int) -> Load:
    """Questions behind a few prefixes of about 900 tokens, in random order."""
    rng = random.Random(seed)
    prefixes = [words(rng, 300) for _ in range(num_prefixes)]
    asked = [[f"{prefixes[number % num_prefixes]} {words(rng, 10)}"] for number in range(num_requests)]
    rng.shuffle(asked)
    return Load(asked, 8, NUM_TOKENS_OF_CHECK)


def conversations(num_chats: int, num_turns: int, seed: int) -> Load:
    """Chats whose turns add about 100 tokens."""
    rng = random.Random(seed)
    return Load([[words(rng, 35) for _ in range(num_turns)] for _ in range(num_chats)], 8, NUM_TOKENS_OF_CHECK)


async def send(url: str, load: Load) -> Done:
    """url: up to and including /v1."""
    places = asyncio.Semaphore(load.num_at_once)
    counts = {"completion_tokens": 0, "prompt_tokens": 0, "cached_tokens": 0}
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def converse(turns: list[str]) -> None:
            messages: list[dict[str, str]] = []
            for turn in turns:
                messages.append({"role": "user", "content": turn})
                async with places:
                    text, usage = await ask(messages)
                messages.append({"role": "assistant", "content": text})
                counts["completion_tokens"] += usage["completion_tokens"]
                counts["prompt_tokens"] += usage["prompt_tokens"]
                counts["cached_tokens"] += usage["prompt_tokens_details"]["cached_tokens"]

        async def ask(messages: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
            body = {"model": "default", "messages": messages, "max_tokens": load.num_tokens, "ignore_eos": True}
            if load.is_streamed:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            async with session.post(f"{url}/chat/completions", json=body) as answer:
                answer.raise_for_status()
                if not load.is_streamed:
                    whole = await answer.json()
                    return whole["choices"][0]["message"]["content"], whole["usage"]
                text, usage = "", None
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        event = orjson.loads(line.removeprefix(b"data: "))
                        text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                        usage = event["usage"] or usage
                assert usage is not None, "the stream was cut"
                return text, usage

        begun = time.perf_counter()
        await asyncio.gather(*map(converse, load.chats))
        seconds = time.perf_counter() - begun
    return Done(seconds, counts["completion_tokens"], counts["prompt_tokens"], counts["cached_tokens"])


@contextmanager
def serve_app(flags: dict[str, Any], num_replicas: int, router: str | Callable[..., Any], port: int) -> Iterator[str]:
    """Yields the base URL; needs a cluster whose proxy listens on the port."""
    from ray import serve

    from tokasaurus.ray.application import build_app

    serve.run(build_app(flags, 1, router, num_replicas), name="toka", route_prefix="/")
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        serve.delete("toka")


def measure_throughput(
    flags: dict[str, Any],
    port: int,
    num_rounds: int,
    num_requests: int,
    num_at_once: int,
    num_tokens: int,
    console: Console,
) -> None:
    from tokasaurus.ray.router import PrefixRouter

    ways = ("toka alone", "Serve, 1 replica", "Serve, 2 replicas")
    rates: dict[tuple[str, bool], list[float]] = {}
    for number in range(num_rounds):
        for way in ways:
            if way == ways[0]:
                context = running_server([f"{name}={value}" for name, value in flags.items()])
            else:
                context = serve_app(flags, 2 if way == ways[2] else 1, PrefixRouter, port)
            with context as url:
                asyncio.run(send(url, unrelated(8, 8, 8, False, seed=-1)))
                for is_streamed in (False, True):
                    load = unrelated(num_requests, num_at_once, num_tokens, is_streamed, 2 * number + is_streamed)
                    done = asyncio.run(send(url, load))
                    rate = done.output_tokens / done.seconds
                    rates.setdefault((way, is_streamed), []).append(rate)
                    console.print(f"{way}, {'streams' if is_streamed else 'whole'}: {rate:.0f} tokens/s")
    table = Table("output tokens/s", "whole answers", "streams", title="Median (range)", title_justify="left")
    for way in ways:
        table.add_row(way, *(_median_and_range(rates[way, is_streamed]) for is_streamed in (False, True)))
    console.print(table)


def measure_routers(flags: dict[str, Any], port: int, num_rounds: int, console: Console) -> None:
    from tokasaurus.ray.router import PrefixRouter

    routers: dict[str, str | Callable[..., Any]] = {
        "by prefix and load": PrefixRouter,
        "Serve's default": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
        "at random": "benchmarks.parallelism.random_router:RandomRouter",
    }
    loads: dict[str, Callable[[int], Load]] = {
        "questions": lambda seed: behind_prefixes(48, 8, seed),
        "chats": lambda seed: conversations(12, 5, seed),
    }
    table = Table("two replicas", title="Share of prompt tokens that were cached, seconds", title_justify="left")
    for label in loads:
        table.add_column(label, justify="right")
    for name, router in routers.items():
        done: dict[str, list[Done]] = {label: [] for label in loads}
        with serve_app(flags, 2, router, port) as url:
            for number in range(num_rounds):
                for label, make in loads.items():
                    last = asyncio.run(send(url, make(number)))
                    done[label].append(last)
                    share = last.cached_tokens / last.prompt_tokens
                    console.print(f"{name}, {label}: {share:.3f} cached, {last.seconds:.1f} s")
        table.add_row(name, *(_shares_and_seconds(rounds) for rounds in done.values()))
    console.print(table)


def _shares_and_seconds(rounds: Sequence[Done]) -> str:
    shares = [one.cached_tokens / one.prompt_tokens for one in rounds]
    shown = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
    return f"{shown}, {_median_and_range([one.seconds for one in rounds])}"


def _median_and_range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallelism.ray_serve", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--part", choices=("throughput", "routers", "all"), default="all")
    args = parser.parse_args()
    # Before Ray and the servers start: one thread for each engine, and Ray's workers at the plain server's priority.
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    os.environ |= {"RAY_worker_niceness": "0"}
    import ray
    from ray import serve

    console = Console()
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    flags: dict[str, Any] = {"device": "cpu", "log_level": "warning", "max_seqs_per_forward": 64}
    ray.init(num_cpus=NUM_CPUS, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"enable_access_log": False})
        if args.part != "routers":
            sizes = (args.requests, args.at_once, args.tokens)
            measure_throughput(flags | {"kv_cache_num_tokens": 32_768}, port, args.rounds, *sizes, console)
        if args.part != "throughput":
            # The prefixes of all questions do not fit into the cache of one replica.
            measure_routers(flags | {"kv_cache_num_tokens": 6_144}, port, args.rounds, console)
        serve.shutdown()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
