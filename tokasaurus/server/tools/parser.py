"""The text of an answer, as it comes → content and calls of tools.

What is found never depends on how the text is cut into pieces: the reader takes it a character at a time, wherever a
call may be. A call is one as soon as its name, that of a known function, and the start of its arguments are there; what
follows in them then belongs to them, broken or not. Until then nothing is shown, so that what turns out to be no
call is content, exactly as it was written.
"""

from dataclasses import dataclass
from enum import Enum, auto

from tokasaurus.server.tools.call_head import CallHead, Reading
from tokasaurus.server.tools.formats import ToolCallFormat
from tokasaurus.text.stop_strings import held_back_length

_SPACE = " \t\n\r"


@dataclass(frozen=True, slots=True)
class CallRules:
    """Which calls an answer may have. parallel: more than one. is_named: the client has chosen the function."""

    format: ToolCallFormat
    names: frozenset[str]
    parallel: bool = True
    is_named: bool = False


@dataclass(frozen=True, slots=True)
class CallFragment:
    """More of the arguments of a call. name: on the first piece of the call alone."""

    index: int
    name: str | None
    arguments: str


class _Place(Enum):
    CONTENT = auto()
    MARKED = auto()  # behind a mark, before the object
    HEAD = auto()  # in an object that may be a call
    OTHER_OBJECT = auto()  # in one that is none: no call begins there
    ARGUMENTS = auto()
    BROKEN_ARGUMENTS = auto()  # which go on to the mark of the call's end
    BRACE = auto()  # behind the arguments
    END_MARK = auto()
    FINISHED = auto()  # all further text is dropped


class CallReader:
    """Of one answer. num_calls: begun so far."""

    def __init__(self, rules: CallRules) -> None:
        self.num_calls = 0
        self._names = rules.names
        self._parallel = rules.parallel
        self._start, self._end = rules.format.start_mark, rules.format.end_mark
        self._ignored = rules.format.ignored
        self._place = _Place.CONTENT
        self._held: list[str] = []  # text that is not shown yet, and may never be
        self._head = CallHead(rules.names)
        self._has_content_since_call = True
        self._num_matched = 0  # of the mark of an end
        self._content: list[str] = []
        self._call_name: str | None = None
        self._arguments: list[str] = []
        self._pieces: list[str | CallFragment] = []

    def add(self, text: str) -> list[str | CallFragment]:
        """What the text adds: content and calls, in order."""
        position = 0
        while position < len(text):
            match self._place:
                case _Place.CONTENT:
                    position = self._read_content(text, position)
                case _Place.ARGUMENTS:
                    position = self._read_arguments(text, position)
                case _Place.BROKEN_ARGUMENTS:
                    position = self._read_broken_arguments(text, position)
                case _Place.FINISHED:
                    position = len(text)
                case _:
                    position += self._read_character(text[position])
        return self._take_pieces()

    def finish(self) -> list[str | CallFragment]:
        """What was held back, at the end of the text."""
        held = self._take_held()
        match self._place:
            case _Place.CONTENT:
                if self._has_content_since_call or held.strip(self._ignored):
                    self._show(held)
            case _Place.MARKED | _Place.HEAD:
                self._show(held)
            case _Place.BROKEN_ARGUMENTS:
                self._arguments.append(held)
        return self._take_pieces()

    def _read_character(self, character: str) -> bool:
        """Whether it belongs to the place. If not, the place has changed, and it is to be read there."""
        match self._place:
            case _Place.MARKED:
                return self._read_marked(character)
            case _Place.HEAD:
                return self._read_object(character)
            case _Place.OTHER_OBJECT:
                return self._read_other_object(character)
            case _Place.BRACE:
                return self._read_brace(character)
        return self._read_end_mark(character)

    def _read_content(self, text: str, position: int) -> int:
        found = self._up_to(self._start, text, position)
        before, end = found or ("".join(self._held) + text[position:], len(text))
        num_held = 0 if found else held_back_length(before, [self._start])
        shown = before[: len(before) - num_held].rstrip(_SPACE)
        if not self._has_content_since_call and not shown.strip(self._ignored):
            shown = ""
        self._show(shown)
        self._held = [before[len(shown) :]]
        if found:
            self._held.append(self._start)
            self._head = CallHead(self._names)
            self._place = _Place.HEAD if self._start == "{" else _Place.MARKED
        return end

    def _up_to(self, mark: str, text: str, position: int) -> tuple[str, int] | None:
        """What is held and the text before the next mark, and where in the text that ends; None without one."""
        held = "".join(self._held)
        seam = held + text[position : position + len(mark) - 1]
        start = seam.find(mark)
        if start >= 0:
            return seam[:start], position + start + len(mark) - len(held)
        start = text.find(mark, position)
        return None if start < 0 else (held + text[position:start], start + len(mark))

    def _read_marked(self, character: str) -> bool:
        if character == "{":
            self._held.append(character)
            self._place = _Place.HEAD
        elif character in _SPACE:
            self._held.append(character)
        else:
            self._abort()
            return False
        return True

    def _read_object(self, character: str) -> bool:
        reading = self._head.add(character)
        if reading is Reading.NO_JSON:
            self._abort()
            return False
        self._held.append(character)
        if reading is Reading.CALL:
            self._begin_call()
        elif reading is Reading.NO_CALL:
            self._show(self._take_held())
            self._place = _Place.CONTENT if self._head.scanner.is_complete else _Place.OTHER_OBJECT
        return True

    def _abort(self) -> None:
        """What is held is no call. White space at its end may stand before one."""
        held = self._take_held()
        shown = held.rstrip(_SPACE)
        self._show(shown)
        self._held.append(held[len(shown) :])
        self._place = _Place.CONTENT

    def _read_other_object(self, character: str) -> bool:
        if not self._head.scanner.add(character):
            self._place = _Place.CONTENT
            return False
        self._show(character)
        if self._head.scanner.is_complete:
            self._place = _Place.CONTENT
        return True

    def _begin_call(self) -> None:
        self._flush()
        self._take_held()
        self._call_name = self._head.name
        self._arguments.append(self._head.arguments)
        self.num_calls += 1
        self._has_content_since_call = False
        self._place = _Place.ARGUMENTS
        if self._head.scanner.depth == 1:
            self._end_arguments()

    def _read_arguments(self, text: str, position: int) -> int:
        scanner = self._head.scanner
        end = scanner.end_of_plain(text, position)
        if end == position:
            if not scanner.add(text[position]):
                self._place = _Place.BROKEN_ARGUMENTS
                return position
            end += 1
        self._arguments.append(text[position:end])
        if scanner.depth == 1:
            self._end_arguments()
        return end

    def _end_arguments(self) -> None:
        self._place = _Place.BRACE if self._parallel else _Place.FINISHED

    def _read_broken_arguments(self, text: str, position: int) -> int:
        found = self._up_to(self._end, text, position) if self._end else None
        if found:
            rest, end = found
            self._held = []
            self._end_call()
        else:
            before, end = "".join(self._held) + text[position:], len(text)
            num_held = held_back_length(before, [self._end]) if self._end else 0
            rest = before[: len(before) - num_held]
            self._held = [before[len(rest) :]]
        self._arguments.append(rest)
        return end

    def _end_call(self) -> None:
        self._place = _Place.CONTENT if self._parallel else _Place.FINISHED

    def _read_brace(self, character: str) -> bool:
        if character in _SPACE:
            self._held.append(character)
            return True
        self._num_matched = 0
        self._place = _Place.END_MARK if self._end else _Place.CONTENT
        if character == "}":
            self._held = []
            return True
        return False  # models forget it

    def _read_end_mark(self, character: str) -> bool:
        if character == self._end[self._num_matched]:
            self._num_matched += 1
        elif self._num_matched > 0 or character not in _SPACE:
            self._place = _Place.CONTENT
            return False
        self._held.append(character)
        if self._num_matched == len(self._end):
            self._held = []
            self._place = _Place.CONTENT
        return True

    def _take_held(self) -> str:
        held, self._held = "".join(self._held), []
        return held

    def _show(self, content: str) -> None:
        if content:
            if self._arguments:
                self._flush()
            self._content.append(content)
            self._has_content_since_call = True

    def _flush(self) -> None:
        """One of the two is empty: they are collected in turn."""
        if self._content:
            self._pieces.append("".join(self._content))
            self._content = []
        if self._arguments:
            self._pieces.append(CallFragment(self.num_calls - 1, self._call_name, "".join(self._arguments)))
            self._call_name, self._arguments = None, []

    def _take_pieces(self) -> list[str | CallFragment]:
        self._flush()
        pieces, self._pieces = self._pieces, []
        return pieces
