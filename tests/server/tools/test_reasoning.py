"""Reasoning and content, compared with slow reading of the whole text; marks of templates."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.server.helpers.reasoning_templates import EFFORT_TEMPLATE, QWEN3_TEMPLATE, R1_TEMPLATE
from tests.server.helpers.reasoning_texts import THINK, read_whole
from tests.server.helpers.tool_templates import HERMES_TEMPLATE, LLAMA3_TEMPLATE
from tokasaurus.server.tools.reasoning import ReasoningReader, ReasoningStart, marks_in
from tokasaurus.text.token_decoder import REASONING_MARKS

TWO = THINK | {"[THINK]": "[/THINK]"}
FRAGMENTS = st.sampled_from(
    ["<think>", "</think>", "<thi", "nk>", "</thi", "<", ">", "[THINK]", "[/THINK]", "[", "\n", " ", "\n\n", "so", "é"]
)


@examples(500)
@given(
    st.lists(FRAGMENTS, max_size=10).map("".join),
    st.sampled_from([THINK, TWO]),
    st.sampled_from(["before", "inside", "after"]),
    st.integers(0, 10_000),
)
@example("<think>\nhm\n</think>\n\nYes", THINK, "before", 0)
@example("hm\n</think>\n\nYes", THINK, "inside", 1)
@example("<thi", THINK, "before", 2)
@example("<think>so</thi", THINK, "before", 3)
@example(" \n", THINK, "before", 4)
def test_fragments_of_any_length_give_the_reasoning_and_content_of_the_whole_text(
    text: str, marks: dict[str, str], start: ReasoningStart, seed: int
) -> None:
    rng = random.Random(seed)
    reader = ReasoningReader(marks, start)
    reasoning = content = ""
    position = 0
    while position < len(text):
        end = position + rng.choice([0, 1, 1, 2, 5, len(text)])
        added = reader.add(text[position:end])
        reasoning, content, position = reasoning + added[0], content + added[1], end
        if reader.is_over:
            assert reader.num_characters == read_whole(text, marks, start)[2]
    added = reader.finish()
    found = (reasoning + added[0], content + added[1], reader.num_characters)
    assert found == read_whole(text, marks, start)


@pytest.mark.parametrize(
    ("text", "start", "reasoning", "content"),
    [
        ("<think>\nOne.\n\nTwo.\n</think>\n\nYes.\n", "before", "One.\n\nTwo.", "Yes.\n"),
        ("One.</think>Yes", "inside", "One.", "Yes"),
        ("<think>One.</think>Yes", "inside", "One.", "Yes"),
        ("One.</think>Yes", "before", "", "One.</think>Yes"),
        ("Yes, <think>no</think>", "before", "", "Yes, <think>no</think>"),
        ("<think>a</think><think>b</think>", "before", "a", "<think>b</think>"),
        ("<think>a</think>b</think>", "before", "a", "b</think>"),
        ("<think>\n\n</think>\n\nYes", "before", "", "Yes"),
        ("\n\nYes", "before", "", "\n\nYes"),
        ("cut", "inside", "cut", ""),
        ("<think>cut", "before", "cut", ""),
        ("", "inside", "", ""),
        ("<thi", "before", "", "<thi"),
        ("a </thi", "inside", "a </thi", ""),
        ("<think>a</think>", "after", "", "<think>a</think>"),
    ],
)
def test_reasoning_is_what_stands_between_marks_at_the_start(
    text: str, start: ReasoningStart, reasoning: str, content: str
) -> None:
    assert read_whole(text, THINK, start)[:2] == (reasoning, content)
    reader = ReasoningReader(THINK, start)
    added, rest = reader.add(text), reader.finish()
    assert (added[0] + rest[0], added[1] + rest[1]) == (reasoning, content)


@pytest.mark.parametrize(
    ("template", "marks"),
    [
        (QWEN3_TEMPLATE, THINK),
        (R1_TEMPLATE, THINK),
        (EFFORT_TEMPLATE, THINK),
        (HERMES_TEMPLATE, {}),
        (LLAMA3_TEMPLATE, {}),
        *((f"{{{{ '{start}' }}}}", {start: end}) for start, end in REASONING_MARKS.items()),
        *((f"{{{{ message.content.split('{end}') }}}}", {start: end}) for start, end in REASONING_MARKS.items()),
    ],
)
def test_a_model_has_the_marks_that_its_template_writes_or_looks_for(template: str, marks: dict[str, str]) -> None:
    assert marks_in(template) == marks
