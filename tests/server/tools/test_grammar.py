"""Grammars for tool calls: CallReader parses every text they allow, and only valid calls are allowed."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken
from tokenizers import Tokenizer as BaseTokenizer

from tests.helpers.small_tokenizer import IM_END, save_small_tokenizer
from tests.server.helpers.finished_sequences import make_request
from tests.server.helpers.grammar_script import follow_grammars
from tokasaurus.server.errors import InvalidRequest, Unsupported
from tokasaurus.server.grammars.validator_process import compile_grammar
from tokasaurus.server.protocol.grammar_fields import GrammarSource
from tokasaurus.server.protocol.tools import Tool
from tokasaurus.server.tools.formats import FORMATS, HERMES, LLAMA3, ToolCallFormat
from tokasaurus.server.tools.grammar import write_calls_or_json, write_forced_calls, write_free_calls
from tokasaurus.server.tools.parser import CallFragment, CallReader, CallRules
from tokasaurus.text.grammars import GrammarVocabulary, load_grammar_vocabulary
from tokasaurus.text.token_decoder import CALL_MARKS
from tokasaurus.text.tokenizer import Tokenizer

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
PARAMETERS: dict[str, dict[str, Any] | None] = {
    "go": {
        "properties": {"to": {"$ref": "#/$defs/point"}, "by": {"enum": ["car", "fo</tool_call>ot", 'é"']}},
        "required": ["to"],
        "additionalProperties": False,
        "$defs": {"point": POINT},
    },
    "stop": None,
    "say": {"type": ["object", "null"]},
}
TOOLS = [
    Tool.model_validate(
        {"type": "function", "function": {"name": name, "parameters": parameters, "strict": name != "say"}}
    )
    for name, parameters in PARAMETERS.items()
]
ALL = frozenset(PARAMETERS)


FORCED = [format_ for format_ in FORMATS.values() if format_.syntax != "gemma"]


def is_valid_call(name: str, arguments: str) -> bool:
    if name == "stop":
        return arguments == "{}"
    schema = {**(PARAMETERS[name] or {}), "type": "object"}
    return jsonschema_rs.is_valid(schema, json.loads(arguments))


def read(text: str, rules: CallRules) -> tuple[str, list[tuple[str, str]]]:
    reader = CallReader(rules)
    parts = [*reader.add(text), *reader.finish()]
    calls = [(part.name or "", part.arguments) for part in parts if isinstance(part, CallFragment)]
    return "".join(part for part in parts if isinstance(part, str)), calls


@pytest.mark.parametrize(
    ("format_", "names"),
    [*((format_, ALL) for format_ in FORCED), (HERMES, {"go"}), (LLAMA3, {"stop", "say"})],
    ids=lambda value: value.name if isinstance(value, ToolCallFormat) else "-".join(sorted(value)),
)
def test_random_text_of_a_forced_grammar_contains_only_valid_calls(
    format_: ToolCallFormat, names: set[str], tokenizer_directory: Path
) -> None:
    tokenizer = Tokenizer.load(tokenizer_directory)
    script = follow_grammars(tokenizer_directory)
    compiler = load_grammar_vocabulary(tokenizer_directory, tokenizer.vocab_size, [IM_END])
    seen: set[str] = set()
    lengths: set[int] = set()
    for parallel in (True, False):
        rules = CallRules(format_, frozenset(names), parallel)
        source = write_forced_calls(TOOLS, rules, tokenizer.added_tokens)
        assert source.param == "tools"
        grammar = compile_grammar(compiler, source.format, source.text)
        for seed in range(16):
            request = dataclasses.replace(make_request(), seed=seed, grammar=grammar, max_new_tokens=700)
            reply = script(request, 0)
            assert reply is not None
            content, calls = read(tokenizer.decode(reply.token_ids), rules)
            assert content == ""
            is_whole = reply.finish_reason == "stop"
            assert all(is_valid_call(*call) for call in (calls if is_whole else calls[:-1])), calls
            assert calls or not is_whole
            assert parallel or len(calls) <= 1
            seen.update(name for name, _ in calls)
            lengths.add(len(calls))
    assert seen == names
    assert max(lengths) > 1


THINKING_TAGS = ("<think>", "</think>")


@pytest.fixture(
    scope="module",
    params=[
        ("text", ()),
        ("token", THINKING_TAGS),
        ("special token", THINKING_TAGS),
    ],
)
def tokenizer_and_compiler(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, GrammarVocabulary]:
    """Tokenizers with the marks of calls and the thinking tags as plain text, as added tokens or as special tokens."""
    kind, thinking_tags = request.param
    directory = save_small_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    base = BaseTokenizer.from_file(str(directory / "tokenizer.json"))
    base.add_tokens([AddedToken(tag, special=False) for tag in thinking_tags])
    tags = [AddedToken(tag, special=kind == "special token") for tag in sorted(CALL_MARKS)]
    if kind == "token":
        base.add_tokens(tags)
    elif kind == "special token":
        base.add_special_tokens(tags)
    base.save(str(directory / "tokenizer.json"))
    tokenizer = Tokenizer.load(directory)
    assert ("<tool_call>" in tokenizer.added_tokens) == (kind != "text")
    return tokenizer, load_grammar_vocabulary(directory, tokenizer.vocab_size, [IM_END])


def matcher_of(
    write: Callable[..., Any],
    format_: ToolCallFormat,
    tokenizer_and_compiler: tuple[Tokenizer, GrammarVocabulary],
    parallel: bool = True,
) -> Callable[[str], bool]:
    """Returns a function that tells whether the grammar accepts a whole text."""
    tokenizer, compiler = tokenizer_and_compiler
    source = write(TOOLS, CallRules(format_, ALL, parallel), tokenizer.added_tokens)
    grammar = compile_grammar(compiler, source.format, source.text)

    def matches(text: str) -> bool:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(token_ids) == text
        matcher = LLMatcher(compiler.tokenizer, grammar, log_level=0)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    return matches


GO = ("go", {"to": {"x": 5}, "by": 'é"'})
WRONG = [("go", {"to": {"x": "5"}}), ("go", {}), ("stop", {"a": 1})]


@pytest.mark.parametrize("format_", FORCED, ids=lambda format_: format_.name)
def test_forced_grammar_accepts_exactly_the_calls_in_the_models_format(
    format_: ToolCallFormat, tokenizer_and_compiler: tuple[Tokenizer, GrammarVocabulary]
) -> None:
    matches = matcher_of(write_forced_calls, format_, tokenizer_and_compiler)
    for calls in ([GO], [("stop", {})], [GO, ("say", {"a": ["b"]}), GO]):
        text = format_.write_all(calls)
        assert matches(text)
        assert not matches(f"{text} ")
        assert not matches(f"Sure. {text}")
    for name, arguments in [*WRONG, ("unknown", {})]:
        assert not matches(format_.write(name, arguments))
    assert not matches("")
    say = format_.write("say", {"a": 1})
    assert matches(say)
    if format_.syntax == "json":
        assert not matches(say.replace('"a": 1', '"a": 1, "\\u0061": 2')), "the same name, escaped"
    assert not matcher_of(write_forced_calls, format_, tokenizer_and_compiler, parallel=False)(
        format_.write_all([GO] * 2)
    )


@pytest.mark.parametrize("format_", FORCED, ids=lambda format_: format_.name)
def test_free_grammar_accepts_text_and_only_valid_calls_of_strict_tools(
    format_: ToolCallFormat, tokenizer_and_compiler: tuple[Tokenizer, GrammarVocabulary]
) -> None:
    matches = matcher_of(write_free_calls, format_, tokenizer_and_compiler)
    go = format_.write(*GO)
    for text in (
        "",
        "Sure {5} é.",
        go,
        f"Sure.\n{go}",
        f"{format_.write_all([GO, ('say', {'a': 1})])} bye",
        '{"name": "Ann"}',
    ):
        assert matches(text), text
        assert matches(f"<think>\nwell {{\n</think>\n\n{text}<think>"), text
    for name, arguments in WRONG:
        assert not matches(format_.write(name, arguments))
        assert not matches(f"Sure.\n{go}\n{format_.write(name, arguments)}")
    if format_ is HERMES:
        assert not matches("<tool_call>")
        assert not matches(format_.write("unknown", {}))
    allows_one_call = matcher_of(write_free_calls, format_, tokenizer_and_compiler, parallel=False)
    assert allows_one_call(f"Sure.\n{go}")
    assert allows_one_call(f"<think>hm</think>{go}")
    assert allows_one_call("<think>hm</think> Sure.")
    assert not allows_one_call(f"{go} bye")


def test_grammar_accepts_either_calls_or_json(tokenizer_and_compiler: tuple[Tokenizer, GrammarVocabulary]) -> None:
    content = GrammarSource("json_schema", json.dumps(POINT), "response_format")

    def write(*asked: Any) -> GrammarSource:
        source = write_calls_or_json(*asked, content)
        assert source.param == "response_format"
        return source

    matches = matcher_of(write, HERMES, tokenizer_and_compiler)
    go = HERMES.write(*GO)
    for text in ('{"x": 5}', go, HERMES.write_all([GO, ("say", {})])):
        assert matches(text), text
    for text in ("", '{"x": "5"}', f'{{"x": 5}}\n{go}', f"Sure.\n{go}", *(HERMES.write(*call) for call in WRONG)):
        assert not matches(text), text
    with pytest.raises(Unsupported):
        matcher_of(write, LLAMA3, tokenizer_and_compiler)


def test_tool_parameters_that_are_not_an_object_schema_are_refused() -> None:
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}})
    with pytest.raises(InvalidRequest) as refused:
        write_forced_calls([TOOLS[0], tool], CallRules(LLAMA3, frozenset({"go", "f"})), ())
    assert refused.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize("write", [write_forced_calls, write_free_calls])
def test_big_numbers_and_unsupported_keywords_in_parameters_are_refused_by_name(write: Callable[..., Any]) -> None:
    def source(parameters: dict[str, Any]) -> GrammarSource:
        function = {"name": "f", "parameters": parameters, "strict": True}
        tool = Tool.model_validate({"type": "function", "function": function})
        answer: GrammarSource = write([tool], CallRules(HERMES, frozenset({"f"})), {})
        return answer

    for inner, named in (({"const": 2**53 + 1}, str(2**53 + 1)), ({"uniqueItems": True}, "uniqueItems")):
        with pytest.raises(Unsupported) as refused:
            source({"properties": {"a": {"anyOf": [inner]}}})
        assert refused.value.param == "tools[0].function.parameters"
        assert named in refused.value.message
        assert "#/properties/a/anyOf/0" in refused.value.message
    int64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1, "not": False}
    assert '"not"' not in source({"properties": {"a": int64}}).text


def test_what_parameters_of_a_tool_that_is_not_strict_cannot_enforce_is_left_to_the_model() -> None:
    tags = {"type": "array", "items": {"enum": ["a", "b"]}, "contains": {"const": "a"}}
    function = {"name": "f", "parameters": {"properties": {"tags": tags}}}
    sources = [
        write_forced_calls([Tool.model_validate({"type": "function", "function": function | strict})], CALL_F, {})
        for strict in ({}, {"strict": False}, {"strict": None})
    ]
    assert sources[0] == sources[1] == sources[2]
    assert '"enum"' in sources[0].text
    assert "contains" not in sources[0].text
    with pytest.raises(Unsupported, match="contains contains at #/properties/tags"):
        write_forced_calls(
            [Tool.model_validate({"type": "function", "function": function | {"strict": True}})], CALL_F, {}
        )


CALL_F = CallRules(HERMES, frozenset({"f"}))
