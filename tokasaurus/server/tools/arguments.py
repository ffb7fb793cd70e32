"""The arguments of a call → JSON, a character at a time: a scanner of JSON, and readers of other ways to write them."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable

SPACE = " \t\n\r"
_SCALAR_CHARACTERS = frozenset("-+.0123456789Eaeflnrstu")
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_PLAIN = re.compile(r'[^"\\]*')
_CLOSERS = {"{": "}", "[": "]"}
_LITERALS = {"True": "true", "False": "false", "None": "null"}


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
        return character in SPACE

    def _colon(self, character: str) -> bool:
        if character == ":":
            self._state = self._value
            return True
        return character in SPACE

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
        return character in SPACE

    def _in_scalar(self, character: str) -> bool:
        if character in _SCALAR_CHARACTERS:
            self._scalar.append(character)
            return True
        return _SCALAR.fullmatch("".join(self._scalar)) is not None and self._after_value(character)

    def _after_value(self, character: str) -> bool:
        if character == ",":
            self._state = self._key if self._closers[-1] == "}" else self._value
            return True
        if character in SPACE:
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


class ForeignArguments(ABC):
    """Arguments that are not written in JSON → JSON, after their opening bracket.

    Precondition of `add`: the last call returned a text, and the arguments are not complete.
    """

    def __init__(self) -> None:
        self._word = ""  # a name, a number or a literal that may go on
        self._in_string = False
        # Around the arguments is an object, as where they are JSON.
        self._scanner = JsonScanner()
        for character in '{"":{':
            self._scanner.add(character)

    @property
    def is_complete(self) -> bool:
        return self._scanner.depth == 1

    @property
    def unread(self) -> str:
        """Text that `add` has not returned yet, as it was written."""
        return self._word

    def add(self, character: str) -> str | None:
        """The JSON that the character adds; None if it is not valid here."""
        text = self._read_string(character) if self._in_string else self._read(character)
        return text if text is not None and all(map(self._scanner.add, text)) else None

    @abstractmethod
    def _read(self, character: str) -> str | None:
        """As `add`, outside strings."""

    @abstractmethod
    def _read_string(self, character: str) -> str | None:
        """As `add`, inside a string."""

    def _take_word(self) -> str:
        """The literal or number that has ended."""
        word, self._word = self._word.strip(SPACE), ""
        return _LITERALS.get(word, word)


class PythonArguments(ForeignArguments):
    """`word="tree", n=None)` → `{"word": "tree", "n": null}`. Values are JSON's, or Python's that JSON has."""

    def __init__(self) -> None:
        super().__init__()
        self._quote = ""
        self._is_escaped = False

    @property
    def unread(self) -> str:
        return self._word + ("\\" if self._is_escaped else "")

    def _read(self, character: str) -> str | None:
        if character.isalnum() or character in "_.+-" or (character in SPACE and self._word):
            self._word += character
            return ""
        if character in SPACE:
            return ""
        if character == "=":
            name, self._word = self._word.strip(SPACE), ""
            return f"{json.dumps(name, ensure_ascii=False)}: " if name and self._scanner.depth == 2 else None
        word = self._take_word()
        if character in ("'", '"'):
            self._quote, self._in_string = character, True
            return f'{word}"'
        if character == ")":
            return f"{word}}}" if self._scanner.depth == 2 else None
        if character == "}" and self._scanner.depth == 2:
            return None
        return f"{word}{character} " if character in ",:" else f"{word}{character}"

    def _read_string(self, character: str) -> str | None:
        if self._is_escaped:
            self._is_escaped = False
            return character if character == "'" else f"\\{character}"
        if character == "\\":
            self._is_escaped = True
            return ""
        if character == self._quote:
            self._in_string = False
            return '"'
        return json.dumps(character, ensure_ascii=False)[1:-1]


class GemmaArguments(ForeignArguments):
    """`word:<escape>tree<escape>,n:3}` → `{"word": "tree", "n": 3}`."""

    def __init__(self, quote: str) -> None:
        super().__init__()
        self._quote = quote
        self._matched = ""  # the start of a quote

    @property
    def unread(self) -> str:
        return self._word + self._matched

    def _read(self, character: str) -> str | None:
        if self._quote.startswith(self._matched + character):
            self._matched += character
            if self._matched != self._quote:
                return ""
            self._matched, self._in_string = "", True
            return f'{self._take_word()}"'
        if self._matched:
            return None
        if character == ":":
            name, self._word = self._word.strip(SPACE), ""
            return f"{json.dumps(name, ensure_ascii=False)}: " if name else ": "
        if character in "{}[],":
            return f"{self._take_word()}{character}" + (" " if character == "," else "")
        self._word += character
        return ""

    def _read_string(self, character: str) -> str | None:
        text = self._matched + character
        if text == self._quote:
            self._matched, self._in_string = "", False
            return '"'
        length = next(
            length for length in range(len(text), -1, -1) if self._quote.startswith(text[len(text) - length :])
        )
        self._matched = text[len(text) - length :]
        return json.dumps(text[: len(text) - length], ensure_ascii=False)[1:-1]
