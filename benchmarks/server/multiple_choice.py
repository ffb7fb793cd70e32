"""Counts the prompt tokens computed for multiple-choice questions: each context is sent once with each option.

`python -m benchmarks.server.multiple_choice --help`. Works only with a server of this project, whose counters it reads.
"""

import argparse
import asyncio
import itertools
import os
import random
import re
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx
import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.results import make_console
from benchmarks.server.own_server import running_server
from benchmarks.server.target import Target
from tokasaurus.commands.bench.client import UNREACHABLE, ServerError
from tokasaurus.commands.bench.results import counting_bar, print_error
from tokasaurus.commands.bench.workloads import DATA, load_jsonl

NUM_OPTIONS = 4
COMPUTED_TOKENS = "toka_computed_prompt_tokens_total"
"""The server's counter of computed prompt tokens."""
RATIO_LIMIT = 1.15
"""Most tokens computed per distinct token, if requests share prefixes."""

TIMEOUT_S = 3600.0
SHARED, NOT_SHARED = "prefixes shared", "nothing shared"


@dataclass(frozen=True, slots=True)
class Question:
    """One multiple-choice question, in token ids."""

    context: list[int]
    """Solved questions, followed by one question without its answer."""
    options: list[list[int]]
    """Answers to that question, the right one first."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Prompt tokens and time of one request per option of every question."""

    name: str
    asked: int
    """Prompt tokens of all requests."""
    distinct: int
    """Fewest tokens that could be computed: see `count_distinct`."""
    computed: int
    """Prompt tokens computed, as the answers' usage adds up."""
    counted: int
    """Prompt tokens computed, as the server's own counter grew; must equal `computed`."""
    wall_s: float
    logprobs: list[float]
    """Log-probability of each option, in the order of the questions."""

    @property
    def ratio(self) -> float:
        """Computed tokens per distinct token."""
        return self.computed / self.distinct


def make_questions(
    num_questions: int, context_tokens: int, seed: int, encode: Callable[[str], list[int]]
) -> list[Question]:
    """Questions whose contexts have nearly `context_tokens` tokens, never more, of solved questions in random order."""
    lines = load_jsonl(DATA / "gsm8k_test_200.jsonl")
    numbers = [line["answer"].split("#### ")[1] for line in lines]
    answers = [re.sub("<<.*?>>", "", line["answer"]).replace("\n####", "\nThe answer is") for line in lines]
    unsolved = [encode(f"Question: {line['question']}\nAnswer:") for line in lines]
    solved = [ids + encode(f" {answer}\n\n") for ids, answer in zip(unsolved, answers, strict=True)]
    options = {number: encode(f" The answer is {number}") for number in numbers}
    chance = random.Random(seed)

    def make_question(index: int) -> Question:
        context: list[int] = []
        for other in chance.sample(range(len(lines)), len(lines)):
            if other != index and len(context) + len(solved[other]) + len(unsolved[index]) <= context_tokens:
                context += solved[other]
        wrong = chance.sample([number for number in options if number != numbers[index]], NUM_OPTIONS - 1)
        return Question(context + unsolved[index], [options[number] for number in (numbers[index], *wrong)])

    return [make_question(index % len(lines)) for index in range(num_questions)]


def count_distinct(prompts: Sequence[list[int]]) -> int:
    """Number of nodes in the trie of all prompts: the fewest tokens that must be computed if prefixes are shared."""
    ordered = sorted(prompts)
    return sum(map(len, ordered)) - sum(itertools.starmap(_count_common, itertools.pairwise(ordered)))


def _count_common(first: list[int], second: list[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(first), len(second)))


def make_body(prompt: list[int], cache_salt: str) -> bytes:
    """The request body that lm-eval's local-completions sends, with a cache_salt."""
    asked = {"prompt": [prompt], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    return orjson.dumps({"model": "default", **asked, "cache_salt": cache_salt})


def read_logprob(answer: dict[str, Any], num_context: int, num_prompt: int) -> float:
    """Log-probability of the tokens after the context, summed as lm-eval does. Raises ServerError."""
    values = answer["choices"][0]["logprobs"]["token_logprobs"]
    if len(values) != num_prompt + 1 or values[0] is not None or None in values[1:]:
        raise ServerError(
            f"token_logprobs must be null for the first token and numbers for the {num_prompt} after it, but there are"
            f" {len(values)} log-probabilities: {values[:3]}…"
        )
    return float(sum(values[num_context:-1]))


async def ask_all(
    target: Target, bodies: Sequence[bytes], concurrency: int, on_answer: Callable[[], None]
) -> list[dict[str, Any]]:
    """Answers in the order of the bodies. Raises ServerError if a request fails."""
    headers = {"Authorization": f"Bearer {target.api_key}", "Content-Type": "application/json"}
    timeout = aiohttp.ClientTimeout(TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=concurrency)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:

        async def ask(body: bytes) -> dict[str, Any]:
            try:
                async with session.post(f"{target.base_url}/completions", data=body) as response:
                    payload = await response.read()
            except UNREACHABLE as error:
                raise ServerError(f"{target.base_url}/completions: {error!r}") from None
            if response.status != 200:
                raise ServerError(f"HTTP {response.status}: {payload[:300].decode(errors='replace')}")
            on_answer()
            answer: dict[str, Any] = orjson.loads(payload)
            return answer

        return await asyncio.gather(*map(ask, bodies))


def measure(
    name: str,
    target: Target,
    questions: Sequence[Question],
    concurrency: int,
    make_salt: Callable[[], str],
    on_answer: Callable[[], None] = lambda: None,
) -> Cost:
    """Send all options, long prompts first as lm-eval does. make_salt: cache_salt of a request. Raises ServerError."""
    entries = [
        (len(question.context), question.context + option) for question in questions for option in question.options
    ]
    order = sorted(range(len(entries)), key=lambda index: (-len(entries[index][1]), entries[index][1]))
    bodies = [make_body(entries[index][1], make_salt()) for index in order]
    before, started = int(target.counter(COMPUTED_TOKENS)), time.perf_counter()
    answers = asyncio.run(ask_all(target, bodies, concurrency, on_answer))
    wall_s = time.perf_counter() - started
    in_order = dict(zip(order, answers, strict=True))
    prompts = [prompt for _, prompt in entries]
    return Cost(
        name=name,
        asked=sum(map(len, prompts)),
        distinct=count_distinct(prompts),
        computed=sum(answer["usage"]["prompt_tokens_details"]["computed_tokens"] for answer in answers),
        counted=int(target.counter(COMPUTED_TOKENS)) - before,
        wall_s=wall_s,
        logprobs=[
            read_logprob(in_order[index], num_context, len(prompt))
            for index, (num_context, prompt) in enumerate(entries)
        ],
    )


def run(target: Target, args: argparse.Namespace) -> list[Cost]:
    """Measure with shared prefixes, then with nothing shared, with new cache salts. Raises ServerError."""
    headers = {"Authorization": f"Bearer {target.api_key}"}
    with httpx.Client(base_url=target.base_url.removesuffix("/v1"), headers=headers, timeout=TIMEOUT_S) as client:

        def encode(text: str) -> list[int]:
            try:
                answer = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
                answer.raise_for_status()
            except httpx.HTTPError as error:
                raise ServerError(f"{client.base_url}/tokenize: {error!r}") from None
            token_ids: list[int] = answer.json()["tokens"]
            return token_ids

        questions = make_questions(args.contexts, args.tokens, args.seed, encode)
    salt = secrets.token_hex(8)
    costs = []
    for name, make_salt in ((SHARED, lambda: salt), (NOT_SHARED, lambda: secrets.token_hex(8))):
        with counting_bar(name, NUM_OPTIONS * len(questions)) as advance:
            costs.append(measure(name, target, questions, args.concurrency, make_salt, advance))
    return costs


def print_costs(costs: Sequence[Cost], console: Console) -> None:
    table = Table(title="Prompt tokens of multiple choice", title_justify="left")
    for column in ("", "asked", "distinct", "computed", "server's counter", "computed / distinct", "wall, s"):
        table.add_column(column, justify="right" if column else "left")
    for cost in costs:
        numbers = (cost.asked, cost.distinct, cost.computed, cost.counted)
        table.add_row(cost.name, *(f"{number:,}" for number in numbers), f"{cost.ratio:.3f}", f"{cost.wall_s:.1f}")
    console.print(table)
    differences = [abs(first - second) for first, second in zip(costs[0].logprobs, costs[1].logprobs, strict=True)]
    num_changed = sum(one != other for one, other in zip(*(choose(cost.logprobs) for cost in costs), strict=True))
    console.print(
        f"An option's log-probability differs by at most {max(differences):.2g} between the two runs; "
        f"{num_changed} of {len(choose(costs[0].logprobs))} questions have another answer.",
        highlight=False,
    )


def choose(logprobs: Sequence[float]) -> list[int]:
    """Most probable option of each question; the first one if several are equal."""
    options = range(NUM_OPTIONS)
    return [max(options, key=lambda option: logprobs[start + option]) for start in range(0, len(logprobs), NUM_OPTIONS)]


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 if a request failed, the counts disagree, or --check was given and the limit missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.server.multiple_choice",
        description="Score four options per context as lm-eval does, with prefixes shared and with nothing shared.",
    )
    parser.add_argument("flags", nargs="*", metavar="FLAG=VALUE", help="flags of the server that this command starts")
    parser.add_argument("--base-url", metavar="URL", help="use a running server, such as http://127.0.0.1:10210/v1")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "none"), help="default: $OPENAI_API_KEY")
    parser.add_argument("--contexts", type=int, default=100, metavar="N", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=1000, metavar="N", help="longest context; default: %(default)s")
    parser.add_argument(
        "--concurrency", type=int, default=64, metavar="N", help="requests in flight; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--check", action="store_true", help=f"exit with 1 if computed / distinct is above {RATIO_LIMIT}"
    )
    args = parser.parse_args(argv)
    if args.base_url and args.flags:
        parser.error("give either flags for a new server, or --base-url for a running one")
    if min(args.contexts, args.tokens, args.concurrency) < 1:
        parser.error("--contexts, --tokens and --concurrency must be at least 1")
    try:
        with nullcontext(args.base_url) if args.base_url else running_server(args.flags) as base_url:
            costs = run(Target(base_url.rstrip("/"), args.api_key), args)
    except ServerError as error:
        print_error(error)
        return 1
    print_costs(costs, make_console(120))
    agree = all(cost.computed == cost.counted for cost in costs)
    return 0 if agree and (costs[0].ratio <= RATIO_LIMIT or not args.check) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
