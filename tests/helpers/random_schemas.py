"""Random JSON schemas made of supported keywords; every schema can be satisfied."""

import random
import string
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]


def random_schema(seed: int) -> Schema:
    """A schema for an object, as OpenAI requires, with definitions, one of which is recursive."""
    rng = random.Random(seed)
    schema = _object(rng, 3)
    schema["$defs"] = {
        "leaf": _leaf(rng),
        "tree": {
            "type": "object",
            "properties": {
                "value": {"$ref": "#/$defs/leaf"},
                "children": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/tree"}},
            },
            "required": ["value"],
            "additionalProperties": False,
        },
    }
    return schema


def _any(rng: random.Random, depth: int) -> Schema:
    if depth == 0:
        return _leaf(rng)
    kinds: list[Callable[[random.Random, int], Schema]] = [_object, _array, _any_of, _reference, _map]
    return rng.choice([*kinds, lambda rng, _: _leaf(rng)])(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["a", "b", "name", "größe", 'quo"te', "x y"], rng.randint(1, 4))
    schema: Schema = {"type": "object", "properties": {name: _any(rng, depth) for name in names}}
    schema["required"] = rng.sample(names, rng.randint(0, len(names)))
    schema["additionalProperties"] = False if rng.random() < 0.9 else _leaf(rng)
    return schema


def _map(rng: random.Random, depth: int) -> Schema:
    names = {"^[a-c]{1,3}$": _any(rng, depth)}
    return {"type": "object", "patternProperties": names, "additionalProperties": False, "maxProperties": 2}


def _array(rng: random.Random, depth: int) -> Schema:
    fewest = rng.randint(0, 2)
    schema: Schema = {"type": "array", "minItems": fewest, "maxItems": fewest + rng.randint(0, 3)}
    if rng.random() < 0.3:
        schema["prefixItems"] = [_any(rng, depth) for _ in range(rng.randint(1, 2))]
    schema["items"] = _any(rng, depth)
    return schema


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(1, 3))]}


def _reference(rng: random.Random, _depth: int) -> Schema:
    return {"$ref": rng.choice(["#/$defs/leaf", "#/$defs/tree"])}


def _leaf(rng: random.Random) -> Schema:
    low = rng.randint(-1000, 1000)
    text = "".join(rng.choices(string.printable + "é€😀", k=rng.randint(0, 6)))
    return rng.choice(
        [
            {"type": "string", "minLength": low % 4, "maxLength": low % 4 + 3},
            {
                "type": "string",
                "pattern": rng.choice(["^[a-z]{2,5}$", r"^\d{3}-\d{2}$", "^(ab|cd)+$", "x"]),
                "maxLength": 9,
            },
            {"type": "string", "format": rng.choice(["uuid", "ipv4"])},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 50)},
            {"type": "integer", "exclusiveMinimum": low, "multipleOf": rng.choice([2, 5])},
            {"type": "number", "minimum": low / 8, "exclusiveMaximum": low / 8 + 10},
            {"type": ["boolean", "null"]},
            {"const": rng.choice([text, low, low / 4, None, [text, True], {"k": text}])},
            {"enum": [text, low, True, None, [low]]},
        ]
    )
