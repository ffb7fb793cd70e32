"""One measured load: the arguments of `python -m benchmarks.throughput`, the requests they describe, and the report."""

import argparse
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import orjson

from benchmarks.results import config_of, counting_bar, machine_facts, utc_now
from benchmarks.throughput import workloads
from benchmarks.throughput.client import Client, ClientOptions, ServerError, open_client
from benchmarks.throughput.report import Report, summarize
from benchmarks.throughput.workloads import OfferedRequest

DEFAULT_CONCURRENCY = {"monkeys": 0, "sharegpt": 64, "file": 0}  # 0: all at once


def _whole(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
        return int(text)

    return parse


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not more than 0")
    return value


def _json_object(text: str) -> dict[str, object]:
    try:
        value = orjson.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _base_url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} does not begin with http:// or https://")
    return text.rstrip("/")


def make_parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    server = common.add_argument_group("server")
    server.add_argument(
        "--base-url", type=_base_url, default="http://127.0.0.1:10210/v1", metavar="URL", help="default: %(default)s"
    )
    server.add_argument("--model", help="default: the first model that the server lists")
    server.add_argument(
        "--api-key",
        default=os.environ.get("OPENAI_API_KEY"),
        help="default: $OPENAI_API_KEY; not written to the output",
    )
    server.add_argument(
        "--usage-per-choice",
        action="store_true",
        help="usage.completion_tokens counts one of n choices, as llama.cpp's does: multiply it by n",
    )
    server.add_argument(
        "--extra-body",
        type=_json_object,
        default={},
        metavar="JSON",
        help="""fields for every request, such as '{"cache_prompt": false}'""",
    )
    load = common.add_argument_group("load")
    load.add_argument(
        "--concurrency",
        type=_whole(0),
        metavar="N",
        help="HTTP requests in flight (a request with n samples counts once); 0: all at once. Default: 64 for sharegpt,"
        " else 0",
    )
    load.add_argument(
        "--request-rate",
        type=_positive,
        metavar="PER_SECOND",
        help="send requests at Poisson arrivals of this rate. Then --concurrency defaults to 0, and latency counts from"
        " the arrival",
    )
    load.add_argument("--temperature", type=_number, default=0.6, metavar="T", help="default: %(default)s")
    load.add_argument(
        "--seed", type=_whole(0), default=0, metavar="N", help="seed of prompts, lengths and arrivals (default: 0)"
    )
    load.add_argument(
        "--warmup", type=_whole(0), default=1, metavar="N", help="requests before the measurement (default: 1)"
    )
    load.add_argument(
        "--timeout",
        type=_positive,
        default=7200.0,
        metavar="SECONDS",
        help="limit for one request (default: %(default)g)",
    )
    common.add_argument("--output", type=Path, metavar="FILE", help="write all measurements to FILE as JSON")

    generated = argparse.ArgumentParser(add_help=False)
    generated.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="every sample runs to its full length, and the server's token count must match (default: yes)",
    )
    generated.add_argument("--chat", action="store_true", help="use /chat/completions instead of /completions")

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput",
        description="Measure an OpenAI-compatible server under load. The exit code is 1 if a request failed.",
    )
    commands = parser.add_subparsers(dest="workload", required=True, metavar="WORKLOAD")
    monkeys = commands.add_parser(
        "monkeys", parents=[common, generated], help="many samples of few questions after one 8-shot prefix"
    )
    monkeys.add_argument("--questions", type=_whole(1), default=16, metavar="K", help="default: %(default)s")
    monkeys.add_argument(
        "--samples", type=_whole(1), default=32, metavar="N", help="samples of each question (default: %(default)s)"
    )
    monkeys.add_argument("--max-tokens", type=_whole(1), default=128, metavar="N", help="default: %(default)s")
    monkeys.add_argument(
        "--separate-samples", action="store_true", help="one request per sample, for servers without n"
    )
    sharegpt = commands.add_parser(
        "sharegpt", parents=[common, generated], help="unrelated requests with lognormal prompt and output lengths"
    )
    sharegpt.add_argument("--requests", type=_whole(1), default=200, metavar="K", help="default: %(default)s")
    sharegpt.add_argument(
        "--mean-tokens",
        type=_positive,
        default=220.0,
        metavar="N",
        help="mean length of prompts and of outputs (default: 220)",
    )
    sharegpt.add_argument("--cap", type=_whole(2), default=1024, metavar="N", help="longest length (default: 1024)")
    sharegpt.add_argument("--sigma", type=_positive, default=1.0, help="standard deviation of log(length) (default: 1)")
    sharegpt.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="tokenizer.json or its directory, to cut prompts to length"
    )
    sharegpt.add_argument(
        "--tokens-per-word",
        type=_positive,
        default=workloads.TOKENS_PER_WORD,
        metavar="R",
        help="used to cut prompts if there is no --tokenizer (default: %(default)s, measured with SmolLM2)",
    )
    file = commands.add_parser(
        "file",
        parents=[common],
        help="requests from a JSONL file",
        description='Each line: {"prompt" or "messages", "max_tokens", and optionally "n", "temperature", "ignore_eos",'
        ' "arrival_s" (seconds from the start)}.',
    )
    file.add_argument("path", type=Path)
    file.add_argument("--ignore-eos", action="store_true", help="default for lines without ignore_eos")
    return parser


def build_requests(args: argparse.Namespace) -> list[OfferedRequest]:
    """Requests of the workload that the arguments describe. Raises ValueError and OSError."""
    if args.workload == "monkeys":
        requests = workloads.monkeys(
            args.questions,
            args.samples,
            args.max_tokens,
            args.temperature,
            args.ignore_eos,
            args.separate_samples,
            args.seed,
        )
    elif args.workload == "sharegpt":
        by_words = args.tokenizer is None
        cut = workloads.cut_by_words(args.tokens_per_word) if by_words else workloads.cut_by_tokenizer(args.tokenizer)
        requests = workloads.sharegpt(
            args.requests, args.mean_tokens, args.sigma, args.cap, args.temperature, args.ignore_eos, cut, args.seed
        )
    else:
        requests = workloads.read_file(args.path, args.temperature, args.ignore_eos)
    if args.workload != "file" and args.chat:
        requests = [workloads.as_chat(request) for request in requests]
    if args.request_rate is not None:
        if requests[0].arrival_s is not None:
            raise ValueError("--request-rate is not allowed: the file has arrival times")
        requests = workloads.with_poisson_arrivals(requests, args.request_rate, args.seed)
    return requests


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[OfferedRequest]]:
    """Arguments and the requests they describe. Ends the process with exit code 2 if an argument is wrong."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.concurrency is None:
        args.concurrency = DEFAULT_CONCURRENCY[args.workload] if args.request_rate is None else 0
    if args.output is not None and not args.output.parent.is_dir():
        parser.error(f"argument --output: there is no directory {args.output.parent}")
    try:
        return args, build_requests(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))


async def _warm_up(client: Client, model: str, count: int, chat: bool) -> None:
    """Send `count` short requests that share nothing with the workload. Raises ServerError if one fails."""
    request = OfferedRequest({"prompt": "What does a dinosaur eat?"}, 1, 8, 0.0, ignore_eos=False)
    requests = [workloads.as_chat(request) if chat else request] * count
    for result in await client.offer(requests, model, concurrency=None):
        if result.error is not None:
            raise ServerError(f"the warm-up request failed: {result.error}")


async def measure(args: argparse.Namespace, requests: list[OfferedRequest]) -> Report:
    """Warm up, send the requests and report. Raises ServerError."""
    options = ClientOptions(args.base_url, args.api_key, args.timeout, args.usage_per_choice, args.extra_body)
    async with open_client(options) as client:
        model = await client.find_model() if args.model is None else args.model
        server = {"model": model, "version": await client.version()}
        await _warm_up(client, model, args.warmup, chat="messages" in requests[0].content)
        machine, started_at = machine_facts("aiohttp"), utc_now()
        with counting_bar("requests", len(requests)) as advance:
            cpu_start_s = time.process_time()
            results = await client.offer(requests, model, args.concurrency or None, advance)
            client_cpu_s = time.process_time() - cpu_start_s
    return Report(
        config=config_of(args),
        started_at=started_at,
        machine=machine,
        server=server,
        summary=summarize(results),
        client_cpu_s=client_cpu_s,
        requests=results,
    )
