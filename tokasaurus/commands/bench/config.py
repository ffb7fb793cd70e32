"""The flags of `toka bench`."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from tokasaurus.commands.running_server import AddressConfig
from tokasaurus.flags import FlagConfig, FlagError, Setting, count, flag, installed

WORKLOADS = ("monkeys", "sharegpt", "multiple-choice", "prefix-chat", "file")
PEERS = ("toka", "vllm", "sglang", "llama.cpp", "openvino")
PERCENTILES = (50, 90, 95, 99)
TOKENS_PER_WORD = 1.336
"""Measured with SmolLM2's tokenizer on the questions of data/gsm8k_test_200.jsonl: 12,395 tokens in 9,278 words."""
_OF_WORKLOADS = {
    "questions": ("monkeys",),
    "samples": ("monkeys",),
    "separate_samples": ("monkeys",),
    "max_tokens": ("monkeys", "prefix-chat"),
    "requests": ("sharegpt",),
    "mean_tokens": ("sharegpt",),
    "cap": ("sharegpt",),
    "sigma": ("sharegpt",),
    "contexts": ("multiple-choice",),
    "context_tokens": ("multiple-choice",),
    "groups": ("prefix-chat",),
    "chats": ("prefix-chat",),
    "turns": ("prefix-chat",),
    "system_tokens": ("prefix-chat",),
    "input": ("file",),
    "chat": ("monkeys", "sharegpt"),
}


def _only_of(name: str, meaning: str) -> str:
    return f"{', '.join(_OF_WORKLOADS[name])}: {meaning}"


class BenchConfig(AddressConfig):
    """The flags of a measurement, checked by `finalize`."""

    main_flags = frozenset(
        (
            *("workload", "questions", "samples", "max_tokens", "requests", "mean_tokens", "input", "chat"),
            *("concurrency", "request_rate", "stream", "rounds", "port", "base_url", "api_key", "model"),
            *("peer", "peer_env"),
            *("goodput", "price_per_hour", "output", "html"),
        )
    )

    workload: str = flag("monkeys", "what is asked, see docs/bench.md", choices=WORKLOADS, heading="workload")
    questions: int = count(16, _only_of("questions", "questions after one 8-shot prefix"))
    samples: int = count(32, _only_of("samples", "samples of each question"))
    max_tokens: int = count(128, _only_of("max_tokens", "tokens of each answer"))
    separate_samples: bool = flag(False, _only_of("separate_samples", "a request per sample, for servers without n"))
    requests: int = count(200, _only_of("requests", "requests"))
    mean_tokens: float = flag(220.0, _only_of("mean_tokens", "mean length of prompts and of answers"), minimum=1)
    cap: int = count(1024, _only_of("cap", "longest of both"), minimum=2)
    sigma: float = flag(1.0, _only_of("sigma", "standard deviation of log(length)"), minimum=0.01)
    contexts: int = count(100, _only_of("contexts", "contexts, each with four options"))
    context_tokens: int = count(1000, _only_of("context_tokens", "length of a context"))
    groups: int = count(4, _only_of("groups", "groups of chats with the same system message"))
    chats: int = count(16, _only_of("chats", "chats of each group"))
    turns: int = count(3, _only_of("turns", "turns of each chat"))
    system_tokens: int = count(1000, _only_of("system_tokens", "length of the system message"))
    input: str | None = flag(None, _only_of("input", "its requests, as JSON lines"), none_means="none")
    tokenizer: str | None = flag(
        None,
        "tokenizer.json or its directory, to cut prompts to length",
        none_means=f"{TOKENS_PER_WORD} tokens per word",
    )
    tokens_per_word: float = flag(TOKENS_PER_WORD, "where there is no tokenizer=; measured with SmolLM2", minimum=0.1)
    chat: bool = flag(False, _only_of("chat", "/chat/completions in place of /completions"))
    temperature: float = flag(0.6, "of requests that say none themselves", minimum=0, maximum=2)
    ignore_eos: bool | None = flag(
        None,
        "every answer has its full length, and the server's count must be that",
        none_means="T, and F for lines of a file without it",
    )
    extra_body: dict | None = flag(  # type: ignore[type-arg]  # pydra casts by it
        None, 'fields for every request, a JSON object such as {"seed": 1}', none_means="none"
    )

    concurrency: int | None = count(
        None,
        "requests in flight, where one with n samples counts once; 0 sends all at once",
        minimum=0,
        none_means="64 for sharegpt and multiple-choice, else 0; with request_rate= 0",
        heading="load",
        alias="max_concurrency",
    )
    request_rate: float | None = flag(
        None, "requests a second, whether or not the server keeps up", minimum=1e-6, none_means="as fast as it answers"
    )
    burstiness: float = flag(
        1.0, "of request_rate=: 1 is a Poisson process, less comes in bursts, inf is regular", minimum=1e-3
    )
    stream: bool | None = flag(
        None,
        "stream the answers, for the times of tokens",
        none_means="T, and F for monkeys and multiple-choice, where that costs the client much time",
    )
    warmup: int = count(1, "requests before the measurement", minimum=0)
    rounds: int | None = count(
        None, "measurements of each server, in turns, each with a seed of its own", none_means="1, with peer= 3"
    )
    seed: int = flag(0, "of prompts, lengths and arrivals of the first round", minimum=0)
    timeout: float = flag(7200.0, "limit for one request, in seconds", minimum=0.001)

    model: str | None = flag(
        None,
        "what those of peer= serve; else the model's name in requests",
        none_means="the first that the server lists",
        heading="servers",
    )
    peer: str | None = flag(
        None,
        f"servers that are started and stopped, with commas between them: {', '.join(PEERS)}; NAME=URL runs already",
        none_means="only the server",
    )
    peer_env: dict | None = flag(  # type: ignore[type-arg]
        None,
        'where each is installed: the directory of an environment, or a program, such as {"vllm": "/opt/vllm"}',
        none_means="on PATH",
    )
    peer_args: dict | None = flag(  # type: ignore[type-arg]
        None, 'further arguments of each, such as {"vllm": "--max-num-seqs 512"}', none_means="none"
    )
    peer_model: dict | None = flag(  # type: ignore[type-arg]
        None, 'the model for each whose form differs, such as {"llama.cpp": "model.gguf"}', none_means="model="
    )
    start_timeout: float = flag(900.0, "limit for the start of one, in seconds", minimum=1)
    usage_per_choice: str | None = flag(
        None,
        "servers whose usage.completion_tokens counts one of n choices, by name with commas between them, or all",
        none_means="llama.cpp",
    )

    goodput: dict | None = flag(  # type: ignore[type-arg]
        None,
        'count the requests that keep to limits in milliseconds, such as {"ttft": 500, "tpot": 50, "e2el": 9000}',
        none_means="not counted",
        heading="result",
    )
    price_per_hour: float | None = flag(
        None,
        "price of the machine, for the cost of a million tokens",
        minimum=0,
        none_means="no costs",
    )
    output: str | None = flag(None, "file for all measurements, as JSON", none_means="none")
    html: str | None = flag(
        None,
        "file for a report with plots; needs plotly",
        none_means="none",
        rules=(installed("plotly", "plotly"),),
    )

    @classmethod
    def relevant(cls, settings: dict[str, Setting]) -> dict[str, Setting]:
        """Beside running servers, variables and files may name the model to serve."""
        starts = "peer" in settings and settings["peer"].value is not None
        return {name: one for name, one in settings.items() if starts or not one.source or name != "model"}

    def further_errors(self) -> Iterator[str]:
        yield from super().further_errors()
        if self.workload == "file" and self.input is None:
            yield "input: the workload file needs it: toka bench file input=requests.jsonl"
        for name, value in (("base_url", self.base_url), *(pair for pair in self.peers() if "://" in pair[1])):
            if value is not None and not value.startswith(("http://", "https://")):
                yield f"{name}={value}: must begin with http:// or https://"
        names = [name for name, _ in self.peers()]
        for name, url in self.peers():
            if not url and name not in PEERS:
                yield f"peer={name}: there are {', '.join(PEERS)}; NAME=http://... runs already"
            if url and "://" not in url:
                yield f"peer={name}={url}: must begin with http:// or https://"
        if len(set(names)) != len(names):
            yield f"peer={self.peer}: each name once"
        started = {name for name, url in self.peers() if not url}
        for name in sorted(started - {"toka"} - set(self.peer_model or {})):
            if self.model is None and name in PEERS:
                yield f"peer={name}: needs model="
        for flag_name in ("peer_env", "peer_args", "peer_model"):
            for name, value in (getattr(self, flag_name) or {}).items():
                if name not in started:
                    yield f"{flag_name}: {name} is not started by peer="
                elif not isinstance(value, str):
                    yield f"{flag_name}: {name}: must be a text"
        for name, limit in (self.goodput or {}).items():
            if name not in ("ttft", "tpot", "e2el"):
                yield f"goodput: {name}: there are ttft, tpot, e2el"
            elif type(limit) not in (int, float) or not 0 < limit < math.inf:
                yield f"goodput: {name}: must be a number of milliseconds"
        if self.goodput and not self.is_streaming and set(self.goodput) & {"ttft", "tpot"}:
            yield "goodput: ttft and tpot need stream=T"
        for name in ("output", "html"):
            path = getattr(self, name)
            if path is not None and not Path(path).absolute().parent.is_dir():
                yield f"{name}={path}: its directory does not exist"
            elif path is not None and not os.access(Path(path).absolute().parent, os.W_OK):
                yield f"{name}={path}: its directory cannot be written"
        if self.workload == "prefix-chat" and self.request_rate is not None and self.turns > 1:
            yield "request_rate: of chats of one turn; a further turn is sent when the turn before it is answered"

    @property
    def is_streaming(self) -> bool:
        if self.stream is None:
            return self.workload not in ("monkeys", "multiple-choice")
        return self.stream

    @property
    def num_in_flight(self) -> int | None:
        """Most requests at once; None for all."""
        if self.concurrency is None:
            is_limited = self.request_rate is None and self.workload in ("sharegpt", "multiple-choice")
            return 64 if is_limited else None
        return self.concurrency or None

    @property
    def num_rounds(self) -> int:
        return self.rounds or (1 if self.peer is None else 3)

    def peers(self) -> list[tuple[str, str]]:
        """(name, URL) of peer=; the URL is empty for one that is started."""
        words = [] if self.peer is None else [word.strip() for word in self.peer.split(",")]
        return [(name, url) for name, _, url in (word.partition("=") for word in words if word)]

    def counts_one_choice(self, name: str) -> bool:
        """Whether the server's usage counts one of n choices."""
        if self.usage_per_choice is None:
            return name == "llama.cpp"
        names = [word.strip() for word in self.usage_per_choice.split(",")]
        return name in names or names in (["all"], ["T"])

    def not_used(self, given: set[str]) -> Iterator[str]:
        """Lines about the given flags that are for another workload."""
        for name in sorted(given & set(_OF_WORKLOADS)):
            if self.workload not in _OF_WORKLOADS[name]:
                yield f"{name}: only of {', '.join(_OF_WORKLOADS[name])}"


class CompareConfig(FlagConfig):
    """The flags of `toka bench compare`."""

    output: str | None = flag(None, "file for the comparison, as JSON", none_means="none", heading="result")
    html: str | None = BenchConfig.declared("html")


def raise_unused(config: BenchConfig, words: list[str]) -> None:
    """Raises FlagError if a flag on the command line is for another workload."""
    lines = list(config.not_used({word.partition("=")[0] for word in words}))
    if lines:
        raise FlagError(*lines)
