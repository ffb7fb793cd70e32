"""What a soak asks for. The expected texts are those of the same server while it was quiet."""

import json
import random
import re
from typing import Any

from torture.helpers.soak_client import (
    BULK,
    CHAT,
    COMPLETIONS,
    Load,
    SoakClient,
    WrongAnswer,
    texts,
)

NUM_BODIES = 24
NUM_SHORT = 16
"""Of these bodies, the first ask for a few tokens: lines of bulk requests."""
LINES_PER_BULK = 2000
NUM_SCHEMAS = 50
LOGPROB_TOLERANCE = 1e-3


def make_body(number: int) -> tuple[str, dict[str, Any]]:
    """The path and body of one of NUM_BODIES requests; some are greedy, some sampled."""
    body: dict[str, Any] = {"model": "default", "seed": number, "temperature": number % 2}
    body["max_tokens"] = 1 + number % 8 if number < NUM_SHORT else 40 + number
    if number % 3 == 2:
        return CHAT, body | {"messages": [{"role": "user", "content": f"Tell me story {number} of {number % 5}"}]}
    return COMPLETIONS, body | {"prompt": f"Story {number}: once upon a time " * (1 + number % 3), "n": 1 + number % 2}


def echo_body(number: int) -> dict[str, Any]:
    return {"model": "default", "prompt": f"Echo {number} " * (2 + number), "max_tokens": 1, "temperature": 0}


async def learn(client: SoakClient) -> None:
    """Asks for the expected texts and logprobs, one request at a time."""
    for number in range(NUM_BODIES):
        client.expected[number] = texts(await client.ask(*make_body(number)))
    for number in range(8):
        answer = await client.ask(COMPLETIONS, echo_body(number) | {"echo": True, "logprobs": 5})
        client.expected_logprobs[number] = answer["choices"][0]["logprobs"]["token_logprobs"][1:]


async def whole_answers(client: SoakClient, rng: random.Random) -> None:
    number = rng.randrange(NUM_BODIES)
    _check_texts(client, number, texts(await client.ask(*make_body(number))))


async def whole_streams(client: SoakClient, rng: random.Random) -> None:
    number = rng.choice([number for number in range(NUM_BODIES) if make_body(number)[0] == COMPLETIONS])
    path, body = make_body(number)
    found = [""] * body["n"]
    async for event in client.events(path, body):
        for choice in event["choices"]:
            found[choice["index"]] += choice["text"]
    _check_texts(client, number, found)


async def cancelled_streams(client: SoakClient, rng: random.Random) -> None:
    body = {"model": "default", "prompt": f"Cancelled {rng.randrange(1000)}", "n": 4, "max_tokens": 300}
    num_events = rng.randrange(1, 60)
    events = client.events(COMPLETIONS, body | {"ignore_eos": True})
    try:
        async for _ in events:
            num_events -= 1
            if not num_events:
                break
    finally:
        await events.aclose()


async def bulk_lines(client: SoakClient, rng: random.Random) -> None:
    """Each custom_id exactly once, with its text."""
    numbers = {f"line-{line}": rng.randrange(NUM_SHORT) for line in range(LINES_PER_BULK)}
    lines = []
    for custom_id, number in numbers.items():
        path, body = make_body(number)
        lines.append(json.dumps({"custom_id": custom_id, "url": path, "body": body}))
    async with client.post(BULK, "\n".join(lines).encode()) as answer:
        results = [json.loads(line) for line in (await answer.read()).splitlines()]
    found = sorted(result["custom_id"] for result in results)
    if found != sorted(numbers):
        raise WrongAnswer(f"{len(found)} results with {len(set(found))} ids for {len(numbers)} lines")
    for result in results:
        if result["error"] is not None:
            raise WrongAnswer(f"a line failed: {result['error']}")
        _check_texts(client, numbers[result["custom_id"]], texts(result["response"]["body"]))
    client.tally.counts["lines of bulk requests"] += len(results)


async def grammars(client: SoakClient, rng: random.Random) -> None:
    """A few fixed grammars, and many schemas."""
    name = f"count_{rng.randrange(NUM_SCHEMAS)}"
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 999}, "ok": {"type": "boolean"}},
        "required": [name, "ok"],
        "additionalProperties": False,
    }
    pattern = r"[a-z]{2,5}@[a-z]{1,9}\.(com|org)"
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    kinds: list[tuple[str, dict[str, object]]] = [
        ("choice", {"guided_choice": ["yes", "no", "never"]}),
        ("regex", {"guided_regex": pattern}),
        ("json", {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}),
        ("json", {"response_format": form}),
    ]
    kind, fields = rng.choice(kinds)
    common = {"model": "default", "max_tokens": 150, "seed": rng.randrange(1000), "n": 2} | fields
    if rng.random() < 0.5:
        answer = await client.ask(COMPLETIONS, common | {"prompt": "An answer: "})
    else:
        answer = await client.ask(CHAT, common | {"messages": [{"role": "user", "content": "An answer"}]})
    for text, choice in zip(texts(answer), answer["choices"], strict=True):
        if choice["finish_reason"] == "length":
            is_right = kind == "json"  # white space has no end
        elif kind == "json":
            value = json.loads(text)
            is_right = set(value) == {name, "ok"} and 0 <= value[name] <= 999 and isinstance(value["ok"], bool)
        else:
            is_right = re.fullmatch(pattern if kind == "regex" else "yes|no|never", text) is not None
        if not is_right:
            raise WrongAnswer(f"{kind}: {text!r}, {choice['finish_reason']}")


async def echoes(client: SoakClient, rng: random.Random) -> None:
    """echo with logprobs, or prompt_logprobs: the same numbers as in the beginning."""
    number = rng.choice(sorted(client.expected_logprobs))
    body, expected = echo_body(number), client.expected_logprobs[number]
    if rng.random() < 0.5:
        answer = await client.ask(COMPLETIONS, body | {"echo": True, "logprobs": 5})
        found = answer["choices"][0]["logprobs"]["token_logprobs"][1:]
    else:
        answer = await client.ask(COMPLETIONS, body | {"prompt_logprobs": 3})
        ids = list(body["prompt"].encode())
        entries = answer["choices"][0]["prompt_logprobs"]
        if entries[0] is not None or len(entries) != len(ids):
            raise WrongAnswer(f"{len(entries)} entries of prompt_logprobs for {len(ids)} tokens")
        # the prompt's own token is the first key of its entry
        found = [next(iter(entry.values()))["logprob"] for entry in entries[1:]]
        expected = expected[: len(found)]
    pairs = list(zip(found, expected, strict=True))
    if any(abs(one - other) > LOGPROB_TOLERANCE for one, other in pairs):
        raise WrongAnswer(f"logprobs of echo {number}: {found[:5]}…, not {expected[:5]}…")


async def many_samples(client: SoakClient, rng: random.Random) -> None:
    count = rng.choice([500, 1000, 2000])
    body = {"model": "default", "prompt": "Many", "n": count, "max_tokens": 2, "ignore_eos": True}
    if rng.random() < 0.5:
        found = [choice["index"] for choice in (await client.ask(COMPLETIONS, body))["choices"]]
    else:
        found = []
        async for event in client.events(COMPLETIONS, body):
            found += [choice["index"] for choice in event["choices"] if choice["finish_reason"]]
    if sorted(found) != list(range(count)):
        raise WrongAnswer(f"{len(found)} answers with {len(set(found))} numbers for n={count}")


LOADS: list[Load] = [
    *[whole_answers] * 4,
    *[whole_streams] * 2,
    *[cancelled_streams] * 3,
    *[bulk_lines] * 2,
    *[grammars] * 2,
    *[echoes] * 2,
    many_samples,
]
"""All run at once, each again and again."""


def _check_texts(client: SoakClient, number: int, found: list[str]) -> None:
    if found != client.expected[number]:
        raise WrongAnswer(f"body {number}: {found!r}, not {client.expected[number]!r}")
