"""JsonScanner, compared with json.loads."""

import json
from typing import Any, NoReturn

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tokasaurus.server.tools.arguments import JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=3)
EDITS = st.lists(st.tuples(st.integers(0, 60), st.sampled_from(['"', "\\", "{", "}", "]", ",", ":", "0", "u", "."])))


def refuse(name: str) -> NoReturn:
    raise ValueError(name)


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict)
    except ValueError:
        return False


def accepts(text: str) -> bool:
    scanner = JsonScanner()
    return all(scanner.add(character) for character in text) and scanner.is_complete


@examples(300)
@given(OBJECTS, st.sampled_from([(", ", ": "), (",", ":"), (" ,  ", " :")]), st.booleans(), EDITS)
@example({"a": "b"}, (", ", ": "), True, [(4, "u")])
def test_scanner_accepts_exactly_the_objects_json_accepts(
    value: dict[str, Any], separators: tuple[str, str], is_ascii: bool, edits: list[tuple[int, str]]
) -> None:
    text = json.dumps(value, separators=separators, ensure_ascii=is_ascii)
    assert accepts(text)
    assert accepts(json.dumps(value, indent=1))
    for position, character in edits:
        text = text[:position] + character + text[position + 1 :]
        assert accepts(text) == is_object(text), text


@pytest.mark.parametrize(
    "text",
    [
        *('{"a": 01}', '{"a": 1.}', '{"a": +1}', '{"a": tru}', '{"a": 1e}', '{"a": NaN}', '{"a" 1}', "[]", "{,}"),
        *('{"a": 1,}', '{"a": [1,]}', '{"a": [}', '{"a": "\\x"}', '{"a": "\\u12g4"}', '{"a": "b\n"}', '{"a\n": 1}'),
    ],
)
def test_scanner_refuses_texts_that_json_refuses(text: str) -> None:
    assert not is_object(text)
    assert not accepts(text)


def test_unescaped_newlines_are_accepted_in_strings_of_nested_objects() -> None:
    text = '{"arguments": {"code": "a\n\tb"}}'
    assert accepts(text)
    assert not is_object(text)
    assert json.loads(text, strict=False) == {"arguments": {"code": "a\n\tb"}}


def test_scanner_tracks_depth_and_strings_at_each_character() -> None:
    scanner = JsonScanner()
    seen = []
    for character in '{"a\\"": [{}, "["]}':
        assert scanner.add(character)
        seen.append((scanner.depth, scanner.in_string))
    assert "".join(str(depth) for depth, _ in seen) == "111111112322222210"
    assert "".join("s" if in_string else "-" for _, in_string in seen) == "-ssss--------ss---"
