"""The beginning of a JSON object that may be a call of a function."""

from collections.abc import Generator
from enum import Enum, auto

from tokasaurus.server.tools.json_scanner import JsonScanner

_SPACE = " \t\n\r"
_ARGUMENT_KEYS = ("arguments", "parameters")


class Reading(Enum):
    """What an object turns out to be."""

    OPEN = auto()  # nobody knows yet
    CALL = auto()
    NO_CALL = auto()
    NO_JSON = auto()


class _NoCall(Exception):
    pass


class CallHead:
    """Reads an object, whose brace has been read, until it is known whether it is a call.

    A call has a name among `names` and an object of arguments, in either order, and no other field but a type, which is
    "function".

    name, arguments: once it is a call; of the arguments what has been read. scanner: of the whole object; the arguments
    go on where its depth is 2.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.name = ""
        self.arguments = ""
        self.scanner = JsonScanner()
        self.scanner.add("{")
        self._names = names
        self._reading = self._read()
        next(self._reading)

    def add(self, character: str) -> Reading:
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
        """Takes characters of which the scanner knows that they are JSON."""
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
                # behind the name, they need not be held until they are whole
                self.arguments = first if self.name else (yield from self._rest_of_arguments())
            elif key != "type" or first != '"' or (yield from self._rest_of_string()) != "function":
                raise _NoCall
            if not (self.name and self.arguments) and (yield from self._next_character()) != ",":
                raise _NoCall

    def _next_character(self) -> Generator[None, str, str]:
        """The next that is no white space."""
        while (character := (yield)) in _SPACE:
            pass
        return character

    def _rest_of_string(self) -> Generator[None, str, str]:
        """As it is written; behind its first quote."""
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
