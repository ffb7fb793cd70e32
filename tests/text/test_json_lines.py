"""JSON without the line ends of Unicode, against orjson's and json's."""

import json

import orjson
from hypothesis import given
from hypothesis import strategies as st

from tokasaurus.text.json_lines import escape_line_ends, write_json

# Characters that share bytes with the line ends, the line ends of str.splitlines(), and escapes.
CHARACTERS = '\u2028\u2029\x85\n\r\v\f\x1c\x1d\x1e\\"/“—\u2019 \x84\x86\u2027\u202a\u20a8é中😀ab\u0a85\u00e2\u00a8'
TEXTS = st.text(st.one_of(st.sampled_from(CHARACTERS), st.characters(exclude_categories=["Cs"])), max_size=30)
VALUES = st.recursive(TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))


@given(VALUES)
def test_the_value_is_kept_on_one_line(value: object) -> None:
    content = write_json(value)
    assert orjson.loads(content) == json.loads(content) == value
    assert len(content.decode().splitlines()) == 1
    assert len(content.splitlines()) == 1


@given(VALUES)
def test_what_has_no_line_ends_is_unchanged(value: object) -> None:
    content = orjson.dumps(value)
    has_line_ends = any(character in content.decode() for character in "\u2028\u2029\x85")
    assert (escape_line_ends(content) == content) != has_line_ends
    assert escape_line_ends(escape_line_ends(content)) == escape_line_ends(content)


def test_options_of_orjson_count() -> None:
    assert write_json({"a": "\u2028"}, orjson.OPT_APPEND_NEWLINE) == b'{"a":"\\u2028"}\n'
