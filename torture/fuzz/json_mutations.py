"""Seeded changes of JSON values: types, sizes, nesting, text that is not valid UTF-8."""

import copy
import json
import random
from typing import Any

STRANGE_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e308, 1e-320, 2**31, 2**40, 2**63, 2**64, 10**400, -(2**63)),
    *(float("nan"), float("inf"), -float("inf"), "", " ", "0", "x" * 3000, "\ud800", "\0", "\x1b[2J", "..", "/"),
    *("null", "{{ x }}", "\U0001f99c" * 50, [], {}, [[]], [None], {"": {}}, [1, "a", None], list(range(2000))),
]


def nest(rng: random.Random, value: Any) -> Any:
    """The value inside up to 3,000 lists or objects: more than Python's recursion limit."""
    for _ in range(rng.choice([1, 5, 100, 900])):
        value = [value] if rng.random() < 0.5 else {rng.choice(["a", "type", "items", "content"]): value}
    return value


def mutate(value: Any, rng: random.Random, num_changes: int | None = None) -> Any:
    """A changed copy. num_changes: None draws one to three."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3) if num_changes is None else num_changes):
        value = _change(value, rng)
    return value


def encode(value: Any, rng: random.Random) -> bytes:
    """JSON text; sometimes with NaN, lone surrogates, doubled keys, or bytes that are no JSON at all."""
    try:
        content = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    except RecursionError:  # nested several times
        content = b'{"a": [' * 2000
    kind = rng.random()
    if kind < 0.85 or not content:
        return content
    position = rng.randrange(len(content))
    if kind < 0.90:
        return content[:position]
    if kind < 0.95:
        return content[:position] + rng.choice([b"\xff", b"\x00", b"\xed\xa0\x80", b"\\", b'"', b"}", b"[" * 3000])
    return content[:position] + rng.randbytes(rng.randint(1, 8)) + content[position + 1 :]


def _change(value: Any, rng: random.Random) -> Any:
    """Replaces, deletes, doubles, renames or nests a value at a random place."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        kind = rng.random()
        if kind < 0.12:
            del value[key]
        elif kind < 0.20:
            value[rng.choice(["", "x", key + "_", "\ud800", "type", "id"])] = value[key]
        else:
            value[key] = _change(value[key], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.9:
        index = rng.randrange(len(value))
        kind = rng.random()
        if kind < 0.12:
            del value[index]
        elif kind < 0.25:
            value += [value[index]] * rng.choice([1, 3, 50])
        else:
            value[index] = _change(value[index], rng)
        return value
    if rng.random() < 0.1:
        return nest(rng, value)
    # Often of the same type, so that more than the check of types sees it.
    if isinstance(value, bool) and rng.random() < 0.6:
        return not value
    if isinstance(value, int) and rng.random() < 0.6:
        return rng.choice([value + 1, value - 1, -value, value * 2**20, 0, 3, str(value)])
    if isinstance(value, float) and rng.random() < 0.6:
        return rng.choice([0.0, 1.0, value * 2, -value, value * 1e-9, 1])
    if isinstance(value, str) and rng.random() < 0.6:
        cut = rng.randint(0, len(value))
        return value[:cut] + rng.choice(["", "\0", "\ud800", "é", "\n", "{", "<|im_start|>"]) + value[cut:]
    return copy.deepcopy(rng.choice(STRANGE_VALUES))
