"""One measured load on one server: the requests that the flags describe, a warm-up, and the run."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from tokasaurus.commands.bench import workloads
from tokasaurus.commands.bench.client import Client, ClientOptions, RequestResult, ServerError, open_client
from tokasaurus.commands.bench.config import BenchConfig
from tokasaurus.commands.bench.figures import Summary, summarize
from tokasaurus.commands.bench.peers import without_secrets, words_of
from tokasaurus.commands.bench.results import counting_bar, machine_facts, utc_now
from tokasaurus.commands.bench.scrape import ServerFigures
from tokasaurus.commands.bench.workloads import OfferedRequest
from tokasaurus.files import replace_text
from tokasaurus.flags import FlagError

OWN_NAME = "server"
"""Name of the server that the flags of its address name."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run, as it is written to the JSON file."""

    name: str
    """Name of the server."""
    seed: int
    """Runs with the same flags and seed have the same requests."""
    workload: str
    config: dict[str, Any]
    """All flags except the API key."""
    started_at: str
    """UTC time in ISO 8601."""
    machine: dict[str, object]
    """Facts of the client's machine: see `machine_facts`."""
    server: dict[str, object]
    """URL, model, the answer of /version, and the command that started it."""
    summary: Summary
    server_figures: ServerFigures
    client_cpu_s: float
    """CPU seconds of this process during the measurement."""
    requests: list[RequestResult]


def requests_of(config: BenchConfig, seed: int) -> list[OfferedRequest]:
    """The requests of a round, by its seed. Raises FlagError."""
    try:
        return _requests_of(config, seed)
    except (ValueError, OSError) as error:
        raise FlagError(str(error)) from None


def _requests_of(config: BenchConfig, seed: int) -> list[OfferedRequest]:
    ignore_eos = config.workload != "file" if config.ignore_eos is None else config.ignore_eos
    if config.tokenizer is None:
        cut = workloads.cut_by_words(config.tokens_per_word)
    else:
        cut = workloads.cut_by_tokenizer(Path(config.tokenizer))
    temperature = config.temperature
    if config.workload == "monkeys":
        requests = workloads.monkeys(
            config.questions,
            config.samples,
            config.max_tokens,
            temperature,
            ignore_eos,
            config.separate_samples,
            seed,
        )
    elif config.workload == "sharegpt":
        requests = workloads.sharegpt(
            config.requests, config.mean_tokens, config.sigma, config.cap, temperature, ignore_eos, cut, seed
        )
    elif config.workload == "multiple-choice":
        requests = workloads.multiple_choice(config.contexts, config.context_tokens, cut, seed)
    elif config.workload == "prefix-chat":
        requests = workloads.prefix_chat(
            config.groups,
            config.chats,
            config.turns,
            config.system_tokens,
            config.max_tokens,
            temperature,
            ignore_eos,
            cut,
            seed,
        )
    else:
        assert config.input is not None
        requests = workloads.read_file(Path(config.input), temperature, ignore_eos)
    if config.chat and config.workload in ("monkeys", "sharegpt"):
        requests = [workloads.as_chat(request) for request in requests]
    if config.request_rate is not None:
        if any(request.arrival_s is not None for request in requests):
            raise FlagError(f"request_rate: {config.input} has an arrival_s for each request")
        requests = workloads.with_arrivals(requests, config.request_rate, config.burstiness, seed)
    return requests


def options_of(config: BenchConfig, name: str, base_url: str) -> ClientOptions:
    """How to reach the server `name`."""
    return ClientOptions(
        base_url=base_url if config.api_key is None else without_user(base_url),  # only one of them can be sent
        api_key=config.api_key,
        timeout_s=config.timeout,
        usage_per_choice=config.counts_one_choice(name),
        extra_body=config.extra_body or {},
        is_streaming=config.is_streaming,
        unix_socket=config.unix_socket if name == OWN_NAME else None,
    )


async def _warm_up(client: Client, model: str, count: int, like: OfferedRequest) -> None:
    """Raises ServerError."""
    request = OfferedRequest({"prompt": "What does a dinosaur eat?"}, 1, 8, 0.0, ignore_eos=False)
    if "messages" in like.content:
        request = workloads.as_chat(request)
    for result in await client.offer([request] * count, model, concurrency=None):
        if result.error is not None:
            raise ServerError(f"the warm-up request failed: {result.error}")


async def measure(
    config: BenchConfig,
    requests: list[OfferedRequest],
    name: str,
    base_url: str,
    model: str | None,
    seed: int,
    command: str | None = None,
) -> Run:
    """Warm up, send the requests and report. model: None asks the server. Raises ServerError."""
    async with open_client(options_of(config, name, base_url)) as client:
        model = await client.find_model() if model is None else model
        server = {"url": without_user(base_url), "model": model, "version": await client.version(), "command": command}
        await _warm_up(client, model, config.warmup, requests[0])
        machine, started_at = machine_facts("aiohttp"), utc_now()
        async with client.watched() as scrape:
            with counting_bar(name, len(requests)) as advance:
                cpu_start_s = time.process_time()
                results = await client.offer(requests, model, config.num_in_flight, advance)
                client_cpu_s = time.process_time() - cpu_start_s
    summary = summarize(results, config.goodput, config.price_per_hour)
    return Run(
        name=name,
        seed=seed,
        workload=config.workload,
        config=values_of(config),
        started_at=started_at,
        machine=machine,
        server=server,
        summary=summary,
        server_figures=scrape.figures(summary.wall_s),
        client_cpu_s=client_cpu_s,
        requests=results,
    )


def values_of(config: BenchConfig) -> dict[str, Any]:
    """The flags that say what was measured, without secrets."""
    values = {name: getattr(config, name) for name in config.flags if name not in ("api_key", "output", "html")}
    if config.base_url is not None:
        values["base_url"] = without_user(config.base_url)
    if config.peer is not None:
        values["peer"] = ",".join(f"{name}={without_user(url)}" if url else name for name, url in config.peers())
    if config.peer_args is not None:
        values["peer_args"] = {
            name: shlex.join(without_secrets(words_of(name, text))) for name, text in config.peer_args.items()
        }
    if math.isinf(config.burstiness):  # JSON has no such number
        values["burstiness"] = "inf"
    return values


def without_user(url: str) -> str:
    """The URL without the user and password that it may contain."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def write_runs(path: Path, runs: list[Run]) -> None:
    """Raises OSError."""
    replace_text(path, json.dumps({"runs": [dataclasses.asdict(run) for run in runs]}, allow_nan=False) + "\n")
