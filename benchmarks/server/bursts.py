"""Measures the longest gap in running streams while bursts of long prompts arrive.

`python -m benchmarks.server.bursts [--rounds 2] [--step-seconds 0.25] [name=value ...]`, flags of `toka`
"""

import argparse
import asyncio
import itertools
import random
import sys
import time
from collections.abc import Sequence

import aiohttp

from benchmarks.server.own_server import running_server
from tokasaurus.commands.bench.client import ServerError

BURSTS = ((16, 1000), (4, 8000))
"""(prompts, tokens of each)."""
NUM_STREAMS = 4
MAX_GAP = 3.0
"""Target: gaps in units of the server's max_step_seconds."""
_NUM_TOKENS_AFTER = 8
_SETTLE_TOKENS = 20
_TIMEOUT_S = 1800.0


class _Stream:
    """One streamed completion that does not end by itself."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.has_settled = asyncio.Event()

    async def read(self, session: aiohttp.ClientSession, base_url: str, number: int) -> None:
        body = {
            "model": "default",
            "prompt": f"Story number {number}. Once upon a time",
            "max_tokens": 8000,
            "ignore_eos": True,
            "stream": True,
        }
        async with session.post(f"{base_url}/completions", json=body) as answer:
            if answer.status != 200:
                raise ServerError(f"HTTP {answer.status}: {await answer.text()}")
            async for line in answer.content:
                if line.startswith(b"data:"):
                    self.arrivals.append(time.perf_counter())
                    if len(self.arrivals) > _SETTLE_TOKENS:
                        self.has_settled.set()

    def longest_gap(self, began_s: float, ended_s: float) -> float:
        """Seconds without a token between two moments."""
        inside = [arrival for arrival in self.arrivals if began_s < arrival < ended_s]
        moments = [began_s, *inside, ended_s]
        return max(after - before for before, after in itertools.pairwise(moments))


async def _burst(session: aiohttp.ClientSession, base_url: str, num_prompts: int, num_tokens: int, seed: int) -> float:
    """Send the prompts at once -> seconds until all are answered."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(1000, 20_000) for _ in range(num_tokens)] for _ in range(num_prompts)]
    began_s = time.perf_counter()

    async def ask(prompt: list[int]) -> None:
        body = {"model": "default", "prompt": prompt, "max_tokens": _NUM_TOKENS_AFTER, "ignore_eos": True}
        async with session.post(f"{base_url}/completions", json=body) as answer:
            if answer.status != 200:
                raise ServerError(f"HTTP {answer.status}: {await answer.text()}")
            await answer.read()

    await asyncio.gather(*map(ask, prompts))
    return time.perf_counter() - began_s


async def measure(base_url: str, num_prompts: int, num_tokens: int, seed: int) -> tuple[float, float]:
    """The longest gap of NUM_STREAMS streams during a burst, and the time until the burst is answered, in seconds."""
    streams = [_Stream() for _ in range(NUM_STREAMS)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session:
        readers = [
            asyncio.create_task(stream.read(session, base_url, seed * NUM_STREAMS + number))
            for number, stream in enumerate(streams)
        ]
        await asyncio.gather(*(stream.has_settled.wait() for stream in streams))
        began_s = time.perf_counter()
        seconds = await _burst(session, base_url, num_prompts, num_tokens, seed)
        for reader in readers:
            if reader.done():
                reader.result()
                raise ServerError("a stream ended before the burst was answered")
            reader.cancel()
        return max(stream.longest_gap(began_s, began_s + seconds) for stream in streams), seconds


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server.bursts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="each round has other prompts")
    parser.add_argument("--step-seconds", type=float, default=0.25, help="the server's max_step_seconds")
    args, flags = parser.parse_known_args(arguments)
    is_met, limit = True, args.step_seconds
    with running_server([f"max_step_seconds={limit}", *flags]) as base_url:
        print(f"steps take at most {limit:.3g} s; {NUM_STREAMS} streams")
        print("| round | burst | longest gap, s | in steps | answered after, s |\n|---|---|---|---|---|")
        for number in range(args.rounds):
            for num_prompts, num_tokens in BURSTS:
                gap, seconds = asyncio.run(measure(base_url, num_prompts, num_tokens, seed=number))
                is_met &= gap <= MAX_GAP * limit
                cells = f"{num_prompts} x {num_tokens:,} | {gap:.2f} | {gap / limit:.2f} | {seconds:.1f}"
                print(f"| {number + 1} | {cells} |", flush=True)
    print(f"target of at most {MAX_GAP:g} steps: {'met' if is_met else 'MISSED'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
