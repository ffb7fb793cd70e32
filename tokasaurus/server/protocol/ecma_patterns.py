r"""Patterns of ECMA 262, the language of `pattern` in JSON Schema → expressions that llguidance reads.

Source: ECMA-262, section 22.2, with the flag u; and what annex B of it allows without this flag where it can mean one
thing only: brackets and braces that stand for themselves, and escapes of punctuation. Some forms that are errors there
have their meaning in Python: `(?P<name>…)`, `\A`, `\Z`, `\z`, and flags at the beginning, such as `(?i)`.

llguidance reads the syntax of Rust's regex crate, in which other characters are special and `\d`, `\w`, `\s` and `.`
contain others, so a pattern is parsed and written anew.

Anchors, word boundaries and look-ahead say something about the whole text. They are resolved here: the pattern is read
from left to right, and each part is asked for the language of all texts from this part to the end, given the language
of what follows it.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

from tokasaurus.server.protocol.regular_languages import (
    Characters,
    LanguageError,
    Languages,
    Ranges,
    Term,
    complement_of,
    ranges_of,
    write_rust,
)

_MAX_UNROLLED = 20
"""Repetitions of a part that contains an assertion."""
_MAX_COUNT_DIGITS = 9
_MAX_REMEMBERED_CHARS = 10_000

_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_SPACE = ranges_of(
    (code, code) for code in (*range(9, 14), 0x20, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F)
)
_SPACE = ranges_of([*_SPACE, (0x3000, 0x3000), (0xFEFF, 0xFEFF)])
_CLASS_ESCAPES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROL_ESCAPES = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_PROPERTY = re.compile(r"\{(\^?[A-Za-z0-9_]+(?:=[A-Za-z0-9_]+)?)\}", re.ASCII)
_KNOWN_PROPERTIES: dict[str, Ranges] = {"Any": ((0, 0x10FFFF),), "ASCII": ((0, 0x7F),)}
_COUNT = re.compile(r"\{(\d+)(,?)(\d*)\}", re.ASCII)
_NO_LOW_COUNT = re.compile(r"\{,\d+\}", re.ASCII)
_MODIFIERS = re.compile(r"\(\?([ims]*)(?:-([ims]*))?(:|\))")
_GROUP_NAME = re.compile(r"\(\?P?<([^\W\d][\w$\u200c\u200d]*|\$[\w$]*)>")
_SYNTAX = frozenset("^$\\.*+?()[]{}|/")


class PatternError(ValueError):
    """A pattern is not valid, or not supported. The message says why, to be read after the name of its place."""


@dataclass(frozen=True, slots=True)
class _Set:
    """One character of a set."""

    characters: Characters


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple["_Node", ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    options: tuple["_Node", ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    body: "_Node"
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class _LookAhead:
    body: "_Node"
    is_negative: bool


@dataclass(frozen=True, slots=True)
class _Assertion:
    r"""^, $, \b or \B; is_multiline: of ^ and $."""

    kind: str
    is_multiline: bool = False


_Node = _Set | _Sequence | _Choice | _Repeat | _LookAhead | _Assertion


@dataclass(frozen=True, slots=True)
class _Flags:
    """In force at a place of the pattern."""

    i: bool = False
    m: bool = False
    s: bool = False


_CASED = (
    *(range(0x2E00), range(0xA640, 0xAC00), range(0xFB00, 0xFB10), range(0xFF20, 0xFF60), range(0x10400, 0x10D90)),
    *(range(0x118A0, 0x118E0), range(0x16E40, 0x16EE0), range(0x1E900, 0x1E944)),
)
"""Blocks of Unicode that have all letters with a case."""


@lru_cache(maxsize=1)
def _case_variants() -> dict[int, tuple[tuple[int, int], ...]]:
    """Characters that differ in case only, which are those with the same simple case folding, by each of them."""
    folded: dict[str, list[int]] = {}
    for character in map(chr, chain.from_iterable(_CASED)):
        folds = (character.casefold(), character.lower(), character)
        folded.setdefault(next(fold for fold in folds if len(fold) == 1), []).append(ord(character))
    groups = [group for group in folded.values() if len(group) > 1]
    return {member: tuple((code, code) for code in group) for group in groups for member in group}


@lru_cache(maxsize=64)
def _any_case(ranges: Ranges) -> Ranges:
    variants = _case_variants()
    found = [
        pair
        for first, last in ranges
        for code in (range(first, last + 1) if last - first < 1000 else variants)
        if first <= code <= last
        for pair in variants.get(code, ())
        if not first <= pair[0] <= last
    ]
    return ranges_of([*ranges, *found])


@lru_cache(maxsize=1024)
def _literal(code: int, is_any_case: bool) -> _Set:
    ranges = ranges_of([(code, code)])
    return _Set(Characters(_any_case(ranges) if is_any_case else ranges))


class _Parser:
    """Raises PatternError."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def parse(self) -> _Node:
        flags = _Flags()
        found = _MODIFIERS.match(self._text)
        if found is not None and found[3] == ")" and not found[2]:
            flags = self._with_flags(flags, found)
            self._at = found.end()
        node = self._choice(flags)
        if self._at < len(self._text):
            raise PatternError("contains a ) without (")
        return node

    def _peek(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _take(self, text: str) -> bool:
        if not self._peek(text):
            return False
        self._at += len(text)
        return True

    def _match(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        return expression.match(self._text, self._at)

    def _choice(self, flags: _Flags) -> _Node:
        options = [self._sequence(flags)]
        while self._take("|"):
            options.append(self._sequence(flags))
        return options[0] if len(options) == 1 else _Choice(tuple(options))

    def _sequence(self, flags: _Flags) -> _Node:
        parts: list[_Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._quantified(self._atom(flags)))
        return parts[0] if len(parts) == 1 else _Sequence(tuple(parts))

    def _quantified(self, node: _Node) -> _Node:
        counts = self._counts()
        if counts is None:
            return node
        low, high = counts
        if high is not None and high < low:
            raise PatternError(f"repeats something {low} to {high} times")
        self._take("?")  # a lazy quantifier matches the same texts
        if isinstance(node, _Assertion) or (isinstance(node, _LookAhead) and low > 0):
            raise PatternError("repeats an assertion")
        if self._text[self._at : self._at + 1] in ("*", "+", "?") or self._counts() is not None:
            raise PatternError("has a quantifier after a quantifier")
        return _Repeat(node, low, high)

    def _counts(self) -> tuple[int, int | None] | None:
        for sign, counts in {"*": (0, None), "+": (1, None), "?": (0, 1)}.items():
            if self._take(sign):
                return counts
        found = self._match(_COUNT)
        if found is None:
            return None
        self._at = found.end()
        if max(len(found[1]), len(found[3])) > _MAX_COUNT_DIGITS:
            raise PatternError(f"repeats something a number of times with more than {_MAX_COUNT_DIGITS} digits")
        low = int(found[1])
        return low, (int(found[3]) if found[3] else None) if found[2] else low

    def _atom(self, flags: _Flags) -> _Node:
        character = self._text[self._at]
        if character == "(":
            return self._group(flags)
        if character == "[":
            return self._class(flags)
        if character == "\\":
            return self._escape(flags)
        if character in "*+?" or self._match(_COUNT):
            raise PatternError(f"has nothing that {character} could repeat")
        if self._match(_NO_LOW_COUNT):
            raise PatternError("has a quantifier without a lower limit: write {0,n}")
        self._at += 1
        if character == ".":
            return _Set(Characters(() if flags.s else _LINE_ENDS, is_negated=True))
        if character == "^":
            return _Assertion("start", flags.m)
        if character == "$":
            return _Assertion("end", flags.m)
        return _literal(ord(character), flags.i)

    def _group(self, flags: _Flags) -> _Node:
        for mark, name in (("(?<=", "look-behind"), ("(?<!", "look-behind"), ("(?>", "atomic groups")):
            if self._peek(mark):
                raise PatternError(f"contains {mark}, but {name} is not supported")
        if self._peek("(?P="):
            raise PatternError("contains a back-reference, which is not supported")
        found = self._match(_GROUP_NAME)
        is_negative = self._peek("(?!")
        if is_negative or self._peek("(?="):
            self._at += 3
            return _LookAhead(self._closed(flags), is_negative)
        if found is not None:
            self._at = found.end()
            return self._closed(flags)
        modifiers = self._match(_MODIFIERS)
        if modifiers is not None and modifiers[3] == ":":
            self._at = modifiers.end()
            return self._closed(self._with_flags(flags, modifiers))
        if self._peek("(?"):
            raise PatternError(f"contains {self._text[self._at : self._at + 4]}, which is no group of ECMA 262")
        self._at += 1
        return self._closed(flags)

    def _closed(self, flags: _Flags) -> _Node:
        node = self._choice(flags)
        if not self._take(")"):
            raise PatternError("contains a ( without )")
        return _Sequence((node,)) if isinstance(node, _Assertion) else node

    def _with_flags(self, flags: _Flags, found: re.Match[str]) -> _Flags:
        added, removed = found[1], found[2] or ""
        if len(set(added + removed)) < len(added + removed) or found[2] == "" == added:
            raise PatternError(f"contains {found[0]}, which names no flag, or one twice")
        return replace(flags, **dict.fromkeys(added, True), **dict.fromkeys(removed, False))

    def _escape(self, flags: _Flags) -> _Node:
        following = self._text[self._at + 1 : self._at + 2]
        if following in ("b", "B"):
            if flags.i:
                raise PatternError(f"contains \\{following} where case is ignored, which is not supported")
            self._at += 2
            return _Assertion("boundary" if following == "b" else "no boundary")
        if following in ("A", "Z", "z"):
            self._at += 2
            return _Assertion("start" if following == "A" else "end")
        found = self._class_escape(flags)
        if isinstance(found, int):
            return _literal(found, flags.i)
        return _Set(found)

    def _class_escape(self, flags: _Flags) -> int | Characters:
        """What may stand in a class and outside of one: a character or a set."""
        self._at += 1
        if self._at >= len(self._text):
            raise PatternError("ends within an escape")
        letter = self._text[self._at]
        self._at += 1
        if letter.lower() in _CLASS_ESCAPES:
            ranges = _CLASS_ESCAPES[letter.lower()]
            ranges = _any_case(ranges) if flags.i else ranges
            return Characters(ranges if letter.islower() else complement_of(ranges))
        if letter in "pP":
            return self._property(letter, flags)
        if letter in _CONTROL_ESCAPES:
            return _CONTROL_ESCAPES[letter]
        if letter == "0" and not self._text[self._at : self._at + 1].isdecimal():
            return 0
        if letter.isdecimal() or letter == "k":
            raise PatternError(f"contains \\{letter}: back-references and octal numbers are not supported")
        if letter == "c" and re.match("[A-Za-z]", self._text[self._at : self._at + 1]):
            self._at += 1
            return ord(self._text[self._at - 1]) % 32
        if letter in "xu" and (code := self._number(letter)) is not None:
            return code
        if letter.isalnum():
            raise PatternError(f"contains \\{letter}, which is no escape of ECMA 262")
        return ord(letter)

    def _number(self, letter: str) -> int | None:
        """The character whose number follows."""
        if letter == "u" and (found := self._match(re.compile(r"\{([0-9A-Fa-f]{1,8})\}"))):
            self._at = found.end()
            code = int(found[1], 16)
            if code > 0x10FFFF:
                raise PatternError(f"contains \\u{found[0]}, which is no character")
            return code
        num_digits = 2 if letter == "x" else 4
        found = self._match(re.compile(rf"([0-9A-Fa-f]{{{num_digits}}})"))
        if found is None:
            return None
        self._at = found.end()
        code = int(found[1], 16)
        low = self._match(re.compile(r"\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})"))
        if letter == "u" and 0xD800 <= code < 0xDC00 and low:
            self._at = low.end()
            return 0x10000 + (code - 0xD800) * 0x400 + int(low[1], 16) - 0xDC00
        return code

    def _property(self, letter: str, flags: _Flags) -> Characters:
        found = self._match(_PROPERTY)
        if found is None or found[1].startswith("^"):
            raise PatternError(f"contains \\{letter} without the name of a property in braces")
        self._at = found.end()
        if found[1] in _KNOWN_PROPERTIES:
            ranges = _KNOWN_PROPERTIES[found[1]]
            return Characters(ranges if letter == "p" else complement_of(ranges))
        characters = Characters(properties=(f"\\{letter}{{{found[1]}}}",))
        if not flags.i:
            return characters
        return Characters(_any_case(characters.resolved()))

    def _class(self, flags: _Flags) -> _Node:
        self._at += 1
        is_negated = self._take("^")
        pairs: list[tuple[int, int]] = []
        properties: list[str] = []
        while not self._take("]"):
            first = self._member(flags)
            # - stands for itself at an end of the class and beside a set
            if self._peek("-") and not self._peek("-]") and self._at + 1 < len(self._text):
                self._at += 1
                last = self._member(flags)
                if isinstance(first, int) and isinstance(last, int):
                    if last < first:
                        raise PatternError(f"contains a range from {chr(first)!r} to {chr(last)!r}")
                    pairs.append((first, last))
                    continue
                members: tuple[int | Characters, ...] = (first, ord("-"), last)
            else:
                members = (first,)
            for member in members:
                if isinstance(member, int):
                    pairs.append((member, member))
                else:
                    pairs.extend(member.ranges)
                    properties.extend(member.properties)
        ranges = ranges_of(pairs)
        if flags.i:
            ranges = _any_case(ranges)
        return _Set(Characters(ranges, tuple(dict.fromkeys(properties)), is_negated))

    def _member(self, flags: _Flags) -> int | Characters:
        if self._at >= len(self._text):
            raise PatternError("contains a [ without ]")
        if self._peek("\\b"):
            self._at += 2
            return 8
        if self._peek("\\-"):
            self._at += 2
            return ord("-")
        if self._peek("\\"):
            return self._class_escape(flags)
        self._at += 1
        return ord(self._text[self._at - 1])


_START = -1
"""No character precedes."""

_Continuation = Callable[[int], Term]
"""The language of what follows, by the kind of the character before it: an index into _Reader.kinds, or _START."""


class _Reader:
    """Finds the language of the whole texts that one pattern allows."""

    def __init__(self, languages: Languages, node: _Node) -> None:
        self._languages = languages
        assertions = list(_assertions_in(node))
        # the distinctions between preceding characters that an assertion of this pattern makes
        kinds: list[Ranges] = [((0, 0x10FFFF),)]
        if any("boundary" in assertion.kind for assertion in assertions):
            kinds = [_WORD, complement_of(_WORD)]
        if any(assertion.kind == "start" and assertion.is_multiline for assertion in assertions):
            line_ends = complement_of(_LINE_ENDS)
            kinds = [common for kind in kinds for other in (line_ends, _LINE_ENDS) if (common := _common(kind, other))]
        self._kinds = kinds
        self._of_kind = [languages.characters(Characters(kind)) for kind in map(ranges_of, kinds)]
        self._plain: dict[int, Term | None] = {}  # by the id of the node

    def whole(self, node: _Node) -> Term:
        """The texts that match from their beginning to their end."""
        return self._read(node, _START, lambda _: self._languages.empty)

    def search(self, node: _Node) -> Term:
        """The texts of which some part matches."""
        make = self._languages
        plain = self._without_assertions(node)
        if plain is not None:
            return make.concat(make.any_text, plain, make.any_text)
        after = [
            make.concat(make.any_text, of_kind, self._read(node, kind, lambda _: make.any_text))
            for kind, of_kind in enumerate(self._of_kind)
        ]
        return make.union(self._read(node, _START, lambda _: make.any_text), *after)

    def _read(self, node: _Node, before: int, rest: _Continuation) -> Term:
        """The texts from here to the end. before: the kind of the preceding character."""
        make = self._languages
        plain = self._without_assertions(node)
        if plain is not None:
            return self._followed(plain, before, rest)
        match node:
            case _Sequence():
                return self._read_sequence(node.parts, before, rest)
            case _Choice():
                return make.union(*(self._read(option, before, rest) for option in node.options))
            case _Repeat():
                return self._read_repeat(node, before, rest)
            case _LookAhead():
                seen = self._read(node.body, before, lambda _: make.any_text)
                return make.both(make.complement(seen) if node.is_negative else seen, rest(before))
            case _Assertion():
                return self._read_assertion(node, before, rest(before))
        raise AssertionError(node)

    def _read_sequence(self, parts: tuple[_Node, ...], before: int, rest: _Continuation) -> Term:
        for part in reversed(parts):
            rest = self._remembered(part, rest)
        return rest(before)

    def _remembered(self, part: _Node, rest: _Continuation) -> _Continuation:
        known: dict[int, Term] = {}

        def read(before: int) -> Term:
            if before not in known:
                known[before] = self._read(part, before, rest)
            return known[before]

        return read

    def _followed(self, plain: Term, before: int, rest: _Continuation) -> Term:
        """A text of a language without assertions, and what follows it."""
        make = self._languages
        after = [rest(kind) for kind in range(len(self._kinds))]
        options = [] if not plain.is_nullable or rest(before) in after[:1] == after else [rest(before)]
        if all(term is after[0] for term in after):
            if not options:
                return make.concat(plain, after[0])
            ending = make.both(plain, make.concat(make.any_text, make.any_character))
            return make.union(make.concat(ending, after[0]), *options)
        for of_kind, term in zip(self._of_kind, after, strict=True):
            ending = make.concat(make.any_text, of_kind)
            if plain.kind == "characters":
                last = make.characters(Characters(_common(plain.characters.resolved(), of_kind.characters.ranges)))
            else:
                last = make.both(plain, ending)
            options.append(make.concat(last, term))
        return make.union(*options)

    def _read_repeat(self, node: _Repeat, before: int, rest: _Continuation) -> Term:
        high = node.high
        if high is None or high > _MAX_UNROLLED:
            raise PatternError(
                f"contains an anchor, word boundary or look-ahead in a part that is repeated more than {_MAX_UNROLLED} "
                "times, which is not supported"
            )
        for number in reversed(range(high)):
            rest = self._remembered(node.body, rest) if number < node.low else self._optional(node.body, rest)
        return rest(before)

    def _optional(self, part: _Node, rest: _Continuation) -> _Continuation:
        read = self._remembered(part, rest)
        return lambda before: self._languages.union(rest(before), read(before))

    def _read_assertion(self, node: _Assertion, before: int, rest: Term) -> Term:
        make = self._languages
        if node.kind == "start":
            is_start = before == _START or (node.is_multiline and _overlap(self._kinds[before], _LINE_ENDS))
            return rest if is_start else make.nothing
        if node.kind == "end":
            ends = [make.empty]
            if node.is_multiline:
                ends.append(make.concat(make.characters(Characters(_LINE_ENDS)), make.any_text))
            return make.both(rest, make.union(*ends))
        after_word = before != _START and _overlap(self._kinds[before], _WORD)
        is_word_next = after_word != (node.kind == "boundary")
        following = _WORD if is_word_next else complement_of(_WORD)
        begins = make.concat(make.characters(Characters(following)), make.any_text)
        return make.both(rest, begins if is_word_next else make.union(make.empty, begins))

    def _without_assertions(self, node: _Node) -> Term | None:
        """The language of a node, None if it contains an assertion."""
        if id(node) not in self._plain:
            self._plain[id(node)] = self._find_plain(node)
        return self._plain[id(node)]

    def _find_plain(self, node: _Node) -> Term | None:
        make = self._languages
        if isinstance(node, _Set):
            return make.characters(node.characters)
        if isinstance(node, _Repeat):
            body = self._without_assertions(node.body)
            return None if body is None else make.repeat(body, node.low, node.high)
        if isinstance(node, _Sequence | _Choice):
            parts = [self._without_assertions(part) for part in _parts_of(node)]
            plain = [part for part in parts if part is not None]
            if len(plain) == len(parts):
                return make.concat(*plain) if isinstance(node, _Sequence) else make.union(*plain)
        return None


def _parts_of(node: _Node) -> tuple[_Node, ...]:
    match node:
        case _Sequence():
            return node.parts
        case _Choice():
            return node.options
        case _Repeat() | _LookAhead():
            return (node.body,)
    return ()


def _assertions_in(node: _Node) -> Iterable[_Assertion]:
    if isinstance(node, _Assertion):
        yield node
    for part in _parts_of(node):
        yield from _assertions_in(part)


def _common(first: Ranges, second: Ranges) -> Ranges:
    return ranges_of(
        (max(low, other_low), min(high, other_high))
        for low, high in first
        for other_low, other_high in second
        if max(low, other_low) <= min(high, other_high)
    )


def _overlap(first: Ranges, second: Ranges) -> bool:
    return bool(_common(first, second))


def read_pattern(languages: Languages, pattern: str, is_whole: bool = False) -> Term:
    """The language of the texts that contain a match or, if is_whole, are one. Raises PatternError."""
    try:
        node = _Parser(pattern).parse()
        reader = _Reader(languages, node)
        return reader.whole(node) if is_whole else reader.search(node)
    except LanguageError as error:
        raise PatternError(str(error)) from None
    except RecursionError:
        raise PatternError("is nested too deeply") from None


@dataclass(frozen=True, slots=True)
class Translation:
    """A pattern for llguidance."""

    expressions: tuple[str, ...]
    """A text matches the pattern if each of these matches the whole text."""
    num_steps: int
    """The work that it took, in `Languages.num_steps`."""


def translate_pattern(pattern: str, is_whole: bool = False) -> Translation:
    """The arguments are those of `read_pattern`. Raises PatternError."""
    is_short = len(pattern) <= _MAX_REMEMBERED_CHARS
    return _translate_once(pattern, is_whole) if is_short else _translate(pattern, is_whole)


def _translate(pattern: str, is_whole: bool) -> Translation:
    languages = Languages()
    term = read_pattern(languages, pattern, is_whole)
    parts = term.parts if term.kind == "both" else (term,)
    try:
        expressions = tuple(write_rust(languages.plain(part)) for part in parts)
    except LanguageError as error:
        raise PatternError(str(error)) from None
    except RecursionError:
        raise PatternError("is nested too deeply") from None
    return Translation(expressions, languages.num_steps)


_translate_once = lru_cache(maxsize=512)(_translate)
