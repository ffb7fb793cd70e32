"""Schemas that pydantic makes of its types: pydantic accepts what their grammars allow."""

import base64
import datetime
import decimal
import enum
import fractions
import ipaddress
import json
import pathlib
import random
import re
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema_rs
import orjson
import pydantic
import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import Field, StringConstraints, TypeAdapter
from pydantic.types import UUID6, UUID7, UUID8

from tests.helpers.examples import IS_NIGHTLY
from tests.helpers.grammar_texts import allows, random_answer
from tests.helpers.small_tokenizer import EOS_IDS, VOCAB_SIZE
from tokasaurus.server.protocol.exact_schema import SchemaError, exact_schema
from tokasaurus.server.protocol.string_formats import FORMATS
from tokasaurus.text.grammars import load_grammar_vocabulary

NUM_DRAWS = 100 if IS_NIGHTLY else 12


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


class Order(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    id: pydantic.UUID4
    made: pydantic.AwareDatetime
    colors: set[Color] = Field(min_length=1)
    counts: dict[Literal["small", "large"], Annotated[int, Field(ge=0, lt=10)]]
    price: Annotated[decimal.Decimal, Field(gt=0, max_digits=6, decimal_places=2)]
    weight: Annotated[float, Field(gt=0, le=0.5)]
    key: pydantic.SecretStr
    path: pathlib.Path
    data: bytes
    mail: pydantic.EmailStr
    address: pydantic.IPvAnyAddress | None


class Sum(pydantic.BaseModel):
    kind: Literal["sum"]
    terms: Annotated[list["Term"], Field(min_length=1, max_length=2)]


class Number(pydantic.BaseModel):
    kind: Literal["number"]
    value: Annotated[int, Field(ge=0, le=9)]


Term = Annotated[Sum | Number, Field(discriminator="kind")]
Sum.model_rebuild()
ONE: dict[str, Any] = {"kind": "number", "value": 1}


Short = Annotated[str, StringConstraints(pattern="^x[0-9]$")]
BUILT: list[tuple[Any, list[Any]]] = [
    (dict[Literal["a", "b"], int], [{"a": 1}, {"a": 1, "b": 2}, {}]),
    (dict[Color, bool], [{"red": True}]),
    (dict[uuid.UUID, None], [{str(uuid.UUID(int=5)): None}]),
    (dict[datetime.date, None], [{"2026-11-29": None}]),
    (set[Literal["a", "b", "c"]], [[], ["b", "a"], ["c", "a", "b"]]),
    (Annotated[frozenset[Color], Field(min_length=2)], [["blue", "red"], ["red", "blue"]]),
    (set[Size], [[2, 1]]),
    (set[bool], [[True, False]]),
    (pathlib.Path, ["a/b.c", "/"]),
    (bytes, ["abc", "é"]),
    (pydantic.SecretStr, ["x"]),
    (pydantic.SecretBytes, ["x"]),
    (ipaddress.IPv4Address, ["1.2.3.4", "255.0.255.0"]),
    (ipaddress.IPv6Address, ["::", "::1", "2001:db8::1", "1:2:3:4:5:6:7:8", "1::8", "fe80::1:2"]),
    (ipaddress.IPv4Network, ["10.0.0.0/8", "192.168.128.0/17", "1.2.3.4/32", "0.0.0.0/0", "1.2.3.4"]),
    (ipaddress.IPv6Network, ["2001:db8::/32", "::/0", "fe80::/64", "1:2:3:4:5:6:7:8"]),
    (ipaddress.IPv4Interface, ["1.2.3.4/24", "1.2.3.4"]),
    (ipaddress.IPv6Interface, ["2001:db8::1/64"]),
    (pydantic.IPvAnyAddress, ["1.2.3.4", "::1"]),
    (pydantic.IPvAnyNetwork, ["10.0.0.0/8", "2001:db8::/32"]),
    (pydantic.IPvAnyInterface, ["1.2.3.4/24", "::1/128"]),
    (uuid.UUID, [str(uuid.UUID(int=2**127 + 7))]),
    (pydantic.UUID1, ["83b4e99c-ebd5-11f1-a5b4-02fc00000001"]),
    (pydantic.UUID3, [str(uuid.uuid3(uuid.NAMESPACE_DNS, "a"))]),
    (pydantic.UUID4, ["29265800-e95c-4ff3-8266-73c9e47e1c32"]),
    (pydantic.UUID5, [str(uuid.uuid5(uuid.NAMESPACE_DNS, "a"))]),
    (UUID6, []),
    (UUID7, []),
    (UUID8, []),
    (datetime.date, ["2026-11-29", "2024-02-29", "2000-02-29"]),
    (datetime.time, ["23:59:59Z", "00:00:00.5+01:00"]),
    (datetime.datetime, ["2026-11-29T12:00:00Z", "2024-02-29t12:00:00.123-05:00"]),
    (pydantic.AwareDatetime, ["2026-11-29T12:00:00Z"]),
    (datetime.timedelta, ["P1Y2M3DT4H5M6S", "PT5M", "P3W"]),
    (pydantic.EmailStr, ["a.b+c@mail.example.org"]),
    (pydantic.NameEmail, ["Ann Lee <ann@example.org>", "ann@example.org"]),
    (pydantic.Base64Bytes, [base64.b64encode(b"a" * num).decode() for num in range(5)]),
    (pydantic.Base64UrlBytes, [base64.urlsafe_b64encode(b"\xff" * num).decode() for num in range(5)]),
    (Annotated[float, Field(gt=0, le=0.5)], [0.5, 0.25]),
    (Annotated[int, Field(gt=0, lt=10, multiple_of=3)], [3, 9]),
    (Short, ["x1"]),
    (Term, [ONE, {"kind": "sum", "terms": [ONE, {"kind": "sum", "terms": [ONE]}]}]),
    (Annotated[list[Color], Field(min_length=1, max_length=2)], [["red", "red"]]),
    (tuple[int, Color], [[1, "red"]]),
    (Literal["a", 1, None], ["a", 1, None]),
]
# Types that accept less than their schema says, because it is only an annotation, or its keyword has no equivalent.
LEFT_TO_THE_MODEL: list[tuple[Any, list[Any]]] = [
    (dict[Short, int], [{"x1": 1}]),
    (pydantic.AnyUrl, ["https://example.org:8080/a?b=c#d", "mailto:a@b.c"]),
    (pydantic.HttpUrl, ["https://example.org"]),
    (pydantic.PostgresDsn, ["postgres://a:b@h1:1,h2:2/db"]),
    (pydantic.Json[int], ["5"]),
    (pydantic.FilePath, ["/etc/hosts"]),
    (pydantic.DirectoryPath, ["/"]),
    (pydantic.NaiveDatetime, []),
    (pydantic.PastDate, ["2000-01-01"]),
    (re.Pattern[str], ["^a"]),
    (pydantic.Base64Str, ["YQ=="]),
    (decimal.Decimal, ["1", 1.5]),
    (Annotated[decimal.Decimal, Field(gt=0, lt=1)], [0.5]),
    (pydantic.ByteSize, ["1.5 GiB", 100]),
    (fractions.Fraction, ["1/3", "-2"]),
    (complex, ["1+2j"]),
]
NOT_STRICT: list[tuple[Any, list[Any]]] = [
    (set[str], [["a", "b"]]),
    (frozenset[int], [[1]]),
    (Annotated[set[str], Field(min_length=1)], [["a"]]),
    (set[Annotated[str, StringConstraints(max_length=2)]], [["a"]]),
    (set[Literal[1, 2, 3, 4, 5, 6, 7]], [[7, 1]]),
]


def name_of(case: Any) -> str:
    return re.sub(r"[^\w\[\], ]", "", str(case))[:60]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_directory: Path) -> LLTokenizer:
    return load_grammar_vocabulary(tokenizer_directory, VOCAB_SIZE, EOS_IDS).tokenizer


def start_of(type_: Any, tokenizer: LLTokenizer, is_strict: bool) -> LLMatcher:
    return start_of_schema(TypeAdapter(type_).json_schema(), tokenizer, is_strict)


def start_of_schema(schema: dict[str, Any], tokenizer: LLTokenizer, is_strict: bool) -> LLMatcher:
    text = orjson.dumps({**exact_schema(schema, is_strict), "x-guidance": {"whitespace_flexible": False}}).decode()
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(text), log_level=0)
    assert not matcher.is_error(), (schema, matcher.get_error())
    return matcher


def draws(start: LLMatcher, num_draws: int = NUM_DRAWS) -> list[str]:
    rng = random.Random(0)
    return [answer for _ in range(num_draws) if (answer := random_answer(start, rng)) is not None]


def check_examples(type_: Any, start: LLMatcher, values: list[Any]) -> None:
    for value in values:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        TypeAdapter(type_).validate_json(text)
        assert allows(start, text), text


@pytest.mark.parametrize(("type_", "values"), BUILT, ids=name_of)
def test_pydantic_accepts_every_answer_for_its_own_schema(
    type_: Any, values: list[Any], tokenizer: LLTokenizer
) -> None:
    start = start_of(type_, tokenizer, is_strict=True)
    check_examples(type_, start, values)
    answers = draws(start)
    assert len(answers) > NUM_DRAWS / 3
    for answer in answers:
        TypeAdapter(type_).validate_json(answer)


@pytest.mark.parametrize(("type_", "values"), LEFT_TO_THE_MODEL, ids=name_of)
def test_what_a_schema_only_notes_is_left_to_the_model(type_: Any, values: list[Any], tokenizer: LLTokenizer) -> None:
    start = start_of(type_, tokenizer, is_strict=True)
    check_examples(type_, start, values)
    validator = jsonschema_rs.Draft202012Validator(TypeAdapter(type_).json_schema())
    for value in map(json.loads, draws(start)):
        assert value in (float("inf"), float("-inf")) or validator.is_valid(value), value  # 1e999 is a number


@pytest.mark.parametrize(("type_", "values"), NOT_STRICT, ids=name_of)
def test_what_cannot_be_enforced_is_refused_only_if_strict(
    type_: Any, values: list[Any], tokenizer: LLTokenizer
) -> None:
    with pytest.raises(SchemaError, match="contains uniqueItems at #, which is not implemented"):
        start_of(type_, tokenizer, is_strict=True)
    start = start_of(type_, tokenizer, is_strict=False)
    check_examples(type_, start, values)
    for answer in draws(start):  # the rest of the schema is followed
        TypeAdapter(type_).validate_json(answer)


def test_a_model_of_many_types_is_followed(tokenizer: LLTokenizer) -> None:
    start = start_of(Order, tokenizer, is_strict=True)
    order = {
        "id": str(uuid.uuid4()),
        "made": "2026-11-29T12:00:00Z",
        "colors": ["blue", "red"],
        "counts": {"small": 3},
        "price": "12.50",
        "weight": 0.25,
        "key": "secret",
        "path": "/tmp",
        "data": "abc",
        "mail": "ann@example.org",
        "address": None,
    }
    check_examples(Order, start, [order])


STANDARD = [
    "date",
    "date-time",
    "time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
    "uri-reference",
]
STANDARD += ["json-pointer", "relative-json-pointer", "idn-email"]


@pytest.mark.parametrize("name", STANDARD)
def test_formats_of_the_standard_pass_an_independent_validator(name: str, tokenizer: LLTokenizer) -> None:
    validator = jsonschema_rs.Draft202012Validator({"format": name}, validate_formats=True)
    answers = draws(start_of_schema({"type": "string", "format": name}, tokenizer, is_strict=True), 3 * NUM_DRAWS)
    assert len(answers) > NUM_DRAWS
    for answer in answers:
        assert validator.is_valid(json.loads(answer)), answer


@pytest.mark.parametrize(
    ("name", "examples", "counterexamples"),
    [
        ("date", ["2024-02-29", "0001-12-31", "9999-01-01"], ["2023-02-29", "1900-02-29", "0000-01-01", "2024-04-31"]),
        ("time", ["12:00:00z", "23:59:59.123456+14:00"], ["12:00:60Z", "24:00:00Z", "12:00:00", "12:00Z"]),
        ("email", ["a@b.org", "o'neil+x@a-b.co.uk"], ["a@b", "a..b@c.org", "@b.org", f"{'a' * 65}@b.org", "a@-b.org"]),
        ("ipv6", ["::", "1::", "a:b::c"], [":::", "1:2:3:4:5:6:7::8:9", "1:2:3:4:5:6:7", "12345::"]),
        ("ipv4network", ["10.128.0.0/9"], ["10.1.0.0/9", "10.0.0.1/24", "10.0.0.0/33"]),
        (
            "uri",
            ["a:", "http://u@[::1]:65535/x/y?q#f", "urn:a:b"],
            ["//a", "a", "http://a:65536/", "http://a b", "a:%zz"],
        ),
        ("uri-reference", ["", "a", "../b?c", "//h/p", "#f", "a:b", "./a:b"], ["a b", "%", "1:b", "##"]),
        ("json-pointer", ["", "/a~1b/0"], ["a", "/~2"]),
        ("relative-json-pointer", ["0", "1/a", "2#"], ["01", "/a", "#"]),
        ("uuid7", ["0190aaaa-bbbb-7ccc-9ddd-eeeeeeeeeeee"], ["0190aaaa-bbbb-4ccc-9ddd-eeeeeeeeeeee"]),
        ("base64", ["", "YQ==", "YWI="], ["YQ", "Y===", "YQ=a"]),
        ("fraction", ["1/2", "-3"], ["1/0", "1/", "/2"]),
    ],
)
def test_examples_of_formats(
    name: str, examples: list[str], counterexamples: list[str], tokenizer: LLTokenizer
) -> None:
    start = start_of_schema({"type": "string", "format": name}, tokenizer, is_strict=True)
    for text in examples + counterexamples:
        assert allows(start, json.dumps(text)) == (text in examples), text


def test_every_pattern_of_a_format_is_one_that_schemas_may_have(tokenizer: LLTokenizer) -> None:
    for name, pattern in FORMATS.items():
        by_pattern, by_format = (
            exact_schema({"type": "string", keyword: value})
            for keyword, value in (("pattern", pattern), ("format", name))
        )
        assert by_pattern == by_format
        start_of_schema({"format": name}, tokenizer, is_strict=True)
