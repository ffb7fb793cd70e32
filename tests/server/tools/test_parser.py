"""Tool calls parsed from answer text; the result does not depend on how the text is cut into chunks."""

import json
import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers.examples import IS_NIGHTLY, examples
from tests.server.helpers.tool_texts import FRAGMENTS, NAMES
from tokasaurus.server.tools.formats import FORMATS, HERMES, LLAMA3, ToolCallFormat
from tokasaurus.server.tools.parser import CallFragment, CallReader, CallRules
from tokasaurus.text.token_decoder import REASONING_MARKS

Calls = list[tuple[str, str]]


def read(text: str, format_: ToolCallFormat, rng: random.Random | None = None, parallel: bool = True) -> Any:
    """Returns (content, calls); the reader gets the text whole, or in random chunks if `rng` is given."""
    reader = CallReader(CallRules(format_, NAMES, parallel))
    parts: list[str | CallFragment] = []
    position = 0
    while position < len(text):
        end = len(text) if rng is None else position + rng.choice([1, 1, 2, 3, 9])
        parts += reader.add(text[position:end])
        position = end
    parts += reader.finish()
    calls: list[tuple[str, list[str]]] = []
    for part in parts:
        if isinstance(part, CallFragment):
            assert (part.name is not None) == (part.index == len(calls)), "each call begins once, in order"
            if part.name is not None:
                calls.append((part.name, []))
            calls[part.index][1].append(part.arguments)
        else:
            assert part
    assert reader.num_calls == len(calls)
    content = "".join(part for part in parts if isinstance(part, str))
    return content, [(name, "".join(arguments)) for name, arguments in calls]


CONTENT = st.sampled_from(["", "Sure.", "two lines\nof text", "<think>\nhm, <tool\n</think>", "a < b } [1]", "€;"])
ARGUMENTS = st.dictionaries(
    st.sampled_from(["a", "é", 'q"', "<tool_call>", "\\"]),
    st.recursive(
        st.integers() | st.booleans() | st.text(max_size=4) | st.sampled_from(["</tool_call>", '{"name": "f"', "}}"]),
        lambda values: st.lists(values, max_size=2) | st.dictionaries(st.text(max_size=2), values, max_size=2),
        max_leaves=4,
    ),
    max_size=3,
)


def bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {f"k{index}": bare(item) for index, item in enumerate(value.values())}
    return [bare(item) for item in value] if isinstance(value, list) else value


SPACES = st.sampled_from(["", "\n", " ", "\n\n"])


@examples(200)
@given(
    st.sampled_from(list(FORMATS.values())),
    CONTENT,
    st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS, SPACES, st.booleans()), max_size=3),
    CONTENT,
    st.integers(0, 10**6),
)
def test_reader_parses_the_calls_that_the_format_writes(
    format_: ToolCallFormat,
    before: str,
    calls: list[tuple[str, dict[str, Any], str, bool]],
    after: str,
    seed: int,
) -> None:
    if format_.syntax != "json":  # names are bare in those, and a string cannot contain what ends it
        calls = [(name, bare(arguments), *rest) for name, arguments, *rest in calls]
    text = before
    for name, arguments, space, is_swapped in calls:
        written = format_.write(name, arguments)
        if is_swapped and format_.name_key:
            fields = {"id": "1", format_.arguments_key: arguments, format_.name_key: name}
            written = format_.start + json.dumps(fields, ensure_ascii=False) + format_.end
        elif is_swapped and format_.middle:  # with white space before the arguments
            opening = format_.start + format_.opening(name)
            written = f"{opening} {written.removeprefix(opening)}"
        text += ("\n" if format_.as_metadata else space) + written
    text += after
    expected = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments, *_ in calls]
    assert read(text, format_) == (before + after, expected)
    assert read(text, format_, random.Random(seed)) == (before + after, expected)


FRAGMENTS += ['"arguments"', '"parameters"', '{"a": 1}', "[", '"', "x", "tru", '"type": "function"', "\\", "<tool"]
FRAGMENTS += ['<tool_call>{"name": "f", "arguments": {', '{"name": "f", "parameters": {"a"', '{"parameters": {}, "na']


def texts_of(format_: ToolCallFormat) -> st.SearchStrategy[tuple[ToolCallFormat, list[str]]]:
    """The format, and text that is nearly a call in it."""
    parts = [format_.start_mark, format_.before, format_.prefix, format_.middle, format_.closing, format_.id_mark]
    parts += [format_.quote, format_.separator, format_.after, format_.end_mark, "f", "(", ")", "a=", "a:", "'x'", "]"]
    parts += [format_.start + format_.opening("f"), format_.write("f", {"a": "b"}), format_.write("f", {})[:-1]]
    fragments = st.sampled_from([part for part in parts if part]) | st.sampled_from(FRAGMENTS)
    return st.tuples(st.just(format_), st.lists(fragments, max_size=14))


@examples(500)
@given(st.sampled_from(list(FORMATS.values())).flatmap(texts_of), st.booleans())
@example((HERMES, ['<tool_call>{"name": "f", "arguments": {', "}", "}", "<tool", "<tool_call>"]), True)
@example((LLAMA3, ['{"name": "f", "parameters": {"a"', ":", "}", "}"]), True)
def test_result_does_not_depend_on_chunk_boundaries(written: tuple[ToolCallFormat, list[str]], parallel: bool) -> None:
    format_, fragments = written
    text = "".join(fragments)
    whole = read(text, format_, parallel=parallel)
    for seed in range(4):
        assert read(text, format_, random.Random(seed), parallel) == whole
    if not whole[1]:
        assert whole[0] == text, "no text is lost"
    assert parallel or len(whole[1]) <= 1


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\n",
        '<tool_call>\n{"name": "f", "argum',
        '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": "{}"}\n</tool_call>',
        '<tool_call>\n{"name": "f"}\n</tool_call>',
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "name": "f", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "more": 1, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"type": "object", "name": "f", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"arguments": {"a": }, "name": "f"}\n</tool_call>',
        '<tool_call>\n{"unknown": "<tool_call>{\\"name\\": \\"f\\", \\"arguments\\": {}}"}\n</tool_call>',
        '<tool_call>\n{"arguments": {"a": 1}, "parameters": {}, "name": "f"}\n</tool_call>',
        '{"name": "f", "arguments": {}}',
        " \n ",
    ],
)
def test_invalid_calls_are_returned_unchanged_as_content(text: str) -> None:
    assert read(text, HERMES) == (text, [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        # several calls, with or without the separator
        (
            '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {"a": 1}}',
            "",
            [("f", "{}"), ("f", '{"a": 1}')],
        ),
        ('{"name": "f", "parameters": {}}\n{"name": "f", "arguments": {}};\n', "", [("f", "{}"), ("f", "{}")]),
        ('{"name": "f", "parameters": {}}; and so on', "; and so on", [("f", "{}")]),
        ('Well: {"type": "function", "name": "f", "parameters": {}}', "Well:", [("f", "{}")]),
        # a call nested in an object that is not a call is not a call
        ('{"x": {"name": "f", "parameters": {}}}', '{"x": {"name": "f", "parameters": {}}}', []),
        ('{"x": 1, "y": [{"name": "f", "parameters": {}}]}', '{"x": 1, "y": [{"name": "f", "parameters": {}}]}', []),
        ('{ {"name": "f", "parameters": {}}', "{", [("f", "{}")]),
        # truncated, as by max_tokens
        ('{"name": "f", "parameters": {"a": [1, "b', "", [("f", '{"a": [1, "b')]),
        # broken arguments: no end tag says where they end
        ('{"name": "f", "parameters": {"a": tru e}} x', "", [("f", '{"a": tru e}} x')]),
        ('{"name": "f", "parameters": {}', "", [("f", "{}")]),
    ],
)
def test_llama_calls_are_parsed(text: str, content: str, calls: Calls) -> None:
    assert read(text, LLAMA3) == (content, calls)


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"{CALL}\n{CALL}", "", [("f", '{"a": 1}')] * 2),
        (f"one\n{CALL}\ntwo", "one\ntwo", [("f", '{"a": 1}')]),
        (f"<tool_call> {CALL}", "<tool_call>", [("f", '{"a": 1}')]),
        (f"<tool_call>\nno\n</tool_call>{CALL}", "<tool_call>\nno\n</tool_call>", [("f", '{"a": 1}')]),
        # an unclosed string ends at the end of its line
        (f'<tool_call>{{"name": "f\n{CALL}', '<tool_call>{"name": "f', [("f", '{"a": 1}')]),
        # broken arguments extend to the end tag
        ('<tool_call>{"name": "f", "arguments": {a}}</tool_call>ok', "ok", [("f", "{a}}")]),
        ('<tool_call>{"name": "f", "arguments": {a}}</tool_', "", [("f", "{a}}</tool_")]),
        # the closing brace and tag after the arguments may be missing, in part or completely
        ('<tool_call>{"name": "f", "arguments": {}</tool_call>ok', "ok", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}}\n</tool', "", [("f", "{}")]),
        (f'<tool_call>{{"name": "f", "arguments": {{}}}}\n{CALL}', "", [("f", "{}"), ("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "}</tool_call>", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', "", [("f", '{"a": "x\ny"}')]),
    ],
)
def test_hermes_calls_are_parsed(text: str, content: str, calls: Calls) -> None:
    assert read(text, HERMES) == (content, calls)


def test_answer_ends_after_the_first_call_if_parallel_calls_are_not_allowed() -> None:
    assert read(f"Hm. {CALL}\n{CALL} more", HERMES, parallel=False) == ("Hm.", [("f", '{"a": 1}')])
    broken = '<tool_call>{"name": "f", "arguments": {a}}</tool_call>'
    assert read(f"{broken}\n{CALL} more", HERMES, parallel=False) == ("", [("f", "{a}}")])


@pytest.mark.parametrize(
    ("format_", "chunks", "shown"),
    [
        (HERMES, ["Hi <", "tool", "s> <tool_call", ">"], ["Hi", "", " <tools>", ""]),
        (
            HERMES,
            ['<tool_call>{"name": "f", "arguments": ', '{"a": "', "é", '"}', "}"],
            ["", 'f{"a": "', "é", '"}', ""],
        ),
        (LLAMA3, ["Hi", ' {"na', 'ms": 1', "} x"], ["Hi", "", ' {"nams": 1', "} x"]),
        (LLAMA3, ['{"parameters": {"a": 1}, ', '"name": "f', '"}'], ["", "", 'f{"a": 1}']),
    ],
)
def test_text_is_buffered_only_while_it_may_be_part_of_a_call(
    format_: ToolCallFormat, chunks: list[str], shown: list[str]
) -> None:
    reader = CallReader(CallRules(format_, NAMES))
    seen = [
        "".join(
            found if isinstance(found, str) else (found.name or "") + found.arguments for found in reader.add(chunk)
        )
        for chunk in chunks
    ]
    assert seen == shown


def test_parsing_takes_time_linear_in_the_text_length() -> None:
    """Texts that repeatedly look like calls. Counts characters read instead of time, which depends on machine load."""
    parts = {'{"arguments": ': 4000, "{": 20_000, '<tool_call>{"name": "f': 2000, '{"name": "f", ': 3000}
    for text in (part * (count if IS_NIGHTLY else count // 5) for part, count in parts.items()):
        for format_ in FORMATS.values():
            reader = CallReader(CallRules(format_, NAMES))
            count = 0
            original = reader._read_character

            def counted(character: str, original: Any = original) -> bool:
                nonlocal count
                count += 1
                return bool(original(character))

            reader._read_character = counted  # type: ignore[method-assign]
            for character in text:
                reader.add(character)
            assert count <= 3 * len(text)


@pytest.mark.parametrize("format_", FORMATS.values())
@pytest.mark.parametrize(("start", "end"), REASONING_MARKS.items())
@pytest.mark.parametrize("seed", [None, *range(8)])
def test_calls_inside_reasoning_are_content(format_: ToolCallFormat, start: str, end: str, seed: int | None) -> None:
    name = min(NAMES)
    call = ("\n" if format_.as_metadata else "") + format_.write(name, {"a": start})
    read_calls: Calls = [(name, json.dumps({"a": start}))]

    def read_it(text: str) -> Any:
        return read(text, format_, None if seed is None else random.Random(seed))

    thought = f"{start}\nMaybe {call}?\n{end}"
    assert read_it(thought) == (thought, [])
    assert read_it(f"{thought}\n\n{call}") == (thought, read_calls)
    assert read_it(f"{call}\n{thought}{call}") == (f"\n{thought}", read_calls * 2)
    assert read_it(f"Hm. {thought} So: {call}") == (f"Hm. {thought} So:", read_calls)
    assert read_it(f"{start}{call} {end[:-1]} ") == (f"{start}{call} {end[:-1]} ", []), "never closed"
    assert read_it(f"{start[:-1]} {call}") == (start[:-1], read_calls), "no mark"


@pytest.mark.parametrize("format_", FORMATS.values())
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_may_begin_in_the_prompt(format_: ToolCallFormat, size: int) -> None:
    call = format_.write(min(NAMES), {})
    for thought, rest in (("hm ", None), ("hm </think>", "\n"), (f"hm {call} </think>", ""), ("</think>", "")):
        text = thought + call if rest is None else f"{thought}{rest}{call}"
        reader = CallReader(CallRules(format_, NAMES, starts_in_thinking=True))
        chunks = [text[start : start + size] for start in range(0, len(text), size)]
        parts = [part for chunk in chunks for part in reader.add(chunk)] + reader.finish()
        assert reader.num_calls == (rest is not None)
        assert "".join(part for part in parts if isinstance(part, str)) == (text if rest is None else thought)


@pytest.mark.parametrize("format_", FORMATS.values())
def test_forced_calls_come_without_reasoning(format_: ToolCallFormat) -> None:
    reader = CallReader(CallRules(format_, NAMES, is_forced=True, starts_in_thinking=True))
    reader.add(format_.write(min(NAMES), {"a": "<think>"}))
    assert reader.num_calls == 1
