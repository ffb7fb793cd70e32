"""Strings that know which of their characters a chat template wrote.

A special token in a prompt is real only if the template wrote all of its characters: a client must not be able to write
one, not even by parts that a template joins. So every string that a template itself contains is a TemplateText, and
joining, cutting and replacing keep who wrote each character. All other strings, those of clients among them, are
ordinary ones: what an operation makes that is not followed here counts as the client's.

Whatever happens to a TemplateText, its characters are the ones that `str` would have.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from typing import SupportsIndex

_CLIENT, _TEMPLATE, _MARKED = b"\0", b"\1", b"\2"
_CONVERSION = re.compile(r"%(?:%|(?:\((?P<key>[^()]*)\))?(?P<rest>[^%*(]*?[a-zA-Z]))")
_WRITTEN = re.compile(_TEMPLATE + b"+")


class TemplateText(str):
    """One byte of `_origins` for each character: _CLIENT, _TEMPLATE, or _MARKED for marked text of a client.

    The methods are those of `str`, and take and return the same."""

    __slots__ = ("_origins",)  # the sandbox of templates refuses names that begin so
    _origins: bytes

    def __new__(cls, text: object = "") -> "TemplateText":
        """A client's text, as when a template calls the type of a string."""
        written = str(text)
        return _made(written, _origins_of(written))

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> "TemplateText":
        if not isinstance(other, str):
            return NotImplemented
        return _made(str.__add__(self, other), self._origins + _origins_of(other))

    def __radd__(self, other: str) -> "TemplateText":
        if not isinstance(other, str):
            return NotImplemented
        return _made(str.__add__(other, self), _origins_of(other) + self._origins)

    def __mul__(self, count: SupportsIndex) -> "TemplateText":
        return _made(str.__mul__(self, count), self._origins * count)

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> "TemplateText":
        if isinstance(key, slice):
            return _made(str.__getitem__(self, key), self._origins[key])
        return _made(str.__getitem__(self, key), bytes([self._origins[key]]))

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __mod__(self, values: object) -> "TemplateText":
        text = str.__mod__(self, values)
        positional = iter(values if isinstance(values, tuple) else [values])
        pieces: list[str] = []
        end = 0
        for match in _CONVERSION.finditer(self):
            pieces.append(self[end : match.start()])
            end = match.end()
            if match.group() == "%%":
                pieces.append(self[end - 1 : end])
            elif match["key"] is not None and isinstance(values, Mapping):
                pieces.append(_converted(match["rest"], values[match["key"]]))
            else:
                pieces.append(_converted(match["rest"], next(positional, "")))
        return _checked([*pieces, self[end:]], text)

    def strip(self, chars: str | None = None, /) -> "TemplateText":
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> "TemplateText":
        text = str.lstrip(self, chars)
        return self[len(self) - len(text) :]

    def rstrip(self, chars: str | None = None, /) -> "TemplateText":
        return self[: len(str.rstrip(self, chars))]

    def removeprefix(self, prefix: str, /) -> "TemplateText":
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> "TemplateText":
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> "list[TemplateText]":  # type: ignore[override]
        parts, found, end = str.split(self, sep, maxsplit), [], 0
        for part in parts:
            start = str.index(self, part, end)
            found.append(self[start : start + len(part)])
            end = start + len(part) + len(sep or "")
        return found

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> "list[TemplateText]":  # type: ignore[override]
        parts, found, end = str.rsplit(self, sep, maxsplit), [], len(self)
        for part in reversed(parts):
            start = str.rindex(self, part, 0, end)
            found.append(self[start : start + len(part)])
            end = start - len(sep or "")
        return found[::-1]

    def splitlines(self, keepends: bool = False) -> "list[TemplateText]":  # type: ignore[override]
        starts = accumulate(map(len, str.splitlines(self, keepends=True)), initial=0)
        lines = str.splitlines(self, keepends=keepends)
        return [self[start : start + len(line)] for start, line in zip(starts, lines, strict=False)]

    def partition(self, sep: str, /) -> "tuple[TemplateText, TemplateText, TemplateText]":
        before, middle, _ = map(len, str.partition(self, sep))
        return self[:before], self[before : before + middle], self[before + middle :]

    def rpartition(self, sep: str, /) -> "tuple[TemplateText, TemplateText, TemplateText]":
        before, middle, _ = map(len, str.rpartition(self, sep))
        return self[:before], self[before : before + middle], self[before + middle :]

    def join(self, parts: Iterable[str], /) -> "TemplateText":
        given = list(parts)
        text = str.join(self, given)
        separated = [piece for part in given for piece in (self, part)]
        return _made(text, b"".join(map(_origins_of, separated[1:])))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> "TemplateText":
        text = str.replace(self, old, new, count)
        if not old:
            return TemplateText(text)
        return _checked([client_text(new).join(self.split(old, count))], text)

    def lower(self) -> "TemplateText":
        return self._cased(str.lower)

    def upper(self) -> "TemplateText":
        return self._cased(str.upper)

    def casefold(self) -> "TemplateText":
        return self._cased(str.casefold)

    def swapcase(self) -> "TemplateText":
        return self._cased(str.swapcase)

    def title(self) -> "TemplateText":
        return self._cased(str.title)

    def capitalize(self) -> "TemplateText":
        return self._cased(str.capitalize)

    def _cased(self, change: Callable[[str], str]) -> "TemplateText":
        text = change(self)
        if len(text) == len(self):  # no character became several, and none disappears
            return _made(text, self._origins)
        counts = [len(change(character)) for character in str.__str__(self)]
        origins = b"".join(self._origins[index : index + 1] * count for index, count in enumerate(counts))
        return _made(text, origins) if len(origins) == len(text) else TemplateText(text)


def _made(text: str, origins: bytes) -> TemplateText:
    made = str.__new__(TemplateText, text)
    made._origins = origins
    return made


def _origins_of(text: str) -> bytes:
    return text._origins if type(text) is TemplateText else _CLIENT * len(text)


def _converted(conversion: str, value: object) -> str:
    """`%` + conversion of one value; kept as it is if that changes nothing."""
    return value if conversion == "s" and isinstance(value, str) else f"%{conversion}" % (value,)


def _checked(pieces: list[str], text: str) -> TemplateText:
    """The pieces joined, if they are `text`; else all of it counts as the client's."""
    joined = concatenated(pieces)
    return joined if joined == text else TemplateText(str.__str__(text))


@lru_cache(maxsize=4096)
def template_text(text: str) -> TemplateText:
    """A text that the template contains, or that is trusted as it is."""
    return _made(text, _TEMPLATE * len(text))


def marked_text(text: str) -> TemplateText:
    """A client's text, whose end `end_of_marked` finds in a longer one."""
    return _made(text, _MARKED * len(text))


def client_text(text: str) -> TemplateText:
    """A client's text; joins, replaces and formats TemplateTexts and keeps what they know."""
    return text if type(text) is TemplateText else _made(text, _CLIENT * len(text))


def restored_text(text: str, spans: Iterable[tuple[int, int]]) -> TemplateText:
    """The inverse of `written_spans`."""
    origins = bytearray(len(text))
    for start, end in spans:
        origins[start:end] = _TEMPLATE * (end - start)
    return _made(text, bytes(origins))


def concatenated(pieces: Iterable[str]) -> TemplateText:
    given = list(pieces)
    return _made("".join(given), b"".join(map(_origins_of, given)))


def template_format(template: TemplateText, values: Iterable[tuple[str, object]], text: str) -> TemplateText:
    """`template.format(…)`, which yields `text`. values: each literal text, and the value of the field that follows."""
    origin = _TEMPLATE if _TEMPLATE * len(template) == template._origins else _CLIENT
    pieces: list[str] = []
    for literal, value in values:
        pieces += [_made(literal, origin * len(literal)), value if isinstance(value, str) else format(value)]
    return _checked(pieces, text)


def end_of_marked(text: TemplateText) -> int:
    """The end of the last marked character; 0 if there is none."""
    return text._origins.rfind(_MARKED) + 1


def written_spans(text: TemplateText) -> list[tuple[int, int]]:
    """(start, end) of each longest run of characters that the template wrote, in order."""
    return [match.span() for match in _WRITTEN.finditer(text._origins)]


def is_written(text: TemplateText, start: int, end: int) -> bool:
    """Whether the template wrote all of these characters."""
    return text._origins.count(_TEMPLATE, start, end) == end - start


def plain(text: str) -> str:
    """An ordinary string with the same characters."""
    return str.__str__(text)
