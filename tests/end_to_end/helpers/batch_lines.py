"""Input files with lines of many kinds, and what is wrong with a batch's results."""

import random
from collections import Counter
from typing import Any

import orjson

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
_MAX_TOKENS = 24
_REFUSED_SHARE = 0.01
_TOO_LONG = 100_000


def input_file(endpoint: str, num_lines: int) -> bytes:
    return b"".join(orjson.dumps(_line(endpoint, number)) + b"\n" for number in range(num_lines))


def _line(endpoint: str, number: int) -> dict[str, Any]:
    """One in a hundred is refused; of the others, half have n=3, half a seed, and half the temperature 1."""
    rng = random.Random(number)
    text = f"Tell story {number}"
    body: dict[str, Any] = {
        "model": "default",
        "max_tokens": _TOO_LONG if rng.random() < _REFUSED_SHARE else rng.randint(1, _MAX_TOKENS),
        "n": rng.choice((1, 3)),
        "temperature": rng.choice((0, 1)),
    }
    body |= {"messages": [{"role": "user", "content": text}]} if "chat" in endpoint else {"prompt": text}
    if rng.random() < 0.5:
        body["seed"] = number
    return {"custom_id": f"line {number}", "method": "POST", "url": endpoint, "body": body}


def find_faults(
    batch: dict[str, Any], results: list[dict[str, Any]], expected: list[dict[str, Any]], num_lines: int
) -> list[str]:
    """What is wrong with a completed batch of `input_file`; expected: the results of an undisturbed run."""
    faults = []
    counts = Counter(result["custom_id"] for result in results)
    wanted = {f"line {number}" for number in range(num_lines)}
    faults += [f"{custom_id}: {count} results" for custom_id, count in counts.items() if count > 1]
    faults += [f"{custom_id}: no result" for custom_id in wanted - counts.keys()]
    faults += [f"{custom_id}: not asked for" for custom_id in counts.keys() - wanted]
    if len({result["id"] for result in results}) < len(results):
        faults.append("two results have one id")
    right = {result["custom_id"]: _comparable(result) for result in expected}
    for result in results:
        found = _comparable(result)
        if found != right.get(result["custom_id"]):
            faults.append(f"{result['custom_id']}: {found}, expected {right.get(result['custom_id'])}")
    bodies = [result["response"]["body"] for result in results if _status(result) == 200]
    faults += _wrong("usage", batch["usage"], _sum_usage(bodies))
    num_failed = len(results) - len(bodies)
    request_counts = {"total": num_lines, "completed": num_lines - num_failed, "failed": num_failed}
    faults += _wrong("request_counts", batch["request_counts"], request_counts)
    return faults


def _comparable(result: dict[str, Any]) -> tuple[object, ...]:
    """All of a result that does not depend on the run."""
    body = {} if result["response"] is None else result["response"]["body"]
    return (_status(result), result["error"], body.get("choices"), body.get("error"))


def _status(result: dict[str, Any]) -> int | None:
    """None if the line was not run."""
    return None if result["response"] is None else int(result["response"]["status_code"])


def _sum_usage(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """In the form of a batch's usage."""
    usages = [body["usage"] for body in bodies]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return {
        "input_tokens": sum(usage["prompt_tokens"] for usage in usages),
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": sum(usage["completion_tokens"] for usage in usages),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": sum(usage["total_tokens"] for usage in usages),
    }


def _wrong(name: str, found: object, expected: object) -> list[str]:
    return [] if found == expected else [f"{name}: {found}, expected {expected}"]
