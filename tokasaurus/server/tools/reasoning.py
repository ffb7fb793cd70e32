"""The reasoning at the start of an answer: which marks a model's template has, and a reader that splits it off.

The only reader of reasoning: of whole answers, streams, batches and the library. Knows text alone.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from tokasaurus.text.stop_strings import buffered_length
from tokasaurus.text.token_decoder import REASONING_MARKS

_SPACE = " \t\n\r"
# Granite 3.2's, which its template asks for. Elsewhere they are sentences like any others.
_SENTENCES = {"Here is my thought process:": "Here is my response:"}

ReasoningStart = Literal["before", "inside", "after"]
"""Where an answer begins: before reasoning, if it has any; inside reasoning that the prompt has begun; after reasoning
that the prompt has ended, so that all of the answer is content."""


class Marks:
    """Marks to look for; none contains the beginning of another."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = list(texts)
        self.longest = max(map(len, self.texts))
        self.pattern = re.compile("|".join(map(re.escape, self.texts)))


def marks_in(template: str) -> dict[str, str]:
    """The marks that a chat template writes or looks for: start → end. Empty for a model without reasoning."""
    known = {**REASONING_MARKS, **_SENTENCES}
    return {start: end for start, end in known.items() if start in template or end in template}


def is_in_reasoning(text: str) -> bool:
    """Whether reasoning has begun in the text and has not ended."""
    return any(text.rfind(start) > text.rfind(end) for start, end in REASONING_MARKS.items())


@dataclass(frozen=True, slots=True)
class ReasoningRules:
    """How an answer's reasoning is found and shown."""

    marks: Mapping[str, str]
    """Start of reasoning → its end. Not empty."""
    start: ReasoningStart = "before"
    is_separate: bool = True
    """Whether it is split off the content. If not, it is only counted."""
    is_included: bool = True
    """Whether the answer has the reasoning that was split off."""


class _State(Enum):
    START = auto()  # no reasoning has been read, only white space or what may be part of a mark
    INSIDE = auto()
    BEHIND = auto()  # in the white space behind the end mark
    CONTENT = auto()


class ReasoningReader:
    """Splits the text of one answer, which may arrive in fragments of any length, into reasoning and content.

    Reasoning is at the start of the text, between a start mark and its end mark. The marks and the white space around
    reasoning belong to neither. Marks elsewhere are content. Reasoning without an end mark continues to the end of the
    text. The result does not depend on where the fragments are cut.
    """

    def __init__(self, marks: Mapping[str, str], start: ReasoningStart) -> None:
        """marks: start of reasoning → its end; not empty."""
        self.num_characters = 0
        """Characters at the start of the text that are read as reasoning, the white space before it and its marks
        included."""
        self._marks = marks
        self._ends = Marks(marks.values())
        self._starts_inside = start == "inside"
        self._state = _State.CONTENT if start == "after" else _State.START
        self._buffered = ""
        self._has_reasoning = False

    @property
    def is_over(self) -> bool:
        """Whether `num_characters` is final."""
        return self._state in (_State.BEHIND, _State.CONTENT)

    def add(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that the text adds."""
        reasoning = ""
        if self._state is _State.START:
            text = self._read_start(text)
        if self._state is _State.INSIDE:
            reasoning, text = self._read_reasoning(text)
        if self._state is _State.BEHIND:
            text = text.lstrip(_SPACE)
            if text:
                self._state = _State.CONTENT
        return reasoning, text

    def finish(self) -> tuple[str, str]:
        """(reasoning, content) that was buffered, at the end of the text. Part of a mark is text."""
        text, self._buffered = self._buffered, ""
        if self._state is not _State.INSIDE and not self._starts_inside:
            return "", text
        self.num_characters += len(text)
        return self._trimmed(text), ""

    def _read_start(self, text: str) -> str:
        """The text to read on; empty if all of it is buffered."""
        text, self._buffered = self._buffered + text, ""
        behind_space = text.lstrip(_SPACE)
        start = next((mark for mark in self._marks if behind_space.startswith(mark)), None)
        if start is not None:
            self._state = _State.INSIDE
            self._ends = Marks([self._marks[start]])
            rest = behind_space.removeprefix(start)
            self.num_characters = len(text) - len(rest)
            return rest
        if any(mark.startswith(behind_space) for mark in self._marks):
            self._buffered = text
            return ""
        self._state = _State.INSIDE if self._starts_inside else _State.CONTENT
        return text

    def _read_reasoning(self, text: str) -> tuple[str, str]:
        """(reasoning, the text behind the end mark)."""
        num_searched = max(0, len(self._buffered) - self._ends.longest + 1)
        text, self._buffered = self._buffered + text, ""
        found = self._ends.pattern.search(text, num_searched)
        if found:
            self._state = _State.BEHIND
            self.num_characters += found.end()
            return self._trimmed(text[: found.start()]), text[found.end() :]
        num_read = len(text[: len(text) - buffered_length(text, self._ends.texts)].rstrip(_SPACE))
        self._buffered = text[num_read:]
        self.num_characters += num_read
        return self._trimmed(text[:num_read]), ""

    def _trimmed(self, reasoning: str) -> str:
        """The next reasoning, without the white space before all of it and that at its end."""
        reasoning = reasoning.rstrip(_SPACE) if self._has_reasoning else reasoning.strip(_SPACE)
        self._has_reasoning |= reasoning != ""
        return reasoning
