"""Which texts each grammar field allows, character by character; the oracles are `json`, `re` and equality."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from pydantic import TypeAdapter

from tests.helpers.small_tokenizer import EOS_IDS, VOCAB_SIZE
from tokasaurus.server.grammars.validator_process import compile_grammar
from tokasaurus.server.protocol.grammar_fields import (
    GrammarSource,
    GuidedChoice,
    GuidedGrammar,
    GuidedJson,
    GuidedRegex,
    ResponseFormat,
    StructuredOutputs,
)
from tokasaurus.text.grammars import GrammarVocabulary, load_grammar_vocabulary


@pytest.fixture(scope="module")
def vocabulary(tokenizer_directory: Path) -> GrammarVocabulary:
    return load_grammar_vocabulary(tokenizer_directory, VOCAB_SIZE, EOS_IDS)


def allows(vocabulary: GrammarVocabulary, field: Any, value: object, text: str) -> bool:
    """Whether the grammar accepts the whole text and allows it to end there."""
    source = TypeAdapter(field).validate_python(value)
    assert isinstance(source, GrammarSource)
    matcher = LLMatcher(vocabulary.tokenizer, compile_grammar(vocabulary, source.format, source.text), log_level=0)
    content = list(text.encode())  # token ids 0 to 255 are the bytes
    return matcher.try_consume_tokens(content) == len(content) and matcher.is_accepting()


def test_json_whitespace_is_bounded(vocabulary: GrammarVocabulary) -> None:
    json_object = {"type": "json_object"}
    value = {"a": [1, {"b": None}], "c": "x  y"}
    for text in (
        json.dumps(value),
        json.dumps(value, separators=(",", ":")),
        json.dumps(value, indent=8),
        json.dumps(value, indent="\t").replace("\n", "\r\n"),
        '{"a" : 1 }',
    ):
        assert allows(vocabulary, ResponseFormat, json_object, text), text
    for text in ("[1]", '{"a":  1}', "{\n\n}", "{\n" + " " * 41 + "}", " {}", "{} ", "{}{}", "```json\n{}"):
        assert not allows(vocabulary, ResponseFormat, json_object, text), text
    compact = {"json_object": True, "disable_any_whitespace": True}
    assert allows(vocabulary, StructuredOutputs, compact, '{"a":[1,"x  y"]}')
    assert not allows(vocabulary, StructuredOutputs, compact, '{"a": 1}')


def test_property_cannot_be_repeated_with_an_escaped_spelling(vocabulary: GrammarVocabulary) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert allows(vocabulary, GuidedJson, schema, '{"a":1,"b":"x"}')
    assert not allows(vocabulary, GuidedJson, schema, '{"a":1,"a":"x"}')
    assert not allows(vocabulary, GuidedJson, schema, '{"a":1,"\\u0061":"x"}')


@pytest.mark.parametrize("value", ["\x01", "\x1f\x7fé\u2028😀", '"\\/\b\f\n\r\t', {"\x00": [None, 1.5, -0.25]}, ""])
def test_any_constant_can_be_written(vocabulary: GrammarVocabulary, value: object) -> None:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("\x7f", "\\u007f")
    for schema in ({"const": value}, {"enum": [5, value]}, json.dumps({"const": value})):
        assert allows(vocabulary, GuidedJson, schema, text)
        assert not allows(vocabulary, GuidedJson, schema, "6")


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
@pytest.mark.parametrize("place", ["schema", "value"])
def test_schema_beside_the_type_is_followed(vocabulary: GrammarVocabulary, kind: str, place: str) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    form = {"type": kind, place: schema}
    assert allows(vocabulary, ResponseFormat, form, '{"a": 1}')
    assert not allows(vocabulary, ResponseFormat, form, '{"a": 2}')


def test_choices_are_literal_texts_not_patterns(vocabulary: GrammarVocabulary) -> None:
    rng = random.Random(0)
    alphabet = "ab.*+?()[]{}|^$\\/-&#~\"' \n\t<>é€😀\x00\x85\u2028"
    for _ in range(40):
        choices = ["".join(rng.choices(alphabet, k=rng.randint(0, 5))) for _ in range(3)]
        for text in (*choices, "".join(rng.choices(alphabet, k=2))):
            assert allows(vocabulary, GuidedChoice, choices, text) == (text in choices), (choices, text)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("a.c", "abc"),
        ("a.c", "a\nc"),
        ("^a|b$", "b"),
        (r"a\\/b", r"a\/b"),
        (r"\d{2,}", "123"),
        ("(?i)abc", "aBC"),
        ("[^a]", "é"),
        ("a\nb", "a\nb"),
        (r"[\w.]+@x\.org", "a.b@x.org"),
        (r"[\w.]+@x\.org", "a.b@xyorg"),
        ("a|ab", "ab"),
        ("a", "ab"),
    ],
)
def test_regular_expression_must_match_the_whole_text(vocabulary: GrammarVocabulary, pattern: str, text: str) -> None:
    assert allows(vocabulary, GuidedRegex, pattern, text) == (re.fullmatch(pattern, text) is not None)


GBNF = r"""
# a list of words or numbers
root ::= "[" item ("," ws item)* "]"
item ::= [a-z]+ | num-ber
num-ber ::= "-"? [0-9]{1,3}
ws ::= [ \t\n]?
"""
LARK = """
start: "[" item ("," WS? item)* "]"  // root ::= is not at the beginning of this line
item: /[a-z]+/ | NUMBER
NUMBER: "-"? /[0-9]{1,3}/
WS: /[ \\t\\n]/
"""


@pytest.mark.parametrize("grammar", [GBNF, LARK])
def test_grammar_can_be_gbnf_or_lark(vocabulary: GrammarVocabulary, grammar: str) -> None:
    for text in ("[a]", "[abc, -12,3]", "[-123,\nx]"):
        assert allows(vocabulary, GuidedGrammar, grammar, text), text
        assert allows(vocabulary, StructuredOutputs, {"grammar": grammar}, text), text
    for text in ("", "[]", "[a,]", "[1234]", "[a,  b]", "[A]"):
        assert not allows(vocabulary, GuidedGrammar, grammar, text), text


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (r'root ::= "\u00e9\U0001F600"', "é😀"),
        (r"root ::= [\u4e00-\u9fff]+", "漢字"),
        (r'root ::= "\u0022\u005c"', '"\\'),
        (r'root ::= "\\u00e9"', "\\u00e9"),
        (r'root ::= "\x41\n"', "A\n"),
    ],
)
def test_gbnf_escapes_match_the_characters_they_stand_for(
    vocabulary: GrammarVocabulary, grammar: str, text: str
) -> None:
    assert allows(vocabulary, GuidedGrammar, grammar, text)


def test_schemas_within_lark_are_followed_as_those_of_their_own(vocabulary: GrammarVocabulary) -> None:
    number = '{"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}'
    word = '{"type": "string", "pattern": "^[^A-Z&&_]$", "title": "%json {"}'
    grammar = f'start: "%json {{" number word // %json {{\nnumber: %json {number}\nword: %json{word}'
    assert allows(vocabulary, GuidedGrammar, grammar, '%json {0.5"a"')
    for text in ('%json {0"a"', '%json {0.0"a"', '%json {0.5"&"', '%json {0.5"_"'):
        assert not allows(vocabulary, GuidedGrammar, grammar, text), text
    refused = TypeAdapter(GuidedGrammar).validate_python('start: %json {"items": {"contains": {}}}')
    assert refused.refusal == ("has a schema after %json that contains contains at #/items, which is not implemented")
