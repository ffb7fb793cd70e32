"""Patterns of schemas and regex fields allow what they match in ECMA 262; the reference is QuickJS."""

import json
import random
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import quickjs
from llguidance import LLMatcher, LLTokenizer

from tests.helpers.examples import IS_NIGHTLY, seeds
from tests.helpers.grammar_texts import allows
from tests.helpers.random_patterns import random_pattern, random_text
from tokasaurus.server.grammars.validator_process import _CONVERTERS, _lark_of_gbnf
from tokasaurus.server.protocol.ecma_patterns import PatternError, translate_pattern
from tokasaurus.server.protocol.exact_schema import SchemaError, exact_schema

Matches = Callable[[str, str, list[str]], list[bool]]


@pytest.fixture(scope="module")
def engine() -> Matches:
    """(pattern, flags, texts) → which texts match."""
    context = quickjs.Context()
    context.eval(
        "function test(p, f, texts) { const r = new RegExp(p, f); return JSON.stringify(texts.map(t => r.test(t))) }"
    )
    context.eval("function run(p, f, texts) { return test(p, f, JSON.parse(texts)) }")
    run = context.get("run")
    return lambda pattern, flags, texts: json.loads(run(pattern, flags, json.dumps(texts)))


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    """One token for each byte."""
    return LLTokenizer("byte")


def compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), (grammar, matcher.get_error())
    return matcher


def of_schema(tokenizer: LLTokenizer, schema: dict[str, Any]) -> LLMatcher:
    text = json.dumps({**exact_schema(schema), "x-guidance": {"whitespace_flexible": False}})
    return compiled(tokenizer, LLMatcher.grammar_from_json_schema(text))


def of_translation(tokenizer: LLTokenizer, expressions: tuple[str, ...]) -> LLMatcher:
    grammar = f"start: TEXT\nTEXT: {' & '.join(f'/{part}/' for part in expressions)}"
    return compiled(tokenizer, LLMatcher.grammar_from_lark(grammar))


@pytest.mark.parametrize("seed", seeds(40))
def test_random_patterns_match_the_same_texts_in_an_engine(seed: int, engine: Matches, tokenizer: LLTokenizer) -> None:
    rng = random.Random(seed)
    num_patterns = num_tried = num_matches = 0
    for _ in range(100 if IS_NIGHTLY else 40):
        pattern = random_pattern(rng)
        texts = [random_text(rng) for _ in range(30)]
        expected = engine(pattern, "u", texts)
        num_patterns += 1
        expressions, refusal = (), ""
        try:
            expressions = translate_pattern(pattern).expressions
        except PatternError as error:
            refusal = str(error)
        if refusal:
            assert re.search("too large|too many states|only general categories", refusal), (pattern, refusal)
            continue
        start = of_translation(tokenizer, expressions)
        num_tried += 1
        num_matches += sum(expected)
        for text, matches in zip(texts, expected, strict=True):
            assert allows(start, text) == matches, (pattern, text, expressions)
    assert num_tried > 0.85 * num_patterns
    assert num_matches > num_tried


PATTERNS: list[tuple[str, list[str]]] = [
    ("^[^A-Za-z0-9&&_]$", ["&", "_", "a", "é", "-", "&&"]),
    ("^[a&&b]+$", ["a", "b", "&", "ab&", "c"]),
    ("^[a~~b]+$", ["a", "~", "b", "c"]),
    ("^[!--]$", ["!", "-", "+", "."]),
    ("^[[a]]$", ["[]", "a]", "a", "["]),
    ("^[[:alpha:]]$", [":]", "a]", "x", "x]"]),
    (r"^\d+$", ["12", "٣", ""]),
    (r"^\w+$", ["a_1", "é", "λ"]),
    (r"^\s$", ["\ufeff", "\u2028", "\x85", "\v", "\u180e", "\u00a0"]),
    ("^.$", ["a", "\n", "\r", "\u2028", "\u2029", "\x85", "😀"]),
    (r"^\cJ\x41\u0042\u{43}\uD83D\uDE00$", ["\nABC😀", "jABC😀"]),
    (r"^[\p{Lu}\p{Script=Greek}-]$", ["A", "λ", "a", "-"]),
    (r"\bfoo\b", ["foo", "a foo.", "foobar", "éfoo", "xfoo"]),
    (r"o\Bo", ["foo", "o o", "oo"]),
    ("^a|b$", ["a", "ax", "xb", "xax", "b"]),
    ("(,|^)x(,|$)", ["x", ",x", "ax", "x,y", "xa,"]),
    ("a$|^b", ["ba", "xa", "by", "ab", "ac"]),
    ("^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$", ["1.5", "-0", ".", "+.", "", "-.5", "1."]),
    ("^(?=.*[A-Z])(?=.*\\d).{3,}$", ["aA1", "A1", "abc", "1bA!"]),
    ("^(?!admin$|root$)[a-z]+$", ["admin", "root", "admins", "toor"]),
    ("^(?!.*\\.\\.)[a-z.]+$", ["a.b", "a..b", ".", "..", "a."]),
    ("x*", ["", "abc"]),
    ("", ["", "a"]),
    ('^{"a": [}]$', ['{"a": }', '{"a": ]']),
    ("^(?<year>\\d{4})(?:-\\d\\d)??$", ["2026", "2026-11", "226"]),
    (r"^\-\@\#\ \"\_\/$", ['-@# "_/']),
]


@pytest.mark.parametrize(("pattern", "texts"), PATTERNS)
def test_a_pattern_means_the_same_in_every_field(
    pattern: str, texts: list[str], engine: Matches, tokenizer: LLTokenizer
) -> None:
    flags = "" if pattern in ("^[[a]]$", "^[[:alpha:]]$", '^{"a": [}]$', PATTERNS[-1][0]) else "u"
    expected = engine(pattern, flags, texts)
    value = of_schema(tokenizer, {"type": "string", "pattern": pattern})
    name = of_schema(
        tokenizer, {"type": "object", "patternProperties": {pattern: {"const": 1}}, "additionalProperties": False}
    )
    whole = compiled(tokenizer, _CONVERTERS["regex"](pattern))
    is_whole = engine(f"^(?:{pattern})$", flags, texts)
    for text, matches, matches_whole in zip(texts, expected, is_whole, strict=True):
        written = json.dumps(text, ensure_ascii=False).replace("\\u0085", "\x85")
        assert allows(value, written) == matches, text
        assert allows(name, f"{{{written}:1}}") == matches, text
        assert allows(whole, text) == matches_whole, text


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"(?i:stra\u00dfe|k)", ["STRAẞE", "strasse", "\u212a", "K", "STRAßE"]),
        (r"^(?i:[^a-c])$", ["A", "b", "d", "D"]),
        (r"^(?i:[\w])$", ["\u017f", "\u212a", "é"]),
        (r"^a(?s:.)b.$", ["a\nbc", "a\nb\n"]),
        (r"(?m:^b$)", ["a\nb\nc", "ab", "b", "a\u2028b", "a\rb"]),
        (r"^(?m:^|b)a", ["a", "\na", "ba"]),
    ],
)
def test_modifiers_of_groups(pattern: str, texts: list[str], engine: Matches, tokenizer: LLTokenizer) -> None:
    start = of_translation(tokenizer, translate_pattern(pattern).expressions)
    assert [allows(start, text) for text in texts] == engine(pattern, "u", texts)


@pytest.mark.parametrize("pattern", ["(?i)ab", r"\A(?P<x>a|b)+\Z", r"(?P<x>a)|\bb\b", "(?s)a.b", r"\Aab\z|c"])
def test_forms_of_python_have_their_meaning(pattern: str, tokenizer: LLTokenizer) -> None:
    start = of_translation(tokenizer, translate_pattern(pattern).expressions)
    for text in ("ab", "AB", "a", "b", "xab", "ab\n", "a\nb", "a b", "ba", "c", "xbx", ""):
        assert allows(start, text) == (re.search(pattern.replace(r"\z", r"\Z"), text) is not None), text


REFUSED = [
    (r"(a)\1", "back-references"),
    (r"(?<a>b)\k<a>", "back-references"),
    ("(?P<a>b)(?P=a)", "back-reference"),
    ("(?<=a)b", "look-behind"),
    ("(?<!a)b", "look-behind"),
    ("(?>a)", "atomic"),
    ("(?#a)", "(?#a"),
    ("a**", "quantifier after a quantifier"),
    ("a*+", "quantifier after a quantifier"),
    ("*a", "nothing that * could repeat"),
    ("{2}", "nothing that { could repeat"),
    ("a{,3}", "{0,n}"),
    ("a{3,2}", "3 to 2 times"),
    ("(a", "( without )"),
    ("a)", ") without ("),
    ("[a", "[ without ]"),
    ("a\\", "ends within an escape"),
    ("[z-a]", "range from 'z' to 'a'"),
    (r"\h", r"\h, which is no escape"),
    (r"\p{Nonsense", r"\p without the name"),
    (r"\u{110000}", "no character"),
    (r"^\b*", "repeats an assertion"),
    (r"(?:\ba)*", "word boundary or look-ahead in a part that is repeated"),
    (r"(?i:\ba)", "where case is ignored"),
    (r"(?ii:a)", "one twice"),
]


@pytest.mark.parametrize(("pattern", "named"), REFUSED)
def test_what_is_wrong_or_not_supported_is_refused_by_name(pattern: str, named: str) -> None:
    with pytest.raises(PatternError, match=re.escape(named)):
        translate_pattern(pattern)
    with pytest.raises(SchemaError, match=f"contains a pattern at #/items/pattern that .*{re.escape(named)}"):
        exact_schema({"items": {"pattern": pattern}})
    with pytest.raises(SchemaError, match=f"contains a pattern that .*{re.escape(named)}.* at #/patternProperties"):
        exact_schema({"patternProperties": {pattern: {}}})


@pytest.mark.parametrize(
    "pattern",
    [
        "(?![" + r"\p{L}" * 5000 + "])",
        "".join(rf"(?![\p{{L}}\u{{{code:x}}}])" for code in range(2500)),
        r"(?i:[\u{0}-\u{10ffff}])" * 1500,
        "(?!a)" + r"\p{Lu}" * 7000,
    ],
    ids=["one class", "many classes", "any case", "a long text"],
)
def test_long_patterns_with_large_sets_take_little_time(pattern: str) -> None:
    started = time.thread_time()
    with suppress(PatternError):
        translate_pattern(pattern)
    assert time.thread_time() - started < 4


@pytest.mark.parametrize(
    ("grammar", "allowed", "refused"),
    [
        ("root ::= [^A-Za-z0-9&&_]", "é-~", "&_a"),
        ("root ::= [a&&b]", "ab&", "c"),
        ("root ::= [a~~b-]", "a~b-", "c"),
        ("root ::= [+--]", "+,-", "."),
        ("root ::= [[a]", "[a", "b"),
        ("root ::= [a-]", "a-", "b"),
        ("root ::= [-a^/\\]\\\\]", "-a^/]\\", "b["),
        ("root ::= [\\x41-\\x43\\n\\t\\-]", "ABC\n\t-", "Dn"),
        ('root ::= "[a&&b]" | [x] # [y&&', "x", "a&y"),
        ("root ::= [\\u00e9-\\u00eb\\U0001F600]", "éê😀", "e"),
    ],
)
def test_classes_of_gbnf_contain_what_they_show(
    grammar: str, allowed: str, refused: str, tokenizer: LLTokenizer
) -> None:
    start = compiled(tokenizer, LLMatcher.grammar_from_lark(_lark_of_gbnf(grammar)))
    assert [text for text in allowed + refused if allows(start, text)] == list(allowed)
