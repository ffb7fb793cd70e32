"""The text of an answer, in fragments of any length → content and tool calls.

The result never depends on where the fragments are cut: wherever a call may occur, the reader goes character by
character. Text counts as a call as soon as the name of a known function and the start of its arguments have been
read; all that follows in the arguments belongs to the call, even if it is not valid JSON. Until then the text is
buffered, so that text that turns out to be no call becomes content exactly as it was written.
"""

import re
from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum, auto

from tokasaurus.server.tools.arguments import SPACE, ForeignArguments, GemmaArguments, JsonScanner, PythonArguments
from tokasaurus.server.tools.formats import ToolCallFormat
from tokasaurus.server.tools.reasoning import Marks
from tokasaurus.text.stop_strings import buffered_length
from tokasaurus.text.token_decoder import REASONING_MARKS

_ARGUMENT_KEYS = ("arguments", "parameters")
_ID_KEYS = ("id", "tool_call_id")
_NAME_CHARACTER = re.compile("[a-zA-Z0-9_ .:/-]")


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
    MARKED = auto()  # after a start mark, before the call or the list of calls
    LIST = auto()  # in a list, between calls
    HEAD = auto()  # in text that may be a call
    OTHER_OBJECT = auto()  # in an object that is no call; no call begins inside it
    ARGUMENTS = auto()
    BROKEN_ARGUMENTS = auto()  # in arguments that are not valid; they continue to the end mark
    ENDING = auto()  # after the arguments, before the end of the call
    END_MARK = auto()
    FINISHED = auto()  # all further text is dropped


class _Reading(Enum):
    """What the characters read so far show the text to be."""

    OPEN = auto()  # not yet decided
    CALL = auto()
    NO_CALL = auto()  # but an object
    NO_OBJECT = auto()


class _NoCall(Exception):
    pass


class _ObjectHead:
    """Reads an object until it is known whether the object is a call.

    A call has a name in `names` and an object of arguments, in either order. The only other fields that it may have
    before the last of them are an id, and "type" with the value "function".
    """

    def __init__(self, names: frozenset[str], name_key: str) -> None:
        self.name = ""
        """The function's name; valid once the object is a call."""
        self.arguments = ""
        """The text of the arguments read so far; valid once the object is a call."""
        self.scanner = JsonScanner()
        """Follows the whole object. Its depth is 2 or more while the arguments continue."""
        self._names = names
        self._name_key = name_key
        self._reading = self._read()
        next(self._reading)

    def add(self, character: str) -> _Reading:
        """Reads one character. Not to be called after a result other than OPEN."""
        if not self.scanner.add(character):
            return _Reading.NO_OBJECT
        try:
            self._reading.send(character)
        except _NoCall:
            return _Reading.NO_CALL
        except StopIteration:
            return _Reading.CALL
        return _Reading.OPEN

    def _read(self) -> Generator[None, str, None]:
        """Is sent one character at a time, after the scanner has accepted it; returns once the object is a call."""
        yield  # the opening brace
        while not (self.name and self.arguments):
            if (yield from self._next_character()) != '"':
                raise _NoCall
            key = yield from self._rest_of_string()
            yield from self._next_character()  # the colon
            first = yield from self._next_character()
            if key == self._name_key and first == '"' and not self.name:
                self.name = yield from self._rest_of_string()
                if self.name not in self._names:
                    raise _NoCall
            elif key in _ARGUMENT_KEYS and first == "{" and not self.arguments:
                # after the name, the arguments need not be buffered until they are complete
                self.arguments = first if self.name else (yield from self._rest_of_arguments())
            elif key in ("type", *_ID_KEYS) and first == '"':
                value = yield from self._rest_of_string()
                if key == "type" and value != "function":
                    raise _NoCall
            else:
                raise _NoCall
            if not (self.name and self.arguments) and (yield from self._next_character()) != ",":
                raise _NoCall

    def _next_character(self) -> Generator[None, str, str]:
        """The next character that is not white space."""
        while (character := (yield)) in SPACE:
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


class _NamedHead:
    """Reads what precedes the arguments of a call that is no object, and their opening bracket."""

    def __init__(self, names: frozenset[str], format_: ToolCallFormat) -> None:
        self.name = ""
        """The function's name; valid once the text is a call."""
        self.arguments = "{"
        """The start of the arguments, in JSON."""
        self.scanner = JsonScanner()
        """Follows arguments that are JSON, as if an object were around them."""
        for character in '{"":{':
            self.scanner.add(character)
        self._names = names
        self._format = format_
        self._reading = self._read()
        next(self._reading)

    def add(self, character: str) -> _Reading:
        """Reads one character. Not to be called after a result other than OPEN."""
        try:
            self._reading.send(character)
        except _NoCall:
            return _Reading.NO_OBJECT
        except StopIteration:
            return _Reading.CALL
        return _Reading.OPEN

    def _read(self) -> Generator[None, str, None]:
        """Is sent one character at a time; returns once the text is a call."""
        for expected in self._format.prefix:
            if (yield) != expected:
                raise _NoCall
        character = yield
        while _NAME_CHARACTER.match(character):
            self.name += character
            if not any(name.startswith(self.name) for name in self._names):
                raise _NoCall
            character = yield
        if self.name not in self._names:
            raise _NoCall
        if self._format.middle:
            yield from self._read_middle(character)
            character = yield
        while character in SPACE:
            character = yield
        if character != self._format.bracket:
            raise _NoCall

    def _read_middle(self, text: str) -> Generator[None, str, None]:
        """Reads what separates the name from the arguments, perhaps with an id before. text: its first character."""
        middle, id_mark = self._format.middle.rstrip(SPACE) or self._format.middle, self._format.id_mark
        while text != middle:
            if id_mark and text == id_mark:
                while (text := (yield)).isalnum():
                    pass
            elif middle.startswith(text) or id_mark.startswith(text):
                text += yield
            else:
                raise _NoCall


class CallReader:
    """Reads the text of one answer."""

    def __init__(self, rules: CallRules) -> None:
        self.num_calls = 0
        """Number of calls begun so far."""
        self._names = rules.names
        self._parallel = rules.parallel
        self._is_forced = rules.is_forced
        self._format = format_ = rules.format
        self._ignored = format_.ignored
        self._opening = format_.before.strip(f"{SPACE}[")
        self._ending = format_.ending.strip(SPACE)
        self._end = format_.end_mark
        if format_.start_mark:
            self._starts = [format_.start_mark]
        else:
            self._starts = ["{"] if format_.name_key else [name + format_.middle for name in sorted(rules.names)]
        # Forced calls are not preceded by reasoning; its marks may occur in their arguments only.
        self._content_marks = Marks([*self._starts, *([] if rules.is_forced else REASONING_MARKS)])
        self._thinking_ends = Marks(REASONING_MARKS.values())
        self._end_marks = Marks([self._end])
        is_thinking = rules.starts_in_thinking and not rules.is_forced
        self._state = _State.THINKING if is_thinking else _State.CONTENT
        self._buffered: list[str] = []  # text that may be content or part of a call
        self._head = self._new_head()
        self._num_before_head = 0  # texts in `_buffered` before the head's
        self._foreign: ForeignArguments | None = None  # arguments of the last call
        self._in_list = False
        self._num_calls_before = 0  # calls before the last start mark
        self._has_content_since_call = True
        self._is_at_line_start = True  # unless there is buffered text
        self._num_matched = 0  # characters of the opening, ending or end mark read so far
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
                case _State.ARGUMENTS if self._foreign is None:
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
            case _State.LIST | _State.END_MARK if self.num_calls == self._num_calls_before:
                self._show(buffered)
            case _State.ARGUMENTS if self._foreign is not None:
                self._arguments.append(self._foreign.unread)
            case _State.BROKEN_ARGUMENTS:
                self._arguments.append(buffered)
        return self._take_output()

    def _new_head(self) -> _ObjectHead | _NamedHead:
        if self._format.name_key:
            return _ObjectHead(self._names, self._format.name_key)
        return _NamedHead(self._names, self._format)

    def _read_character(self, character: str) -> bool:
        """Whether the character was consumed. If not, the state has changed and the character must be read again."""
        match self._state:
            case _State.MARKED:
                return self._read_marked(character)
            case _State.LIST:
                return self._read_list(character)
            case _State.HEAD:
                return self._read_head(character)
            case _State.OTHER_OBJECT:
                return self._read_other_object(character)
            case _State.ARGUMENTS:
                return self._read_foreign_arguments(character)
            case _State.ENDING:
                return self._read_ending(character)
        return self._read_end_mark(character)

    def _read_content(self, text: str, position: int) -> int:
        found = self._find_mark(self._content_marks, text, position)
        if found is not None and not self._is_start(found[0], found[2]):
            before, end, mark = found
            self._buffered = []
            self._show(before + mark)
            self._is_at_line_start = mark.endswith("\n")
            if mark in REASONING_MARKS:
                self._thinking_ends = Marks([REASONING_MARKS[mark]])
                self._state = _State.THINKING
            return end
        before, end = found[:2] if found else ("".join(self._buffered) + text[position:], len(text))
        num_buffered = 0 if found else buffered_length(before, self._content_marks.texts)
        shown = before[: len(before) - num_buffered].rstrip(SPACE)
        if not self._has_content_since_call and not shown.strip(self._ignored):
            shown = ""
        self._show(shown)
        self._is_at_line_start &= not shown
        self._buffered = [before[len(shown) :]]
        if found:
            self._begin(found[2])
        return end

    def _is_start(self, before: str, mark: str) -> bool:
        """Whether a mark begins a call. A function's name does at the start of a line."""
        if mark not in self._starts:
            return False
        if self._format.start_mark or self._format.name_key:
            return True
        return before.endswith("\n") or (not before.strip(SPACE) and self._is_at_line_start)

    def _begin(self, mark: str) -> None:
        self._num_calls_before = self.num_calls
        self._num_matched = 0
        if self._format.start_mark:
            self._buffered.append(mark)
            self._state = _State.MARKED
            return
        self._begin_head()
        for character in mark:  # part of the call
            self._read_head(character)

    def _begin_head(self) -> None:
        self._head = self._new_head()
        self._num_before_head = len(self._buffered)
        self._state = _State.HEAD

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
        if character in SPACE:
            self._buffered.append(character)
            return True
        if self._num_matched < len(self._opening) and character == self._opening[self._num_matched]:
            self._num_matched += 1
            self._buffered.append(character)
            return True
        is_object = bool(self._format.name_key)
        if character == "[" and (is_object or self._format.is_list):
            self._in_list = True
            self._state = _State.LIST
            self._buffered.append(character)
            return True
        self._in_list = self._format.is_list
        if is_object and character != "{":
            self._abort()
        else:
            self._begin_head()
        return False

    def _read_list(self, character: str) -> bool:
        if character in f"{SPACE},":
            self._buffered.append(character)
            return True
        if character == "]":
            if self.num_calls > self._num_calls_before:
                self._buffered = []
            else:
                self._buffered.append(character)
            self._end_list()
            return True
        if self._format.name_key and character != "{":
            self._end_list()
        else:
            self._begin_head()
        return False

    def _end_list(self) -> None:
        self._in_list = False
        self._end_call()

    def _read_head(self, character: str) -> bool:
        reading = self._head.add(character)
        if reading is _Reading.NO_OBJECT:
            text = "".join(self._buffered[self._num_before_head :])
            if self._in_list and self._end.startswith(text + character):
                self._end_list()
                self._num_matched = len(text)
            else:
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
        self._in_list = False
        buffered = self._take_buffered()
        shown = buffered.rstrip(SPACE)
        self._show(shown)
        self._is_at_line_start &= not shown
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
        match self._format.syntax:
            case "python":
                self._foreign = PythonArguments()
            case "gemma":
                self._foreign = GemmaArguments(self._format.quote)
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

    def _read_foreign_arguments(self, character: str) -> bool:
        assert self._foreign is not None
        unread = self._foreign.unread
        text = self._foreign.add(character)
        if text is None:
            self._arguments.append(unread)
            self._state = _State.BROKEN_ARGUMENTS
            return False
        self._arguments.append(text)
        if self._foreign.is_complete:
            self._end_arguments()
        return True

    def _end_arguments(self) -> None:
        self._num_matched = 0
        if not self._parallel:
            self._state = _State.FINISHED
        elif self._ending:
            self._state = _State.ENDING
        else:
            self._end_call()

    def _end_call(self) -> None:
        """To what follows a call."""
        self._num_matched = 0
        self._is_at_line_start = True
        if self._in_list:
            self._state = _State.LIST
        elif self._end:
            self._state = _State.END_MARK
        else:
            self._leave()

    def _leave(self) -> None:
        """Back to content. Without a call, the start mark is content too; only what is read of the end mark may be the
        start of another."""
        if self.num_calls == self._num_calls_before:
            text = self._take_buffered()
            length = len(text) - self._num_matched
            self._buffered = [text[:length]]
            self._abort()
            self._buffered.append(text[length:])
        self._state = _State.CONTENT

    def _read_broken_arguments(self, text: str, position: int) -> int:
        found = self._find_mark(self._end_marks, text, position) if self._end else None
        if found:
            rest, end, _ = found
            self._buffered = []
            self._state = _State.CONTENT if self._parallel else _State.FINISHED
        else:
            before, end = "".join(self._buffered) + text[position:], len(text)
            num_buffered = buffered_length(before, [self._end]) if self._end else 0
            rest = before[: len(before) - num_buffered]
            self._buffered = [before[len(rest) :]]
        self._arguments.append(rest)
        return end

    def _read_ending(self, character: str) -> bool:
        """Some models forget it. After the arguments, an object may have other fields, which are dropped."""
        if self._format.name_key:
            is_valid = self._head.scanner.add(character)
            is_complete = self._head.scanner.is_complete
        else:
            is_valid = character == self._ending[self._num_matched]
            self._num_matched += is_valid
            is_complete = self._num_matched == len(self._ending)
            is_valid |= character in SPACE
        if is_valid:
            self._buffered.append(character)
        if is_complete:
            self._buffered = []
        if not is_valid and "".join(self._buffered).strip(f"{SPACE},"):
            self._abort()
        elif is_complete or not is_valid:
            self._end_call()
        return is_valid

    def _read_end_mark(self, character: str) -> bool:
        if character == self._end[self._num_matched]:
            self._num_matched += 1
        elif self._num_matched > 0 or character not in SPACE:
            self._leave()
            return False
        self._buffered.append(character)
        if self._num_matched == len(self._end):
            if self.num_calls > self._num_calls_before:
                self._buffered = []
            self._num_matched = 0
            self._leave()
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
