"""Predictions beside real replicas on this machine: how long one load takes, from the steps of another one.

A real server with one replica, or with two that share the cores, answers a load between others that calibrate: the
steps of these give the time of a step. The load has other prompts, lengths and skew. The simulation has to say how long
it takes.
"""

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.scale.load import PlannedRequest, Shape, plan
from benchmarks.scale.recorded import DIRECTORY
from benchmarks.scale.replica import make_options
from benchmarks.scale.simulation import Simulation
from benchmarks.scale.step_times import RecordedSteps, StepTimes, fit
from tokasaurus.messages.status import EngineLimits

MAX_SEQS, MAX_TOKENS = 64, 512
FLAGS = (
    "use_hydragen=F",
    "kv_cache_num_tokens=16384",
    f"max_seqs_per_forward={MAX_SEQS}",
    f"max_tokens_per_forward={MAX_TOKENS}",
    "log_level=warning",
)
_START = "import sys; from benchmarks.scale.recorded import main; sys.exit(main())"
_START_S, _STOP_S, _ANSWER_S = 240.0, 60.0, 600.0


WARM_UP = Shape(2, 1, 1, 100, (16, 64), (16, 32))


def calibration(num_replicas: int) -> list[Shape]:
    """One after the other, since steps of one size would not tell what a row costs."""
    return [Shape(rows * num_replicas, 2, 6, 192, (16, 128), (16, 64), skew=0.5) for rows in (1, 4, 10, 20)]


def predicted_load(num_replicas: int) -> Shape:
    return Shape(16 * num_replicas, 3, 12, 320, (32, 96), (32, 96), skew=1.2)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One load, really and as predicted."""

    num_replicas: int
    measured_s: float
    predicted_s: float
    num_tokens: int
    """Generated."""
    measured_cached: float
    """Share of the prompts' tokens."""
    predicted_cached: float
    times: StepTimes

    @property
    def ratio(self) -> float:
        """Predicted over measured tokens per second."""
        return self.measured_s / self.predicted_s


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a real server did."""

    num_replicas: int
    seed: int
    limits: EngineLimits
    features: list[list[float]]
    """Of the steps of the loads that calibrate."""
    step_seconds: list[float]
    measured_s: float
    """Of the load to be predicted."""
    num_cached_tokens: int
    """Of its prompts."""


def measure(num_replicas: int, seed: int) -> Measurement:
    """Raises RuntimeError if the server does not start."""
    with tempfile.TemporaryDirectory() as name:
        records = Path(name)
        with _recorded_server(records, num_replicas) as url:
            asyncio.run(_answer_all(url, plan(WARM_UP, seed + 2000)))
            spans = [_calibrate(url, num_replicas, seed)]
            load = plan(predicted_load(num_replicas), seed)
            num_cached_tokens, measured_s = asyncio.run(_answer_all(url, load))
            spans.append(_calibrate(url, num_replicas, seed + 100))  # the machine's speed may have changed
        recorded = [RecordedSteps.read(records / f"{index}.json") for index in range(num_replicas)]
    steps = [
        (features, seconds)
        for one in recorded
        for features, seconds, ended_s in zip(one.features, one.seconds, one.ended_s, strict=True)
        if any(begun_s < ended_s < done_s for begun_s, done_s in spans)
    ]
    return Measurement(
        num_replicas,
        seed,
        recorded[0].engine_limits(),
        [features for features, _ in steps],
        [seconds for _, seconds in steps],
        measured_s,
        num_cached_tokens,
    )


def _calibrate(url: str, num_replicas: int, seed: int) -> tuple[float, float]:
    """-> begin and end."""
    begun_s = time.monotonic()
    for number, shape in enumerate(calibration(num_replicas)):
        asyncio.run(_answer_all(url, plan(shape, 1000 * number + seed + 3000)))
    return begun_s, time.monotonic()


def predict(measured: Measurement) -> Comparison:
    source = f"fitted to {len(measured.step_seconds)} steps of {measured.num_replicas} real replicas"
    times = fit(measured.features, measured.step_seconds, source)
    options = make_options(measured.limits, MAX_SEQS, MAX_TOKENS)
    load = plan(predicted_load(measured.num_replicas), measured.seed)
    run = Simulation(load, measured.num_replicas, options, times).run()
    num_prompt_tokens = sum(len(answer.request.prompt_ids) for answer in run.answers)
    return Comparison(
        measured.num_replicas,
        measured.measured_s,
        run.ended_s,
        sum(answer.num_tokens for answer in run.answers),
        measured.num_cached_tokens / num_prompt_tokens,
        sum(answer.num_cached_tokens for answer in run.answers) / num_prompt_tokens,
        times,
    )


def median_ratio(comparisons: Sequence[Comparison]) -> float:
    return statistics.median(comparison.ratio for comparison in comparisons)


async def _answer_all(url: str, sessions: Sequence[Sequence[PlannedRequest]]) -> tuple[int, float]:
    """-> prompt tokens found cached, and the seconds until the last answer. Raises aiohttp.ClientError."""
    limit = aiohttp.ClientTimeout(total=_ANSWER_S)
    async with aiohttp.ClientSession(timeout=limit, connector=aiohttp.TCPConnector(limit=0)) as http:

        async def live(session: Sequence[PlannedRequest]) -> int:
            num_cached = 0
            for request in session:
                body = {
                    "model": "default",
                    "prompt": request.prompt_ids.tolist(),
                    "max_tokens": request.answer_tokens,
                    "ignore_eos": True,
                }
                async with http.post(f"{url}/v1/completions", json=body, raise_for_status=True) as answer:
                    usage = (await answer.json())["usage"]
                assert usage["completion_tokens"] == request.answer_tokens
                num_cached += usage["prompt_tokens_details"]["cached_tokens"]
            return num_cached

        start_s = time.monotonic()
        found = await asyncio.gather(*(live(session) for session in sessions))
        return sum(found), time.monotonic() - start_s


@contextmanager
def _recorded_server(records: Path, num_replicas: int) -> Iterator[str]:
    """Its URL. The records are there when the block has ended."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-c", _START, *FLAGS, f"port={port}", f"dp_size={num_replicas}"]
    command.append(f"data_dir={records / 'data'}")
    with subprocess.Popen(command, env=os.environ | {DIRECTORY: str(records)}, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            asyncio.run(_wait_until_ready(url, process))
            yield url
            process.terminate()
            process.wait(_STOP_S)
        finally:
            process.kill()


async def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + _START_S
    async with aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.get(f"{url}/ready") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError("the server did not start")
            await asyncio.sleep(0.1)
