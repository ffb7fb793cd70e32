"""A slow reader of reasoning in a whole text."""

from collections.abc import Mapping

from tokasaurus.server.tools.reasoning import ReasoningStart

THINK = {"<think>": "</think>"}
_SPACE = " \t\n\r"


def read_whole(text: str, marks: Mapping[str, str], start: ReasoningStart) -> tuple[str, str, int]:
    """(reasoning, content, characters up to the end of the reasoning and its mark)."""
    if start == "after":
        return "", text, 0
    first = len(text) - len(text.lstrip(_SPACE))
    opened = [mark for mark in marks if text[first:].startswith(mark)]
    if not opened and start == "before":
        return "", text, 0
    first += len(opened[0]) if opened else 0
    ends = [marks[mark] for mark in opened or marks]
    for position in range(first, len(text)):
        for end in ends:
            if text[position:].startswith(end):
                behind = position + len(end)
                return text[first:position].strip(_SPACE), text[behind:].lstrip(_SPACE), behind
    return text[first:].strip(_SPACE), "", len(text)
