"""Schemas after rewriting: llguidance follows them, and an independent validator accepts every answer."""

import copy
import json
import random
import re
from contextlib import suppress
from decimal import Decimal
from itertools import combinations
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema_rs
import orjson
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tests.helpers.examples import IS_NIGHTLY, examples, few, seeds
from tests.helpers.grammar_texts import allows, random_answer
from tests.helpers.random_schemas import random_schema
from tests.helpers.small_tokenizer import EOS_IDS, VOCAB_SIZE
from tokasaurus.server.protocol.exact_schema import (
    _ANNOTATIONS,
    _IMPLEMENTED,
    NOT_IMPLEMENTED,
    SchemaError,
    exact_schema,
)
from tokasaurus.text.grammars import load_grammar_vocabulary

ANNOTATED = {
    "title": "A title",
    "description": "Ünïcode",
    "default": 2**70,
    "examples": [1e300, {"not": {}}],
    "deprecated": True,
    "readOnly": False,
    "writeOnly": True,
    "$comment": "not",
    "contentEncoding": "base64",
    "contentMediaType": "application/json",
    "contentSchema": {"not": {}},
    "x-order": 3,
    "x-nested": {"not": {"uniqueItems": True}},
}
# For each keyword that llguidance does not implement: schemas in which it changes nothing.
NEUTRAL: dict[str, list[dict[str, Any]]] = {
    "uniqueItems": [{"uniqueItems": False}, {"type": "array", "uniqueItems": True, "maxItems": 1}],
    "unevaluatedProperties": [{"unevaluatedProperties": True}, {"unevaluatedProperties": {"title": "x"}}],
    "unevaluatedItems": [{"unevaluatedItems": True}, {"unevaluatedItems": {}}],
    "dependentRequired": [{"dependentRequired": {}}, {"dependentRequired": {"a": []}}],
    "dependentSchemas": [{"dependentSchemas": {}}, {"dependentSchemas": {"a": True, "b": {}}}],
    "dependencies": [{"dependencies": {}}, {"dependencies": {"a": [], "b": {}}}],
    "not": [{"not": False}, {"not": {"not": {}}}, {"not": {"not": {"title": "any"}}}],
    "if": [{"if": {"type": "string"}}, {"if": {"type": "string"}, "then": True, "else": {}}, {"if": False, "then": {}}],
    "then": [{"then": False}, {"then": {"type": "string"}}],
    "else": [{"else": False}, {"else": {"type": "string"}}],
    "contains": [{"contains": {"type": "string"}, "minContains": 0}],
    "minContains": [{"minContains": 5}],
    "maxContains": [{"maxContains": 0}],
    "propertyNames": [{"propertyNames": True}, {"propertyNames": {}}, {"propertyNames": {"description": "x"}}],
    "$dynamicRef": [],
    "$recursiveRef": [],
}
REFUSED: dict[str, list[dict[str, Any]]] = {
    "uniqueItems": [{"uniqueItems": True}, {"uniqueItems": True, "type": "array", "items": {"enum": [*range(6)]}}],
    "unevaluatedProperties": [{"unevaluatedProperties": False}, {"unevaluatedProperties": {"type": "string"}}],
    "unevaluatedItems": [{"unevaluatedItems": False}, {"unevaluatedItems": {"type": "string"}}],
    "dependentRequired": [{"dependentRequired": 1}],
    "dependentSchemas": [{"dependentSchemas": 1}],
    "dependencies": [{"dependencies": 1}],
    "not": [
        {"not": {"type": "integer"}},
        {"not": {"items": False}},
        {"not": {"const": [1]}},
        {"not": {"multipleOf": 2}},
    ],
    "if": [{"if": {"type": "integer"}, "then": {"minimum": 3}}, {"if": {"oneOf": [{}]}, "else": {"minLength": 3}}],
    "contains": [{"contains": {}}, {"contains": {"type": "string"}}, {"contains": False, "maxContains": 2}],
    "minContains": [{"minContains": 2, "contains": {}}],
    "maxContains": [{"maxContains": 2, "contains": {}, "minContains": 0}],
    "propertyNames": [{"propertyNames": {"oneOf": [{"pattern": "a"}]}}, {"propertyNames": {"$ref": "other"}}],
    "$dynamicRef": [{"$dynamicRef": "#a"}],
    "$recursiveRef": [{"$recursiveRef": "#"}],
}
# How a schema may occur in another one, and the path that leads to it.
PLACES = [
    (lambda inner: inner, "#"),
    (lambda inner: {"properties": {"p": inner}}, "#/properties/p"),
    (lambda inner: {"patternProperties": {"^p$": inner}}, "#/patternProperties/^p$"),
    (lambda inner: {"additionalProperties": inner}, "#/additionalProperties"),
    (lambda inner: {"items": inner}, "#/items"),
    (lambda inner: {"prefixItems": [{}, inner]}, "#/prefixItems/1"),
    (lambda inner: {"anyOf": [{"type": "null"}, inner]}, "#/anyOf/1"),
    (lambda inner: {"allOf": [inner]}, "#/allOf/0"),
    (lambda inner: {"oneOf": [inner]}, "#/oneOf/0"),
    (lambda inner: {"items": {"$ref": "#/$defs/a~1b%20c"}, "$defs": {"a/b c": inner}}, "#/$defs/a/b c"),
    (lambda inner: {"$ref": "#/definitions/d", "definitions": {"d": {"items": inner}}}, "#/definitions/d/items"),
    (
        lambda inner: {"$ref": "#/$defs/d", "$defs": {"e": inner, "d": {"items": {"$ref": "#/$defs/e"}}}},
        "#/$defs/e",
    ),
    (
        lambda inner: {"items": {"items": {"properties": {"p": {"anyOf": [inner]}}}}},
        "#/items/items/properties/p/anyOf/0",
    ),
]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_directory: Path) -> LLTokenizer:
    return load_grammar_vocabulary(tokenizer_directory, VOCAB_SIZE, EOS_IDS).tokenizer


def compiled(schema: dict[str, Any], tokenizer: LLTokenizer, is_strict: bool = True) -> LLMatcher:
    text = orjson.dumps({**exact_schema(schema, is_strict), "x-guidance": {"whitespace_flexible": False}}).decode()
    return LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(text), log_level=0)


def matcher_of(schema: dict[str, Any], tokenizer: LLTokenizer) -> LLMatcher:
    matcher = compiled(schema, tokenizer)
    assert not matcher.is_error(), (schema, exact_schema(schema), matcher.get_error())
    return matcher


def test_the_table_has_every_keyword_that_is_not_implemented(tokenizer: LLTokenizer) -> None:
    """llguidance refuses exactly these of all keywords of the two newest drafts."""
    assert set(NEUTRAL) == {*REFUSED, "then", "else"} == NOT_IMPLEMENTED
    for keyword in NOT_IMPLEMENTED:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps({keyword: {}}))
        assert keyword in LLMatcher(tokenizer, grammar, log_level=0).get_error()
    keywords: set[str] = set()
    for draft in (jsonschema_rs.Draft202012, jsonschema_rs.Draft7):
        keywords |= _keywords_of(draft)
    assert keywords <= _IMPLEMENTED | NOT_IMPLEMENTED | _ANNOTATIONS
    for keyword in keywords - NOT_IMPLEMENTED - {"$ref", "$schema", "$id"}:
        value: Any = {"type": "string", "enum": ["a"], "required": [], "format": "date", "pattern": "a"}.get(
            keyword, [{}]
        )
        if keyword in _OBJECTS:
            value = {}
        if keyword.startswith(("min", "max", "multiple", "exclusive")):
            value = 1
        matcher_of({keyword: value}, tokenizer)


_OBJECTS = {"properties", "patternProperties", "$defs", "definitions", "additionalProperties", "$vocabulary"}


def _keywords_of(_draft: object) -> set[str]:
    """The keywords of the standard's pages for 2020-12 (core, applicator, validation, meta-data, format, content) and
    draft 7."""
    core = "$schema $id $ref $anchor $dynamicRef $dynamicAnchor $defs $comment $vocabulary definitions"
    applicator = "allOf anyOf oneOf not if then else dependentSchemas prefixItems items contains properties"
    more = "patternProperties additionalProperties propertyNames unevaluatedItems unevaluatedProperties dependencies"
    numbers = (
        "multipleOf maximum exclusiveMaximum minimum exclusiveMinimum maxLength minLength pattern maxItems minItems"
    )
    others = (
        "uniqueItems maxContains minContains maxProperties minProperties required dependentRequired const enum type"
    )
    notes = "title description default deprecated readOnly writeOnly examples contentEncoding contentMediaType"
    return set(f"{core} {applicator} {more} {numbers} {others} {notes} contentSchema format additionalItems".split())


@pytest.mark.parametrize("keyword", sorted(NOT_IMPLEMENTED))
def test_neutral_keywords_change_nothing_in_every_place(tokenizer: LLTokenizer, keyword: str) -> None:
    base = {"type": ["array", "object", "string"], "maxItems": 1}
    for neutral in NEUTRAL[keyword]:
        for place, _ in PLACES:
            with_keyword, without = (place({**base, **more}) for more in ({**neutral, **ANNOTATED}, _kept(neutral)))
            assert exact_schema(with_keyword) == exact_schema(without), with_keyword
            matcher_of(with_keyword, tokenizer)
            for value in ([], ["a"], {}, {"a": 1, "b": 2}, "a", [[]], {"p": []}):
                is_valid = jsonschema_rs.Draft202012Validator(without).is_valid(value)
                assert jsonschema_rs.Draft202012Validator(with_keyword).is_valid(value) == is_valid


def _kept(neutral: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in neutral.items() if key not in NOT_IMPLEMENTED}
    return kept | {key: value for key, value in ANNOTATED.items() if key.startswith("x-")}


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_what_has_no_equivalent_is_refused_with_keyword_and_path(keyword: str, tokenizer: LLTokenizer) -> None:
    """Where the schema is not strict, it is left out."""
    for schema in REFUSED[keyword]:
        for place, path in PLACES:
            with pytest.raises(SchemaError) as refused:
                exact_schema(place(schema))
            name = "(minContains|maxContains|contains)" if "ontains" in keyword else re.escape(keyword)
            assert re.fullmatch(
                f"contains {name} at {re.escape(path)}, which is not implemented", str(refused.value)
            ), schema
            assert not compiled(place(schema), tokenizer, is_strict=False).is_error(), schema


# Keywords that llguidance does not implement, and values in which they have an equivalent.
EQUIVALENT: list[dict[str, Any]] = [
    {"not": {"type": "string"}},
    {"not": {"type": ["number", "null", "object"]}},
    {"not": {"enum": ["a", "x y", 1, None]}},
    {"type": "string", "not": {"enum": ["a", "ab"]}},
    {"not": {"const": True}},
    {"type": "number", "not": {"enum": [0, 1.5]}},
    {"not": {"type": "string", "pattern": "^a"}},
    {"not": {"pattern": "^a"}},
    {"not": {"minLength": 2}},
    {"not": {"maxLength": 1}},
    {"not": {"minimum": 1}},
    {"not": {"exclusiveMaximum": 1, "type": "number"}},
    {"not": {"maxItems": 1}},
    {"not": {"minItems": 1, "type": "array"}},
    {"not": {"required": ["a"]}},
    {"type": "object", "not": {"required": ["a", "b"]}},
    {"type": "object", "properties": {"a": True, "b": True}, "not": {"properties": {"a": {"const": 1}}}},
    {"not": {"anyOf": [{"type": "array"}, {"pattern": "b$"}, {"required": ["b"]}]}},
    {"not": {"allOf": [{"type": "string"}, {"minLength": 1}]}},
    {"not": {"not": {"type": "number"}}},
    {"not": {"$ref": "#/$defs/text"}, "$defs": {"text": {"type": ["string", "null"]}}},
    {"not": {"format": "ipv4"}, "type": "string"},
    {"not": {}},
    {"if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"type": "number"}},
    {"if": {"minimum": 1}, "then": {"type": "number"}},
    {"if": {"type": "array"}, "else": {"type": ["object", "null"]}},
    {
        "type": "object",
        "properties": {"a": {"enum": [1, "a"]}, "b": True},
        "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
        "then": {"required": ["b"]},
        "else": {"properties": {"b": {"type": "string"}}},
    },
    {"dependentRequired": {"a": ["b"]}, "properties": {"a": True, "b": True}},
    {"dependentSchemas": {"a": {"required": ["b"]}, "b": {"type": "null"}}},
    {"dependencies": {"b": ["a"], "a": {"properties": {"a": {"type": "string"}}}}},
    {"propertyNames": {"pattern": "^a"}},
    {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "number"}},
    {"propertyNames": {"const": "b"}, "properties": {"a": True}},
    {"propertyNames": {"maxLength": 1}, "properties": {"ab": True}, "patternProperties": {"^a": {"type": "string"}}},
    {"propertyNames": {"not": {"enum": ["a"]}}, "minProperties": 1, "type": "object"},
    {"propertyNames": {"anyOf": [{"pattern": "^a$"}, {"minLength": 2, "maxLength": 2}]}},
    {"propertyNames": {"allOf": [{"pattern": "a"}, {"pattern": "b"}]}},
    {"propertyNames": {"enum": ["a", "b"]}, "minProperties": 2, "type": "object"},
    {"propertyNames": {"$ref": "#/$defs/n"}, "additionalProperties": {"type": "null"}, "$defs": {"n": {"enum": ["b"]}}},
    {"propertyNames": False, "type": "object"},
    {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "ab", 1]}},
    {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}, "minItems": 1},
    {
        "type": "array",
        "uniqueItems": True,
        "items": {"$ref": "#/$defs/v"},
        "maxItems": 2,
        "$defs": {"v": {"enum": [1, 2]}},
    },
]
SCALARS = [None, True, False, 0, 1, 2, 1.5, -1, "", "a", "ab", "b", "x y", "1.2.3.4"]
OBJECTS = [{}, *({name: value} for name in ("a", "b", "ab", "xy") for value in (None, 1, "a"))]
OBJECTS += [{"a": 1, "b": "b"}, {"a": 1, "b": 1}, {"a": "a", "b": 1}, {"a": "a", "b": None}, {"b": 1, "ab": 1}]
ARRAYS = [
    [],
    *([value] for value in SCALARS),
    [1, 1],
    [True, 1],
    [1, "a"],
    ["a", 1],
    ["a", "a"],
    ["ab", "a", 1],
    [2, 1],
]
ARRAYS += [[1, 2, 1], [False, True], [True, True], [None, 1]]


@pytest.mark.parametrize("schema", EQUIVALENT, ids=json.dumps)
def test_keywords_with_an_equivalent_mean_the_same(tokenizer: LLTokenizer, schema: dict[str, Any]) -> None:
    for place in (lambda inner: inner, lambda inner: {"items": inner, "type": "array"}):
        placed = place({key: value for key, value in schema.items() if key != "$defs"})
        start = compiled(placed | {"$defs": schema.get("$defs", {})}, tokenizer)
        validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
        if start.is_error():
            assert "nsatisfiable" in start.get_error()
        for value in [*SCALARS, *OBJECTS, *ARRAYS]:
            text = json.dumps(value, separators=(",", ":"))
            text = text if place(0) == 0 else f"[{text}]"
            is_allowed = not start.is_error() and allows(start, text)
            assert is_allowed == validator.is_valid(value), (value, exact_schema(schema))


CAT = {
    "properties": {"kind": {"const": "cat"}, "next": {"$ref": "#/$defs/pet"}},
    "required": ["kind"],
    "type": "object",
}
DOG = {"properties": {"kind": {"enum": ["dog", 1]}}, "required": ["kind"], "type": "object", "title": "Dog"}
PET = {
    "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog", "title": "A dog"}],
    "discriminator": {"propertyName": "kind"},
}
BY_REFERENCE: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (
        {"$ref": "#/$defs/pet", "$defs": {"cat": CAT, "dog": DOG, "pet": PET}},
        [{"kind": "dog"}, {"kind": "cat"}, {"kind": "cat", "next": {"kind": "cat", "next": {"kind": "dog"}}}],
        [{"kind": "fox"}, {}, {"kind": "cat", "next": {"kind": "fox"}}],
    ),
    (
        {
            "properties": {"a": {"pattern": "^[a&&]$", "type": "string"}, "b": {"$ref": "#/properties/a"}},
            "type": "object",
        },
        [{"a": "&", "b": "a"}],
        [{"b": "b"}, {"b": "aa"}],
    ),
    (
        {"$ref": "#/components/schemas/x"}
        | {
            "components": {
                "schemas": {"x": {"type": "array", "items": {"$ref": "#/components/y~1z"}}},
                "y/z": {"enum": [1]},
            }
        },
        [[], [1, 1]],
        [[2], 1],
    ),
    (
        {
            "oneOf": [
                {"type": "array", "items": {"$ref": "#/oneOf/1"}},
                {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
            ]
        },
        [0.5, [0.5, 0.25]],
        [0, [0], [[0.5]], 1],
    ),
    (
        {"type": "array", "items": {"$ref": "#"}, "maxItems": 1, "x-note": 1},
        [[], [[]], [[[]]]],
        [[[], []], [1], 1],
    ),
]


@pytest.mark.parametrize(("schema", "allowed", "refused"), BY_REFERENCE)
def test_references_lead_anywhere_and_alternatives_may_be_recursive(
    tokenizer: LLTokenizer, schema: dict[str, Any], allowed: list[Any], refused: list[Any]
) -> None:
    start, validator = matcher_of(schema, tokenizer), jsonschema_rs.Draft202012Validator(schema)
    for value in allowed + refused:
        assert validator.is_valid(value) == (value in allowed), value
        assert allows(start, json.dumps(value, separators=(",", ":"))) == (value in allowed), value


@pytest.mark.parametrize(
    ("loose", "kept"),
    [
        ({"type": "string", "pattern": "(?<=a)b", "maxLength": 2}, {"type": "string", "maxLength": 2}),
        ({"type": "string", "format": "phone"}, {"type": "string"}),
        (
            {"type": "array", "items": {"type": "null"}, "uniqueItems": True},
            {"type": "array", "items": {"type": "null"}},
        ),
        ({"oneOf": [{"minimum": 2}, {"maximum": 3}]}, {"anyOf": [{"minimum": 2}, {"maximum": 3}]}),
        ({"type": "integer", "enum": [2**70, 1], "minimum": 0}, {"type": "integer", "minimum": 0}),
        (
            {"type": "object", "patternProperties": {"(?<=a)b": {}}, "additionalProperties": False},
            {"type": "object"},
        ),
        (
            {"type": "object", "properties": {"a": True, "b": True}, "minProperties": 2, "required": ["a"]},
            {"type": "object", "properties": {"a": True, "b": True}, "required": ["a"]},
        ),
    ],
)
def test_a_schema_that_is_not_strict_is_followed_as_far_as_possible(
    loose: dict[str, Any], kept: dict[str, Any], tokenizer: LLTokenizer
) -> None:
    start, expected = (compiled(schema, tokenizer, is_strict=False) for schema in (loose, kept))
    assert not start.is_error(), start.get_error()
    texts = [json.dumps(value, separators=(",", ":")) for value in [*SCALARS, *OBJECTS, *ARRAYS, 2**70]]
    assert [allows(start, text) for text in texts] == [allows(expected, text) for text in texts]


def test_unused_definitions_may_contain_anything(tokenizer: LLTokenizer) -> None:
    wrong = {"not": {}, "const": 2**53 + 1}
    schema = {
        "$ref": "#/$defs/good",
        "$defs": {"good": {"type": "null"}, "bad": wrong, "worse": {"$ref": "#/$defs/bad"}},
    }
    assert allows(matcher_of(schema, tokenizer), "null")
    for reference in ("#anchor", "other#/$defs/bad"):  # these might mean any definition
        with pytest.raises(SchemaError):
            exact_schema({"anyOf": [{"$ref": reference}, schema], "$defs": {"bad": wrong}})


INTERESTING = [0, 7, 2**31, 2**53, 10**15, 10**18, 10**19, 2**60, 2**62, 2**63, 2**64, 2**65, 10**25]


def random_bounds(rng: random.Random) -> dict[str, Any]:
    def number() -> int | float:
        value: int | float = rng.choice([-1, 1]) * (rng.choice(INTERESTING) + rng.randint(-3, 3))
        return float(value) if abs(value) >= 2**64 or rng.random() < 0.2 else value

    schema: dict[str, Any] = {"type": rng.choice(["integer", "number", ["integer", "null"], ["number", "string"]])}
    for keyword in rng.sample(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], rng.randint(1, 3)):
        schema[keyword] = number()
    if rng.random() < 0.2:
        schema["multipleOf"] = rng.choice([2, 7, 100, 0.5])
    if rng.random() < 0.1:
        schema = {"allOf": [schema, random_bounds(rng)]}
    return schema


def check_answers_in_bounds(seed: int, tokenizer: LLTokenizer) -> int:
    rng = random.Random(seed)
    schema = random_bounds(rng)
    nested = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    refused = ""
    try:
        text = orjson.dumps({**exact_schema(nested), "x-guidance": {"whitespace_flexible": False}}).decode()
    except SchemaError as error:
        refused = str(error)
    if refused:
        assert any(str(bound) in refused for bound in schema.values()) or "allOf" in schema
        return 0
    start = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(text), log_level=0)
    if start.is_error():
        assert "nsatisfiable" in start.get_error() or "minimum" in start.get_error(), (schema, start.get_error())
        return 0
    validator = jsonschema_rs.Draft202012Validator(nested)
    answers = [answer for _ in range(4) if (answer := random_answer(start, rng)) is not None]
    for answer in answers:
        assert validator.is_valid(json.loads(answer)), (schema, answer)
    return len(answers)


@few(1, "first_seed", range(0, 80, 20))
def test_answers_are_within_bounds_beyond_2_to_the_53rd(tokenizer: LLTokenizer, first_seed: int) -> None:
    num_seeds = 20 if IS_NIGHTLY else 3
    assert (
        sum(check_answers_in_bounds(seed, tokenizer) for seed in range(first_seed, first_seed + num_seeds))
        > num_seeds / 2
    )


@pytest.mark.long
@pytest.mark.parametrize("first_seed", range(200, 1200, 100))
def test_answers_are_within_more_bounds(tokenizer: LLTokenizer, first_seed: int) -> None:
    assert sum(check_answers_in_bounds(seed, tokenizer) for seed in range(first_seed, first_seed + 100)) > 80


decimals = st.builds(
    lambda digits, places: float(Decimal(digits).scaleb(-places)), st.integers(-(10**6), 10**6), st.integers(0, 12)
)
special = st.sampled_from([0.0, -0.0, 1e-60, -1e-9, 0.30000000000000004, 0.9999999999999999])
ends = st.one_of(st.integers(-3, 3), st.integers(-(10**6), 10**6), decimals, special)


@st.composite
def ranges(draw: st.DrawFn) -> dict[str, Any]:
    """The schema of a number, mostly with two ends near to each other."""
    low = draw(ends)
    high = draw(st.one_of(ends, st.sampled_from([low + 0.25, low + 0.5, low + 1, int(low) + 1, 0, -0.0])))
    low, high = sorted((low, high))
    schema: dict[str, Any] = {"type": draw(st.sampled_from(["number"] * 4 + ["integer", ["number", "null"]]))}
    schema |= {draw(st.sampled_from(LOWER)): low, draw(st.sampled_from(UPPER)): high}
    if draw(st.integers(0, 5)) == 0:
        schema["multipleOf"] = draw(st.sampled_from([2, 3, 0.5, 0.01, 0.25]))
    return schema


def ends_of(schema: dict[str, Any]) -> list[int | float]:
    return [bound for keyword, bound in schema.items() if "imum" in keyword]


LOWER = ["minimum", "exclusiveMinimum", "exclusiveMinimum", "x-none"]
UPPER = ["maximum", "exclusiveMaximum", "exclusiveMaximum", "x-none"]


def decimal_validator(schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    """Calculates with decimals as they are written, where instances have them."""
    return jsonschema.Draft202012Validator(json.loads(json.dumps(schema), parse_float=Decimal))


@examples(4000, 150, deadline=None)
@given(schema=ranges(), seed=st.integers(0, 2**32))
def test_numbers_are_exactly_in_their_range(tokenizer: LLTokenizer, schema: dict[str, Any], seed: int) -> None:
    start = compiled(schema, tokenizer)
    if start.is_error():  # no number is in this range
        assert re.search("greater than|equal to|nsatisfiable|mpty|range", start.get_error())
        reject()
    rng = random.Random(seed)
    exact = decimal_validator(schema)
    for _ in range(8):
        answer = random_answer(start, rng)
        if answer is not None and ends_of(schema):
            assert exact.is_valid(json.loads(answer, parse_float=Decimal)), (schema, answer)
    for end in ends_of(schema):
        shown = f"{Decimal(repr(end)):f}"
        for spelling in {shown, f"{shown}.0", f"{shown}0", f"-{shown}", f"{shown}e0", "0", "-0", "0.0", "-0.00", "0e1"}:
            if not re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?(e\d)?", spelling):
                continue
            is_valid = exact.is_valid(json.loads(spelling, parse_float=Decimal))
            assert is_valid or not allows(start, spelling), (schema, spelling)
        for places in (0, 1, 2, 5, 9):
            number = Decimal(repr(end)) + Decimal(rng.randint(-120, 120)).scaleb(-places)
            spelling = f"{number.normalize():f}"
            if "multipleOf" in schema:
                continue
            is_valid = exact.is_valid(json.loads(spelling, parse_float=Decimal))
            if not (is_valid and any(is_beside_a_long_end(number, Decimal(repr(bound))) for bound in ends_of(schema))):
                assert allows(start, spelling) == is_valid, (schema, spelling)


def is_beside_a_long_end(number: Decimal, bound: Decimal) -> bool:
    """Whether the number may be lost: a bound of more than 15 digits or 22 decimal places is moved inwards."""
    _, digits, exponent = bound.as_tuple()
    is_long = len(digits) > 15 or int(exponent) < -22
    return is_long and abs(number - bound) <= max(Decimal("1e-22"), abs(bound) * Decimal("1e-14"))


@pytest.mark.parametrize(
    ("bounds", "allowed", "refused"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.01", "0.000001"], ["0", "0.0", "0.00", "-0", "0.51"]),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, ["1.5", "1.01"], ["1", "1.0", "1.00", "1e0", "1.6"]),
        ({"minimum": -0.31, "exclusiveMaximum": 0}, ["-0.31", "-0.1"], ["0", "-0", "-0.0", "-0.32"]),
        ({"minimum": -7.5, "exclusiveMaximum": -7}, ["-7.5", "-7.1"], ["-7", "-7.0"]),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, ["0.1"], ["0", "0.0"]),
        ({"exclusiveMinimum": 0, "minimum": -1, "maximum": 0.5}, ["0.1"], ["0", "-0.5"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1, "multipleOf": 0.25}, ["0.25", "0.75"], ["0", "0.0", "1"]),
        (
            {"minimum": 0, "maximum": 0.955},
            ["0.9", "0.95", "0.955", "0.900", "0", "0.1"],
            ["0.96", "1", "-0.9", "0.9551"],
        ),
        ({"minimum": -1.25, "exclusiveMaximum": -1.2}, ["-1.25", "-1.21"], ["-1.2", "-1.26", "-1"]),
        ({"minimum": 0.5, "maximum": 0.55}, ["0.5", "0.55", "0.51"], ["0.56", "0.4"]),
        ({"exclusiveMaximum": 10}, ["9.99", "-3"], ["10", "10.0"]),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, ["0.5"], ["0", "0.0"]),
    ],
)
@pytest.mark.parametrize("type_", ["number", ["number", "string"], ["integer", "number"]])
def test_an_excluded_end_is_never_allowed(
    tokenizer: LLTokenizer, bounds: dict[str, Any], allowed: list[str], refused: list[str], type_: Any
) -> None:
    start = matcher_of({"type": type_, **bounds}, tokenizer)
    assert [text for text in allowed + refused if allows(start, text)] == allowed


FLOAT32 = 3.4028234663852886e38


@pytest.mark.parametrize(
    ("bounds", "examples", "counterexamples"),
    [
        ((-(2**63), 2**63 - 1), [0, -5, 2**63 - 1, -(2**63) + 1024, 7234567890123456789], [2**63, -(2**63) - 1]),
        ((0, 2**64 - 1), [0, 2**63 - 1, 9007199254740993], [-1, 2**64]),
        ((-(2**53) + 1, 2**53 - 1), [2**53 - 1, -(2**53) + 1], [2**53, -(2**53)]),
        ((1, 2**63 - 1), [1, 2**63 - 1], [0, 2**63]),
        ((-FLOAT32, FLOAT32), [0, 10**18, -(10**18)], [10**39, -(10**39)]),
        ((10**18, 2**63 - 1), [10**18, 2**63 - 1], [10**18 - 1]),
        ((-(2**62), -(10**18)), [-(2**62), -(10**18)], [-(2**62) - 1, 0]),
    ],
)
def test_whole_ranges_of_integer_types_are_accepted(
    tokenizer: LLTokenizer, bounds: tuple[float, float], examples: list[int], counterexamples: list[int]
) -> None:
    low, high = bounds
    for spelling in ({"minimum": low, "maximum": high}, {"exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1}):
        start = matcher_of({"type": "integer", **spelling}, tokenizer)
        if high + 1 > 2**64:
            continue
        assert all(allows(start, str(number)) for number in examples), spelling
        assert not any(allows(start, str(number)) for number in counterexamples), spelling
    start = matcher_of({"type": "number", "minimum": low, "maximum": high}, tokenizer) if abs(low) < 10**18 else None
    assert start is None or allows(start, str(max(low, 0) + 2))
    start = matcher_of({"type": "number", "minimum": -FLOAT32, "maximum": FLOAT32}, tokenizer)
    assert all(allows(start, text) for text in ("1.5", "-0.25", "123456789012345678.5"))


@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: [value], lambda value: {"a": {"b": [value, 1]}}])
def test_literal_numbers_are_exact_or_refused_by_name(tokenizer: LLTokenizer, wrap: Any) -> None:
    rng = random.Random(0)
    numbers: list[Any] = [0, -1, 5.0, 0.1, 1e-7, 2.5e-300, 2**53, -(2**53), 2**53 + 1, 2**60, 2**63 - 1, -(2**63)]
    numbers += [2**63, 2**64 - 1, 1e20, float(2**53 + 2), -FLOAT32, 1e300]
    numbers += [rng.randint(-(2**63), 2**63) for _ in range(30)]
    numbers += [int(float(rng.randint(-(2**62), 2**62))) for _ in range(30)]
    numbers += [rng.random() for _ in range(30)]  # 17 digits, which llguidance reads as another number at times
    num_exact = 0
    for number in numbers:
        for schema in ({"const": wrap(number)}, {"enum": ["x", wrap(number)]}):
            refused = ""
            try:
                start = matcher_of(schema, tokenizer)
            except SchemaError as error:
                refused = str(error)
            if refused:
                assert str(number) in refused
                assert abs(number) > 2**53 or len(str(number)) > 16
                continue
            num_exact += 1
            for _ in range(4):
                answer = random_answer(start, rng)
                assert answer is not None
                assert jsonschema_rs.Draft202012Validator(schema).is_valid(json.loads(answer)), (schema, answer)
    assert num_exact > 60


def test_limits_that_no_answer_reaches_change_nothing(tokenizer: LLTokenizer) -> None:
    schema = {"type": "array", "maxItems": 2**63 - 1, "items": {"type": "string", "maxLength": 2**40, "minLength": 1.0}}
    start = matcher_of(schema, tokenizer)
    assert allows(start, '["a","bc"]')
    assert not allows(start, '[""]')


@pytest.mark.parametrize("seed", seeds(20))
def test_ordinary_schemas_keep_their_meaning(seed: int, tokenizer: LLTokenizer) -> None:
    schema = random_schema(seed)
    is_rewritten = any(word in str(schema) for word in ("attern", "'format'", "'number'"))
    assert is_rewritten or exact_schema(schema) == schema
    validator = jsonschema_rs.Draft202012Validator(schema)
    answer = random_answer(matcher_of(schema, tokenizer), random.Random(seed))
    assert answer is None or validator.is_valid(json.loads(answer))


UNREADABLE: list[tuple[dict[str, Any], str]] = [
    ({"type": "integer", "multipleOf": 2**32}, "more than 2^32 - 1"),
    ({"type": "number", "multipleOf": 123456.789}, "too many digits"),
    ({"type": "number", "multipleOf": 1e-15}, "too many digits"),
    ({"allOf": [{"type": "integer", "multipleOf": 65537}, {"multipleOf": 65539}]}, "too large"),
    ({"type": "number", "minimum": 1e19}, "no supported number"),
    ({"type": "integer", "minimum": 1e30, "multipleOf": 2}, "no supported number"),
]


@pytest.mark.parametrize(("schema", "reason"), UNREADABLE, ids=[json.dumps(schema) for schema, _ in UNREADABLE])
def test_numbers_that_cannot_be_followed_are_left_to_the_model_unless_strict(
    schema: dict[str, Any], reason: str, tokenizer: LLTokenizer
) -> None:
    with pytest.raises(SchemaError, match=re.escape(reason)):
        exact_schema(schema)
    start = compiled(schema, tokenizer, is_strict=False)
    assert not start.is_error(), start.get_error()
    assert not allows(start, '"a"')
    unused = {"type": "null", "$defs": {"unused": schema}}
    assert not compiled(unused, tokenizer).is_error()


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
RECURSIVE: dict[str, dict[str, Any]] = {
    "not": {"not": {"$ref": "#/$defs/node"}},
    "if": {"if": {"$ref": "#/$defs/node"}, "then": False},
    "propertyNames": {"propertyNames": {"$ref": "#/$defs/loop"}},
    "uniqueItems": {"uniqueItems": True, "type": "array", "items": {"$ref": "#/$defs/loop"}},
}


@pytest.mark.parametrize("keyword", RECURSIVE)
def test_a_recursive_schema_is_no_equivalent(keyword: str, tokenizer: LLTokenizer) -> None:
    schema = {**RECURSIVE[keyword], "$defs": {"node": NODE, "loop": {"$ref": "#/$defs/loop"}}}
    with pytest.raises(SchemaError, match=f"contains {keyword} at #, which is not implemented"):
        exact_schema(schema)
    assert not compiled(schema, tokenizer, is_strict=False).is_error()


def test_large_recursive_unions_are_followed_by_their_discriminator(tokenizer: LLTokenizer) -> None:
    """As pydantic writes a syntax tree: each field repeats all kinds of nodes."""
    node = {"oneOf": [{"$ref": f"#/$defs/node-{number}"} for number in range(60)]}
    nodes = {
        f"node-{number}": {
            "type": "object",
            "properties": {"kind": {"const": number}, "left": node, "right": node},
            "required": ["kind"],
            "additionalProperties": False,
        }
        for number in range(60)
    }
    start = matcher_of({"type": "array", "items": node, "not": {"maxItems": 0}, "$defs": nodes}, tokenizer)
    assert allows(start, '[{"kind":7,"left":{"kind":59},"right":{"kind":0,"right":{"kind":1}}}]')
    assert not allows(start, '[{"kind":60}]')
    assert not allows(start, "[]")
    nodes["node-59"]["properties"]["kind"] = {"enum": [59, 0.0]}  # 0 is of two kinds
    with pytest.raises(AssertionError, match="oneOf"):
        matcher_of({**node, "$defs": nodes}, tokenizer)


def test_sets_do_not_make_more_alternatives_than_a_schema_may_have() -> None:
    """Each of five values has 326 arrangements."""
    sets = [{"type": "array", "uniqueItems": True, "items": {"enum": [*range(5)]}} for _ in range(100)]
    with pytest.raises(SchemaError, match="contains uniqueItems at #/anyOf/"):
        exact_schema({"anyOf": sets})
    assert len(json.dumps(exact_schema({"anyOf": sets}, is_strict=False))) < 1_000_000


def test_multiples_that_would_overflow_together_are_refused(tokenizer: LLTokenizer) -> None:
    for multiples in ((65537, 65539), (10**5, 10**6), (0.01, 10**8), (7, 11, 13, 17, 19, 23, 29, 31)):
        schema = {"type": "integer", "allOf": [{"multipleOf": multiple} for multiple in multiples]}
        with pytest.raises(SchemaError, match=f"contains the number {multiples[-1]} at #/allOf"):
            exact_schema(schema)
    schema = {"type": "integer", "minimum": 1, "maximum": 99999, "allOf": [{"multipleOf": 77}, {"multipleOf": 0.5}]}
    start = matcher_of({**schema, "multipleOf": 35}, tokenizer)
    assert all(allows(start, str(number)) == (number % 385 == 0) for number in range(1, 1200))


NAMES = ["a", "b", "ab", "aab", "x", "xa", "a1", "", "é"]
NAME_PATTERNS = ["^a", "b$", "a", "^[ab]+$", "^.$", "^x?a1?$", "", "^(?!a)", "[&&]"]
VALUES = ["0", "3", "7", '"s"', "null"]
VALUE_SCHEMAS: list[Any] = [
    {"type": "integer"},
    {"type": "integer", "minimum": 2},
    {"type": ["integer", "null"], "maximum": 5},
    {"type": ["string", "null"]},
    {"enum": [0, "s", None]},
    True,
    False,
]


@pytest.mark.parametrize("seed", seeds(60))
def test_all_patterns_and_properties_that_match_a_name_hold_for_it(tokenizer: LLTokenizer, seed: int) -> None:
    rng = random.Random(seed)
    properties = {name: rng.choice(VALUE_SCHEMAS) for name in rng.sample(NAMES, rng.randint(0, 2))}
    patterns = {pattern: rng.choice(VALUE_SCHEMAS) for pattern in rng.sample(NAME_PATTERNS, rng.randint(1, 3))}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "patternProperties": patterns}
    if rng.random() < 0.7:
        schema["additionalProperties"] = rng.choice([False, {"type": "integer", "maximum": 5}])
    if rng.random() < 0.3:
        schema["required"] = rng.sample(NAMES, 1)
    start = compiled(schema, tokenizer)
    validator = jsonschema_rs.Draft202012Validator(schema)
    texts = ["{}", *(f'{{"{name}":{value}}}' for name in NAMES for value in VALUES)]
    in_order = dict.fromkeys([*properties, *schema.get("required", []), *NAMES])
    for first, second in combinations(in_order, 2):
        texts += [f'{{"{first}":{rng.choice(VALUES)},"{second}":{rng.choice(VALUES)}}}' for _ in range(2)]
    valid = [text for text in texts if validator.is_valid(json.loads(text))]
    if start.is_error():
        assert "nsatisfiable" in start.get_error(), (schema, start.get_error())
        assert not valid, schema
    else:
        assert [text for text in texts if allows(start, text)] == valid, (schema, exact_schema(schema))


def test_patterns_whose_overlap_is_too_large_are_refused_by_name() -> None:
    patterns = {"^(?!.*(a|b).{9}c)": {}, "b": {}}
    with pytest.raises(SchemaError, match="contains patterns of which one or an overlap needs too many states at #/"):
        exact_schema({"patternProperties": patterns})


@pytest.mark.timeout(20)
def test_bounds_far_beyond_what_is_supported_are_refused_at_once() -> None:
    for bounds in ({"minimum": 10**30}, {"exclusiveMaximum": -1e300}, {"minimum": 2.0**70, "maximum": 2.0**80}):
        for type_ in ("number", "integer"):
            with pytest.raises(SchemaError, match="no supported number is within them"):
                exact_schema({"type": type_, **bounds})


JUNK = [
    None,
    True,
    0,
    -1,
    1.5,
    "a",
    "#/0",
    "#/properties/a",
    [],
    [1],
    ["a", "a"],
    [{}],
    {},
    {"a": 1},
    {"a": {}},
    10**30,
]
JUNK += [
    {"type": "string"},
    {"enum": ["a"]},
    [None, {"b": []}],
    {"a": ["b"]},
    "date",
    {"$ref": "#"},
    {"not": {"$ref": "#"}},
]
JUNK += ["(", ["object"], "array", {"enum": 5}, {"required": 5}, {"properties": []}, {"type": 7}, {"format": []}]


@pytest.mark.parametrize("first_seed", seeds(40))
def test_what_is_no_schema_is_at_most_refused(first_seed: int) -> None:
    """llguidance names what is wrong; here, nothing may fail."""
    for seed in range(20 * first_seed, 20 * first_seed + 20):
        rng, schema = random.Random(seed), random_schema(seed)
        for _ in range(rng.randint(1, 5)):
            rng.choice(objects_in(schema))[rng.choice(sorted(_IMPLEMENTED | NOT_IMPLEMENTED))] = copy.deepcopy(
                rng.choice(JUNK)
            )
        for is_strict in (True, False):
            with suppress(SchemaError):
                exact_schema(schema, is_strict)


def objects_in(value: Any) -> list[dict[str, Any]]:
    found = [value] if isinstance(value, dict) else []
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        found += objects_in(entry)
    return found
