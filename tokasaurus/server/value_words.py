"""What pydantic finds wrong with a value, in the words of this server's own checks: what the value must be.

Each is read after the field's name. Several problems in one message.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic_core import ErrorDetails

MAX_ECHO_CHARS = 100
"""Characters of a client's text that an error message repeats."""

_WORDS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than": lambda limits: f"must be greater than {_number(limits['gt'])}",
    "greater_than_equal": lambda limits: f"must be at least {_number(limits['ge'])}",
    "less_than": lambda limits: f"must be less than {_number(limits['lt'])}",
    "less_than_equal": lambda limits: f"must be at most {_number(limits['le'])}",
    "finite_number": lambda _: "must be a finite number",
    "int_type": lambda _: "must be a whole number",
    "int_from_float": lambda _: "must be a whole number",
    "int_parsing": lambda _: "must be a whole number",
    "int_parsing_size": lambda _: "must be a whole number with fewer digits",
    "float_type": lambda _: "must be a number",
    "float_parsing": lambda _: "must be a number",
    "bool_type": lambda _: "must be true or false",
    "bool_parsing": lambda _: "must be true or false",
    "string_type": lambda _: "must be a string",
    "string_unicode": lambda _: "must be valid Unicode",
    "string_too_short": lambda limits: _fewest(limits["min_length"], "character"),
    "string_too_long": lambda limits: f"may have at most {limits['max_length']} characters",
    "string_pattern_mismatch": lambda limits: f"must match the regular expression {limits['pattern']}",
    "list_type": lambda _: "must be a list",
    "tuple_type": lambda _: "must be a list",
    "dict_type": lambda _: "must be an object",
    "model_type": lambda _: "must be an object",
    "model_attributes_type": lambda _: "must be an object",
    "dataclass_type": lambda _: "must be an object",
    "too_short": lambda limits: _fewest(limits["min_length"], "item"),
    "too_long": lambda limits: f"may have at most {limits['max_length']} items",
    "literal_error": lambda limits: f"must be {_as_json(limits['expected'])}",
    "enum": lambda limits: f"must be {_as_json(limits['expected'])}",
    "none_required": lambda _: "must be null",
    "union_tag_not_found": lambda limits: f"must have a {_as_json(limits['discriminator'])}",
    "union_tag_invalid": lambda limits: (
        f"must have {_as_json(limits['expected_tags'])} as its {_as_json(limits['discriminator'])}"
    ),
}


MAX_TOLD = 10
"""Problems that one message lists."""
MAX_COUNTED = 100
"""Unknown fields of one object that are looked at."""


def told_together(problems: Sequence[str], num_more: int = 0) -> str:
    """problems: one at least, each a sentence. num_more: how many others there are."""
    told = problems[:MAX_TOLD]
    num_problems = len(problems) + num_more
    if num_problems == 1:
        return told[0]
    listed = "; ".join(f"({number}) {problem}" for number, problem in enumerate(told, 1))
    if num_problems >= MAX_COUNTED:
        return f"at least {MAX_COUNTED} problems: {listed}; and more"
    num_left = num_problems - len(told)
    return f"{num_problems} problems: {listed}" + (f"; and {num_left} more" if num_left else "")


def words_for(details: ErrorDetails) -> str:
    """details: with its context."""
    words = _WORDS.get(details["type"])
    if words is not None:
        return words(details.get("ctx", {}))
    return re.sub(r"^(Value error, |Input should )", "must ", details["msg"])


def _number(limit: float) -> str:
    """Large ones as they are: `g` would round them."""
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def _fewest(count: int, unit: str) -> str:
    return "must not be empty" if count == 1 else f"must have at least {count} {unit}s"


def _as_json(expected: str) -> str:
    """Python's texts and constants, as pydantic lists them, as a body writes them."""
    written = re.sub(r"'([^']*)'", r'"\1"', expected)
    for python, json in (("True", "true"), ("False", "false"), ("None", "null")):
        written = re.sub(rf"\b{python}\b", json, written)
    return written
