"""An incremental scanner of JSON objects."""

import re
from collections.abc import Callable

_SPACE = " \t\n\r"
_SCALAR_CHARACTERS = frozenset("-+.0123456789Eaeflnrstu")
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_PLAIN = re.compile(r'[^"\\]*')
_CLOSERS = {"{": "}", "[": "]"}


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
