"""The beginning of a JSON object that may be a tool call."""

from collections.abc import Generator
from enum import Enum, auto

from tokasaurus.server.tools.json_scanner import JsonScanner

_SPACE = " \t\n\r"
_ARGUMENT_KEYS = ("arguments", "parameters")


class Reading(Enum):
    """What the characters read so far show the object to be."""

    OPEN = auto()  # not yet decided
    CALL = auto()
    NO_CALL = auto()
    NO_JSON = auto()


class _NoCall(Exception):
    pass


class CallHead:
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

    def add(self, character: str) -> Reading:
        """Reads one character. Not to be called after a result other than OPEN."""
        if not self.scanner.add(character):
            return Reading.NO_JSON
        try:
            self._reading.send(character)
        except _NoCall:
            return Reading.NO_CALL
        except StopIteration:
            return Reading.CALL
        return Reading.OPEN

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
