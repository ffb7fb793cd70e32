"""A TemplateText has the characters that str would have, and knows which of them the template wrote.

The template's characters are Latin ones here and the client's are others, so each character of a result shows who wrote
it."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tokasaurus.text.template_text import (
    client_text,
    concatenated,
    end_of_marked,
    is_written,
    marked_text,
    plain,
    restored_text,
    template_text,
    written_spans,
)

TEMPLATES, CLIENTS = "abXßs%{} \n", "λβΞΐΣς\u2003\u2028"
PARTS = st.text(TEMPLATES, max_size=4).map(template_text) | st.text(CLIENTS, max_size=4)
TEXTS = st.lists(PARTS, max_size=6).map(concatenated)
SEPARATORS = st.sampled_from(["a", "ab", "λ", " ", "bβ"]) | TEXTS.filter(len)
COUNTS = st.integers(-1, 3)
INDICES = st.none() | st.integers(-7, 7)

# A function of a text, and the strategies of its other arguments
Operation = tuple[Callable[..., Any], tuple[st.SearchStrategy[Any], ...]]


def method(name: str, *arguments: st.SearchStrategy[Any]) -> Operation:
    return lambda text, *values: getattr(text, name)(*values), arguments


FOLLOWED: dict[str, Operation] = {
    "sum": (operator.add, (PARTS,)),
    "sum with a string": (lambda text, other: other + text, (PARTS,)),
    "product": (operator.mul, (COUNTS,)),
    "slice": (lambda text, *ends: text[slice(*ends)], (INDICES, INDICES, st.sampled_from([None, 1, 2, -1]))),
    "characters": (list, ()),
    "reversed": (lambda text: list(reversed(text)), ()),
    "%": (lambda text, value: (text.replace("%", template_text("%%")) + template_text("%s")) % value, (PARTS,)),
    "% of two": (lambda text, *values: (text.replace("%", "") + template_text("%s%s")) % values, (PARTS, PARTS)),
    "% of a name": (lambda text, value: (text.replace("%", "") + template_text("%(a)s")) % {"a": value}, (PARTS,)),
    "join": (lambda text, *parts: text.join(parts), (PARTS, PARTS, PARTS)),
    "join of one": (lambda text, part: text.join([part]), (PARTS,)),
    "replace": method("replace", SEPARATORS, PARTS, COUNTS),
    "splitlines": method("splitlines", st.booleans()),
}
for name in ("strip", "lstrip", "rstrip"):
    FOLLOWED[name] = method(name)
    FOLLOWED[f"{name} of characters"] = method(name, st.sampled_from(["a ", "λa", "\n\u2003", " "]))
for name in ("split", "rsplit"):
    FOLLOWED[name] = method(name)
    FOLLOWED[f"{name} at white space"] = method(name, st.none(), COUNTS)
    FOLLOWED[f"{name} at a separator"] = method(name, SEPARATORS, COUNTS)
for name in ("partition", "rpartition", "removeprefix", "removesuffix"):
    FOLLOWED[name] = method(name, SEPARATORS)
for name in ("lower", "upper", "casefold", "swapcase", "title", "capitalize"):
    FOLLOWED[name] = method(name)
# All of the result counts as the client's.
NOT_FOLLOWED: dict[str, Operation] = {
    "center": method("center", st.integers(0, 40)),
    "zfill": method("zfill", st.integers(0, 40)),
    "expandtabs": method("expandtabs"),
    "translate": method("translate", st.just({ord("a"): "b", ord("λ"): "β"})),
    "encode": (lambda text: text.encode().decode(), ()),
    "% with a width": (lambda text, value: (text.replace("%", "") + "%9s") % value, (PARTS,)),
    "replace of nothing": method("replace", st.just(""), PARTS),
}


def texts_in(result: Any) -> Iterator[str]:
    if isinstance(result, str):
        yield result
    else:
        for part in result:
            yield from texts_in(part)


@pytest.mark.parametrize("name", [*FOLLOWED, *NOT_FOLLOWED])
@given(data=st.data())
@examples(100)
def test_results_are_those_of_str_and_each_character_knows_who_wrote_it(name: str, data: st.DataObject) -> None:
    operation, arguments = (FOLLOWED | NOT_FOLLOWED)[name]
    text = data.draw(TEXTS)
    values = [data.draw(argument) for argument in arguments]
    ordinary = [plain(value) if isinstance(value, str) else value for value in values]
    results = list(texts_in(operation(text, *values)))
    assert list(map(plain, results)) == list(texts_in(operation(plain(text), *ordinary)))
    for result in map(client_text, results):
        # A character may become several, at the beginning of a word but not elsewhere.
        is_lost = name in ("title", "capitalize") and len(result) != len(text)
        for index, character in enumerate(plain(result)):
            is_clients = ord(character) > 0xFF
            if is_clients or (name in FOLLOWED and not is_lost):
                assert is_written(result, index, index + 1) != is_clients


@given(text=TEXTS)
@examples(100)
def test_spans_restore_who_wrote_a_text(text: str) -> None:
    tracked = client_text(text)
    spans = written_spans(tracked)
    restored = restored_text(plain(text), spans)
    assert restored == plain(text)
    assert written_spans(restored) == spans
    assert "".join(plain(text)[start:end] for start, end in spans) == "".join(c for c in text if ord(c) <= 0xFF)


def test_marked_text_is_found_at_its_last_character_and_is_the_clients() -> None:
    text = template_text("a") + marked_text(" b ").strip() + template_text("c")
    assert (plain(text), end_of_marked(text), written_spans(text)) == ("abc", 2, [(0, 1), (2, 3)])
    assert end_of_marked(template_text("abc")) == 0
