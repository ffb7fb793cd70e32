"""The text of an answer, in fragments of any length → content and tool calls.

The result never depends on where the fragments are cut: wherever a call may occur, the reader goes character by
character. An object counts as a call as soon as the name of a known function and the start of its arguments have been
read; all that follows in the arguments belongs to the call, even if it is not valid JSON. Until then the text is
buffered, so that text that turns out to be no call becomes content exactly as it was written.
"""

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import Enum, auto

from tokasaurus.server.tools.formats import ToolCallFormat
from tokasaurus.server.tools.reasoning import Marks
from tokasaurus.text.stop_strings import buffered_length
from tokasaurus.text.token_decoder import REASONING_MARKS

_SPACE = " \t\n\r"
_SCALAR_CHARACTERS = frozenset("-+.0123456789Eaeflnrstu")
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_PLAIN = re.compile(r'[^"\\]*')
_CLOSERS = {"{": "}", "[": "]"}


# jiter's partial mode would cost promises: it refuses the line ends, does not say where an object ends or whether it is
# still valid, and would read a call from its start for each delta.
class JsonScanner:
    """Follows the text of one JSON object, a character at a time.

    It accepts more than JSON in one respect: strings inside nested objects and lists may contain control characters,
    such as line ends, since models write them there.
    """

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._state: Callable[[str], bool] = self._before_object
        self._scalar: list[str] = []
        self._is_key = False
        self._num_hex_digits = 0

    @property
    def depth(self) -> int:
        """Number of open objects and lists."""
        return len(self._closers)

    @property
    def in_string(self) -> bool:
        """Whether a string is open after the last character."""
        return self._state in (self._in_string, self._escaped, self._in_unicode_escape)

    @property
    def is_complete(self) -> bool:
        """Whether the object is closed."""
        return self._state == self._behind_object

    def add(self, character: str) -> bool:
        """Whether the character is valid here. After an invalid one the scanner must not be used again."""
        return self._state(character)

    def end_of_plain(self, text: str, position: int) -> int:
        """End of the run of characters from `position` that change no state, which need not be added.

        Only strings inside nested objects and lists have such runs; elsewhere returns `position`.
        """
        if self._state != self._in_string or self.depth < 2:
            return position
        match = _PLAIN.match(text, position)
        assert match is not None, "the pattern also matches an empty text"
        return match.end()

    def _before_object(self, character: str) -> bool:
        return character == "{" and self._open(character)

    def _behind_object(self, _character: str) -> bool:
        return False

    def _open(self, character: str) -> bool:
        self._closers.append(_CLOSERS[character])
        self._state = self._first_key if character == "{" else self._first_item
        return True

    def _close(self, character: str) -> bool:
        if character != self._closers[-1]:
            return False
        self._closers.pop()
        self._state = self._after_value if self._closers else self._behind_object
        return True

    def _first_key(self, character: str) -> bool:
        return self._close(character) if character == "}" else self._key(character)

    def _key(self, character: str) -> bool:
        if character == '"':
            self._is_key = True
            self._state = self._in_string
            return True
        return character in _SPACE

    def _colon(self, character: str) -> bool:
        if character == ":":
            self._state = self._value
            return True
        return character in _SPACE

    def _first_item(self, character: str) -> bool:
        return self._close(character) if character == "]" else self._value(character)

    def _value(self, character: str) -> bool:
        if character == '"':
            self._is_key = False
            self._state = self._in_string
            return True
        if character in _CLOSERS:
            return self._open(character)
        if character in _SCALAR_CHARACTERS:
            self._scalar = [character]
            self._state = self._in_scalar
            return True
        return character in _SPACE

    def _in_scalar(self, character: str) -> bool:
        if character in _SCALAR_CHARACTERS:
            self._scalar.append(character)
            return True
        return _SCALAR.fullmatch("".join(self._scalar)) is not None and self._after_value(character)

    def _after_value(self, character: str) -> bool:
        if character == ",":
            self._state = self._key if self._closers[-1] == "}" else self._value
            return True
        if character in _SPACE:
            self._state = self._after_value
            return True
        return self._close(character)

    def _in_string(self, character: str) -> bool:
        if character == '"':
            self._state = self._colon if self._is_key else self._after_value
        elif character == "\\":
            self._state = self._escaped
        return character >= " " or self.depth > 1

    def _escaped(self, character: str) -> bool:
        self._num_hex_digits = 0
        self._state = self._in_unicode_escape if character == "u" else self._in_string
        return character in '"\\/bfnrtu'

    def _in_unicode_escape(self, character: str) -> bool:
        self._num_hex_digits += 1
        if self._num_hex_digits == 4:
            self._state = self._in_string
        return character in "0123456789abcdefABCDEF"


_ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class CallRules:
    """The calls that an answer may contain."""

    format: ToolCallFormat
    names: frozenset[str]
    """The functions that may be called."""
    parallel: bool = True
    """Whether an answer may contain more than one call."""
    is_named: bool = False
    """Whether the client chose the function, by tool_choice."""
    is_forced: bool = False
    """Whether a grammar allows nothing but calls. Text outside of calls is then the mark-up of a call that was cut, or
    lies between two calls: it is dropped, since the answer has no content."""
    starts_in_thinking: bool = False
    """Whether the prompt ends within reasoning, which the answer continues."""


@dataclass(frozen=True, slots=True)
class CallFragment:
    """New text of the arguments of one call."""

    index: int
    """The call's index in the answer."""
    name: str | None
    """The function's name, on the first fragment of a call; else None."""
    arguments: str


class _State(Enum):
    CONTENT = auto()
    THINKING = auto()  # in reasoning, which is content; no call begins inside it
    MARKED = auto()  # after a start mark, before the object
    HEAD = auto()  # in an object that may be a call
    OTHER_OBJECT = auto()  # in an object that is no call; no call begins inside it
    ARGUMENTS = auto()
    BROKEN_ARGUMENTS = auto()  # in arguments that are not valid JSON; they continue to the end mark
    BRACE = auto()  # after the arguments, before the closing brace of the call
    END_MARK = auto()
    FINISHED = auto()  # all further text is dropped


class _Reading(Enum):
    """What the characters read so far show the object to be."""

    OPEN = auto()  # not yet decided
    CALL = auto()
    NO_CALL = auto()
    NO_JSON = auto()


class _NoCall(Exception):
    pass


class _CallHead:
    """Reads an object, starting after its opening brace, until it is known whether the object is a call.

    A call has a name in `names` and an object of arguments, in either order. The only other field that it may have is
    "type", with the value "function".
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.name = ""
        """The function's name; valid once the object is a call."""
        self.arguments = ""
        """The text of the arguments read so far; valid once the object is a call."""
        self.scanner = JsonScanner()
        """Follows the whole object. Its depth is 2 or more while the arguments continue."""
        self.scanner.add("{")
        self._names = names
        self._reading = self._read()
        next(self._reading)

    def add(self, character: str) -> _Reading:
        """Reads one character. Not to be called after a result other than OPEN."""
        if not self.scanner.add(character):
            return _Reading.NO_JSON
        try:
            self._reading.send(character)
        except _NoCall:
            return _Reading.NO_CALL
        except StopIteration:
            return _Reading.CALL
        return _Reading.OPEN

    def _read(self) -> Generator[None, str, None]:
        """Is sent one character at a time, after the scanner has accepted it; returns once the object is a call."""
        while not (self.name and self.arguments):
            if (yield from self._next_character()) != '"':
                raise _NoCall
            key = yield from self._rest_of_string()
            yield from self._next_character()  # the colon
            first = yield from self._next_character()
            if key == "name" and first == '"' and not self.name:
                self.name = yield from self._rest_of_string()
                if self.name not in self._names:
                    raise _NoCall
            elif key in _ARGUMENT_KEYS and first == "{" and not self.arguments:
                # after the name, the arguments need not be buffered until they are complete
                self.arguments = first if self.name else (yield from self._rest_of_arguments())
            elif key != "type" or first != '"' or (yield from self._rest_of_string()) != "function":
                raise _NoCall
            if not (self.name and self.arguments) and (yield from self._next_character()) != ",":
                raise _NoCall

    def _next_character(self) -> Generator[None, str, str]:
        """The next character that is not white space."""
        while (character := (yield)) in _SPACE:
            pass
        return character

    def _rest_of_string(self) -> Generator[None, str, str]:
        """The rest of a string after its opening quote, with escapes as they are written."""
        characters: list[str] = []
        while True:
            character = yield
            if not self.scanner.in_string:
                return "".join(characters)
            characters.append(character)

    def _rest_of_arguments(self) -> Generator[None, str, str]:
        characters = ["{"]
        while self.scanner.depth > 1:
            characters.append((yield))
        return "".join(characters)


class CallReader:
    """Reads the text of one answer."""

    def __init__(self, rules: CallRules) -> None:
        self.num_calls = 0
        """Number of calls begun so far."""
        self._names = rules.names
        self._parallel = rules.parallel
        self._is_forced = rules.is_forced
        self._start, self._end = rules.format.start_mark, rules.format.end_mark
        self._ignored = rules.format.ignored
        # Forced calls are not preceded by reasoning; its marks may occur in their arguments only.
        self._content_marks = Marks([self._start, *([] if rules.is_forced else REASONING_MARKS)])
        self._thinking_ends = Marks(REASONING_MARKS.values())
        self._end_marks = Marks([self._end])
        is_thinking = rules.starts_in_thinking and not rules.is_forced
        self._state = _State.THINKING if is_thinking else _State.CONTENT
        self._buffered: list[str] = []  # text that may be content or part of a call
        self._head = _CallHead(rules.names)
        self._has_content_since_call = True
        self._num_matched = 0  # characters of the end mark read so far
        self._content: list[str] = []
        self._call_name: str | None = None
        self._arguments: list[str] = []
        self._output: list[str | CallFragment] = []

    def add(self, text: str) -> list[str | CallFragment]:
        """The content and call fragments that the text adds, in order."""
        position = 0
        while position < len(text):
            match self._state:
                case _State.CONTENT:
                    position = self._read_content(text, position)
                case _State.THINKING:
                    position = self._read_thinking(text, position)
                case _State.ARGUMENTS:
                    position = self._read_arguments(text, position)
                case _State.BROKEN_ARGUMENTS:
                    position = self._read_broken_arguments(text, position)
                case _State.FINISHED:
                    position = len(text)
                case _:
                    position += self._read_character(text[position])
        return self._take_output()

    def finish(self) -> list[str | CallFragment]:
        """The content and call fragments that were buffered, at the end of the text."""
        buffered = self._take_buffered()
        match self._state:
            case _State.CONTENT:
                if self._has_content_since_call or buffered.strip(self._ignored):
                    self._show(buffered)
            case _State.MARKED | _State.HEAD | _State.THINKING:
                self._show(buffered)
            case _State.BROKEN_ARGUMENTS:
                self._arguments.append(buffered)
        return self._take_output()

    def _read_character(self, character: str) -> bool:
        """Whether the character was consumed. If not, the state has changed and the character must be read again."""
        match self._state:
            case _State.MARKED:
                return self._read_marked(character)
            case _State.HEAD:
                return self._read_object(character)
            case _State.OTHER_OBJECT:
                return self._read_other_object(character)
            case _State.BRACE:
                return self._read_brace(character)
        return self._read_end_mark(character)

    def _read_content(self, text: str, position: int) -> int:
        found = self._find_mark(self._content_marks, text, position)
        if found is not None and found[2] != self._start:
            before, end, mark = found
            self._buffered = []
            self._show(before + mark)
            self._thinking_ends = Marks([REASONING_MARKS[mark]])
            self._state = _State.THINKING
            return end
        before, end = found[:2] if found else ("".join(self._buffered) + text[position:], len(text))
        num_buffered = 0 if found else buffered_length(before, self._content_marks.texts)
        shown = before[: len(before) - num_buffered].rstrip(_SPACE)
        if not self._has_content_since_call and not shown.strip(self._ignored):
            shown = ""
        self._show(shown)
        self._buffered = [before[len(shown) :]]
        if found:
            self._buffered.append(self._start)
            self._head = _CallHead(self._names)
            self._state = _State.HEAD if self._start == "{" else _State.MARKED
        return end

    def _read_thinking(self, text: str, position: int) -> int:
        found = self._find_mark(self._thinking_ends, text, position)
        if found:
            before, end, mark = found
            self._buffered = []
            self._show(before + mark)
            self._state = _State.CONTENT
            return end
        before = "".join(self._buffered) + text[position:]
        shown = before[: len(before) - buffered_length(before, self._thinking_ends.texts)]
        self._show(shown)
        self._buffered = [before[len(shown) :]]
        return len(text)

    def _find_mark(self, marks: Marks, text: str, position: int) -> tuple[str, int, str] | None:
        """The first mark in the buffered and new text: (the text before it, its end in `text`, the mark); None if there
        is none."""
        buffered = "".join(self._buffered)
        seam = buffered + text[position : position + marks.longest - 1]
        match = marks.pattern.search(seam)
        if match:
            return seam[: match.start()], position + match.end() - len(buffered), match.group()
        match = marks.pattern.search(text, position)
        return match and (buffered + text[position : match.start()], match.end(), match.group())

    def _read_marked(self, character: str) -> bool:
        if character == "{":
            self._buffered.append(character)
            self._state = _State.HEAD
        elif character in _SPACE:
            self._buffered.append(character)
        else:
            self._abort()
            return False
        return True

    def _read_object(self, character: str) -> bool:
        reading = self._head.add(character)
        if reading is _Reading.NO_JSON:
            self._abort()
            return False
        self._buffered.append(character)
        if reading is _Reading.CALL:
            self._begin_call()
        elif reading is _Reading.NO_CALL:
            self._show(self._take_buffered())
            self._state = _State.CONTENT if self._head.scanner.is_complete else _State.OTHER_OBJECT
        return True

    def _abort(self) -> None:
        """Makes the buffered text content: it is no call. White space at its end stays buffered: a call may follow."""
        buffered = self._take_buffered()
        shown = buffered.rstrip(_SPACE)
        self._show(shown)
        self._buffered.append(buffered[len(shown) :])
        self._state = _State.CONTENT

    def _read_other_object(self, character: str) -> bool:
        if not self._head.scanner.add(character):
            self._state = _State.CONTENT
            return False
        self._show(character)
        if self._head.scanner.is_complete:
            self._state = _State.CONTENT
        return True

    def _begin_call(self) -> None:
        self._flush()
        self._take_buffered()
        self._call_name = self._head.name
        self._arguments.append(self._head.arguments)
        self.num_calls += 1
        self._has_content_since_call = False
        self._state = _State.ARGUMENTS
        if self._head.scanner.depth == 1:
            self._end_arguments()

    def _read_arguments(self, text: str, position: int) -> int:
        scanner = self._head.scanner
        end = scanner.end_of_plain(text, position)
        if end == position:
            if not scanner.add(text[position]):
                self._state = _State.BROKEN_ARGUMENTS
                return position
            end += 1
        self._arguments.append(text[position:end])
        if scanner.depth == 1:
            self._end_arguments()
        return end

    def _end_arguments(self) -> None:
        self._state = _State.BRACE if self._parallel else _State.FINISHED

    def _read_broken_arguments(self, text: str, position: int) -> int:
        found = self._find_mark(self._end_marks, text, position) if self._end else None
        if found:
            rest, end, _ = found
            self._buffered = []
            self._end_call()
        else:
            before, end = "".join(self._buffered) + text[position:], len(text)
            num_buffered = buffered_length(before, [self._end]) if self._end else 0
            rest = before[: len(before) - num_buffered]
            self._buffered = [before[len(rest) :]]
        self._arguments.append(rest)
        return end

    def _end_call(self) -> None:
        self._state = _State.CONTENT if self._parallel else _State.FINISHED

    def _read_brace(self, character: str) -> bool:
        if character in _SPACE:
            self._buffered.append(character)
            return True
        self._num_matched = 0
        self._state = _State.END_MARK if self._end else _State.CONTENT
        if character == "}":
            self._buffered = []
            return True
        return False  # some models forget the brace

    def _read_end_mark(self, character: str) -> bool:
        if character == self._end[self._num_matched]:
            self._num_matched += 1
        elif self._num_matched > 0 or character not in _SPACE:
            self._state = _State.CONTENT
            return False
        self._buffered.append(character)
        if self._num_matched == len(self._end):
            self._buffered = []
            self._state = _State.CONTENT
        return True

    def _take_buffered(self) -> str:
        buffered, self._buffered = "".join(self._buffered), []
        return buffered

    def _show(self, content: str) -> None:
        if content and not self._is_forced:
            if self._arguments:
                self._flush()
            self._content.append(content)
            self._has_content_since_call = True

    def _flush(self) -> None:
        """Moves the collected content or arguments to the output. One of them is empty: they are flushed in turn."""
        if self._content:
            self._output.append("".join(self._content))
            self._content = []
        if self._arguments:
            self._output.append(CallFragment(self.num_calls - 1, self._call_name, "".join(self._arguments)))
            self._call_name, self._arguments = None, []

    def _take_output(self) -> list[str | CallFragment]:
        self._flush()
        output, self._output = self._output, []
        return output
