"""CPU time of the server process per request, with thousands of requests at once.

`python -m benchmarks.server.cpu --help`. Works only with a server of this project, which must have no other load.
"""

import argparse
import asyncio
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx
import openai
import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.results import make_console
from benchmarks.server.target import Target
from tokasaurus.commands.bench.client import UNREACHABLE, ServerError
from tokasaurus.commands.bench.results import print_error

NUM_SPARE_FILES = 64
SERVER_CPU = "toka_server_cpu_seconds_total"
TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Time taken by `num_requests` requests of one token, all sent at once."""

    way: str
    """How they were sent: a key of WAYS."""
    num_requests: int
    num_failed: int
    """Requests that failed or whose answer does not have exactly one token."""
    server_cpu_s: float
    """CPU seconds of the server process, by its own counter."""
    client_cpu_s: float
    """CPU seconds of this process."""
    wall_s: float

    @property
    def ms_per_request(self) -> float:
        """CPU milliseconds of the server process per request."""
        return 1000 * self.server_cpu_s / self.num_requests


def make_body(number: int) -> dict[str, object]:
    return {"model": "default", "prompt": f"Request number {number}:", "max_tokens": 1, "ignore_eos": True}


async def ask_openai(target: Target, num_requests: int) -> int:
    """Send each request over its own connection, with OpenAI's client and without retries -> number that failed."""
    limits = httpx.Limits(max_connections=num_requests, max_keepalive_connections=num_requests)
    # Newer versions of the client accept an httpx client too, but their type hints name another class.
    http_client: Any = httpx.AsyncClient(limits=limits, timeout=TIMEOUT_S)

    async with openai.AsyncOpenAI(
        base_url=target.base_url, api_key=target.api_key, max_retries=0, http_client=http_client
    ) as client:

        async def ask(number: int) -> bool:
            try:
                answer = await client.completions.create(
                    model="default", prompt=f"Request number {number}:", max_tokens=1, extra_body={"ignore_eos": True}
                )
            except openai.OpenAIError:
                return False
            return answer.usage is not None and answer.usage.completion_tokens == 1

        return (await asyncio.gather(*map(ask, range(num_requests)))).count(False)


async def ask_bulk(target: Target, num_requests: int) -> int:
    """Send all as lines of one /v1/bulk request -> number that failed."""
    lines = [
        orjson.dumps({"custom_id": str(number), "url": "/v1/completions", "body": make_body(number)})
        for number in range(num_requests)
    ]
    headers = {"Authorization": f"Bearer {target.api_key}", "Content-Type": "application/x-ndjson"}
    missing = {str(number) for number in range(num_requests)}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(TIMEOUT_S)) as session:
        try:
            async with session.post(f"{target.base_url}/bulk", data=b"\n".join(lines)) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    result = orjson.loads(line)
                    response = result["response"]
                    if response["status_code"] == 200 and response["body"]["usage"]["completion_tokens"] == 1:
                        missing.discard(result["custom_id"])
        except UNREACHABLE as error:
            raise ServerError(f"{target.base_url}/bulk: {error!r}") from None
    return len(missing)


WAYS: dict[str, Callable[[Target, int], Awaitable[int]]] = {"openai": ask_openai, "bulk": ask_bulk}


def measure(way: str, target: Target, num_requests: int) -> Cost:
    """Send the requests and read the server's CPU time before and after. Raises ServerError."""
    before, client_before, started = target.counter(SERVER_CPU), time.process_time(), time.perf_counter()
    num_failed = asyncio.run(_await(WAYS[way](target, num_requests)))
    wall_s, client_cpu_s = time.perf_counter() - started, time.process_time() - client_before
    return Cost(way, num_requests, num_failed, target.counter(SERVER_CPU) - before, client_cpu_s, wall_s)


async def _await(asked: Awaitable[int]) -> int:
    return await asked


def print_costs(costs: Sequence[Cost], console: Console) -> None:
    table = Table(title="CPU time of the server process", title_justify="left")
    for column in ("way", "requests", "failed", "server, ms/request", "client, ms/request", "wall, s"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for cost in costs:
        client_ms = 1000 * cost.client_cpu_s / cost.num_requests
        numbers = (f"{cost.ms_per_request:.2f}", f"{client_ms:.2f}", f"{cost.wall_s:.1f}")
        table.add_row(cost.way, str(cost.num_requests), str(cost.num_failed), *numbers)
    console.print(table)


def allow_connections(count: int) -> None:
    """Raise the limit of open files to its maximum. Raises ServerError if `count` connections need more."""
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard_limit != resource.RLIM_INFINITY and hard_limit < count + NUM_SPARE_FILES:
        raise ServerError(
            f"{count} connections need {count + NUM_SPARE_FILES} open files, but the limit is {hard_limit} (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 if a request failed or no server of this project answered."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.server.cpu",
        description="Send many requests of one token at once; read the server's CPU time before and after.",
    )
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"how to send them: {', '.join(WAYS)}; default: all")
    parser.add_argument("--base-url", default="http://127.0.0.1:10210/v1", metavar="URL", help="default: %(default)s")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "none"), help="default: $OPENAI_API_KEY")
    parser.add_argument("--requests", type=int, default=4096, metavar="N", help="default: %(default)s")
    args = parser.parse_args(argv)
    if unknown := set(args.ways) - set(WAYS):
        parser.error(f"unknown WAY {', '.join(sorted(unknown))}: expected {' or '.join(WAYS)}")
    if args.requests < 1:
        parser.error("--requests must be at least 1")
    target = Target(args.base_url.rstrip("/"), args.api_key)
    try:
        allow_connections(args.requests)
        costs = [measure(way, target, args.requests) for way in args.ways or WAYS]
    except ServerError as error:
        print_error(error)
        return 1
    print_costs(costs, make_console(120))
    return 1 if any(cost.num_failed for cost in costs) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
