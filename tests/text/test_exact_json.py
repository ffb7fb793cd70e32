"""JSON that is read and written exactly, against Python's json."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokasaurus.text.exact_json import dumps, loads

LONG = st.integers(-(10**60), 10**60) | st.sampled_from(
    [sign * 2**power + offset for sign in (-1, 1) for power in (53, 63, 64) for offset in (-1, 0, 1)]
)
SCALARS = st.none() | st.booleans() | st.text(st.characters(exclude_categories=["Cs"])) | LONG
LEAVES = SCALARS | st.floats(allow_nan=False, allow_infinity=False)
NAMES = st.text("ab0123456789", max_size=30)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4))
SPELLINGS = [
    "1.0",
    "1",
    "-0",
    "-0.0",
    "1E5",
    "1e-400",
    "0.1000000000000000055511151231257827",
    "12345678901234567890e1",
]


def types(value: Any) -> Iterator[type]:
    yield type(value)
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from types(item)


@given(VALUES, st.booleans())
@example([10**4000 // 10**3692], True)
def test_values_are_read_and_written_as_by_pythons_json(value: Any, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    for content in (text, text.encode(), bytearray(text.encode())):
        read = loads(content)
        assert (read, list(types(read))) == (value, list(types(value)))
    assert json.loads(dumps(value)) == value


@pytest.mark.parametrize("number", SPELLINGS)
@pytest.mark.parametrize("beside", ["0", str(10**30)])
def test_numbers_of_every_spelling_have_the_value_that_python_reads(number: str, beside: str) -> None:
    (read, _), (wanted, _) = loads(f"[{number}, {beside}]"), json.loads(f"[{number}, {beside}]")
    assert (type(read), read, math.copysign(1, read)) == (type(wanted), wanted, math.copysign(1, wanted))


@pytest.mark.parametrize("wrong", ["NaN", "-Infinity", "1e400", "9" * 309, '"\\ud800"', "[1,]", "01", "\ufeff1"])
@pytest.mark.parametrize("beside", ["0", str(10**30)])
def test_what_orjson_refuses_is_refused(wrong: str, beside: str) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        loads(f"[{beside}, {wrong}]")


def nested(depth: int) -> str:
    return "[" * depth + str(10**30) + "]" * depth


@pytest.mark.parametrize("depth", [150, 300])
def test_long_integers_in_deep_nesting_are_exact(depth: int) -> None:
    value = loads(nested(depth))
    for _ in range(depth):
        (value,) = value
    assert value == 10**30


def test_long_integers_in_the_deepest_nesting_are_refused() -> None:
    with pytest.raises(orjson.JSONDecodeError, match="nested too deeply beside a number of 19 digits"):
        loads(nested(1_000))
    with pytest.raises(TypeError):
        dumps([[10**30], orjson.loads(nested(1_000))])


def test_objects_and_options_are_written_as_orjson_does() -> None:
    @dataclass(slots=True)
    class Answer:
        name: str
        value: Any
        _hidden: int = 7

    long, short = ({"b": Answer("x", [value, (1, None)]), "a": math.nan} for value in (10**30, 10**3))
    options = orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2
    for option in (None, options):
        assert dumps(long, option=option).replace(b"0" * 30, b"000") == orjson.dumps(short, option=option)
    assert dumps([{1}, 10**30], default=list) == b"[[1],1%b]" % (b"0" * 30)
    for value in (object(), "\ud800", 10**400, {1: 2}):
        with pytest.raises(TypeError):
            dumps([10**30, value])
