r"""Regular languages as terms: union, intersection, complement, and how llguidance writes them.

llguidance reads the syntax of Rust's regex crate, which has no intersection and complement. A term with these becomes
an automaton by derivatives of Brzozowski, and then a regular expression by elimination of states.
Characters are Unicode scalar values: a text never contains a surrogate.
"""

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

Ranges = tuple[tuple[int, int], ...]
"""Code points from the first to the last of each pair: in order, disjoint, and not adjacent."""

_MAX_CHARS = 1_200_000
"""Length of a written expression."""
_MAX_ELIMINATED_CHARS = 50_000
"""The same, if it is made from an automaton."""
_MAX_STATES = 400
_MAX_STEPS = 30_000
_PROPERTY_STEPS = 100
"""What a set of characters with properties counts: their ranges are joined in some 500 microseconds."""
_ALL: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
_ESCAPED = frozenset(r"\.+*?()|[]{}^$#&-~")


class LanguageError(ValueError):
    """A term cannot be written; the message says why, to be read after "the pattern"."""


def ranges_of(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """The union of pairs of code points, without surrogates."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(pairs):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(
        (max(first, low), min(last, high))
        for first, last in merged
        for low, high in _ALL
        if max(first, low) <= min(last, high)
    )


def complement_of(ranges: Ranges) -> Ranges:
    """All other scalar values."""
    gaps, following = [], 0
    for first, last in ranges:
        gaps.append((following, first - 1))
        following = last + 1
    return ranges_of((first, last) for first, last in [*gaps, (following, 0x10FFFF)] if first <= last)


@dataclass(frozen=True, slots=True)
class Characters:
    """A set of characters."""

    ranges: Ranges = ()
    properties: tuple[str, ...] = ()
    r"""Unicode properties in the form `\p{L}` or `\P{L}`, whose characters belong to the set too."""
    is_negated: bool = False
    """Whether the set is all characters but these."""

    def resolved(self) -> Ranges:
        """The set without properties. Raises LanguageError."""
        ranges = _with_properties(self) if self.properties else self.ranges
        return complement_of(ranges) if self.is_negated else ranges


@lru_cache(maxsize=64)
def _with_properties(characters: Characters) -> Ranges:
    properties = chain.from_iterable(map(_property_ranges, characters.properties))
    return ranges_of([*characters.ranges, *properties])


@lru_cache(maxsize=256)
def _property_ranges(name: str) -> Ranges:
    r"""The characters of `\p{Lu}`, a general category by its short name. Raises LanguageError for any other."""
    found = re.fullmatch(r"\\[pP]\{(?:gc=|General_Category=)?([A-Z][a-z]?)\}", name)
    categories = {} if found is None else _categories()
    pairs = [
        pair for category in categories if found and category.startswith(found[1]) for pair in categories[category]
    ]
    if not pairs:
        raise LanguageError(f"contains {name} where only general categories, such as \\p{{Lu}}, are supported")
    return complement_of(ranges_of(pairs)) if name.startswith("\\P") else ranges_of(pairs)


@lru_cache(maxsize=1)
def _categories() -> dict[str, Ranges]:
    """The characters of each general category."""
    codes: dict[str, list[tuple[int, int]]] = {"Cn": [(0x40000, 0xDFFFF)], "Co": [(0xF0000, 0xFFFFD)]}
    codes["Co"].append((0x100000, 0x10FFFD))
    for code in chain(range(0x40000), range(0xE0000, 0xF0000), (0xFFFFE, 0xFFFFF, 0x10FFFE, 0x10FFFF)):
        codes.setdefault(unicodedata.category(chr(code)), []).append((code, code))
    return {category: ranges_of(pairs) for category, pairs in codes.items()}


class Term:
    """A language. Terms of one Languages are equal only if they are identical."""

    __slots__ = ("characters", "high", "is_nullable", "is_plain", "kind", "low", "num_chars", "parts")

    kind: str
    """characters, concat, union, both, complement or repeat."""
    parts: tuple["Term", ...]
    characters: Characters
    low: int
    high: int | None
    """Of a repetition; None: no limit."""
    is_nullable: bool
    """Whether the empty text belongs to the language."""
    is_plain: bool
    """Whether it contains neither an intersection nor a complement."""
    num_chars: int
    """About the length of the written expression."""


class Languages:
    """Makes terms, simplified where that is cheap. Raises LanguageError for one that is too large."""

    def __init__(self) -> None:
        self._terms: dict[tuple[object, ...], Term] = {}
        self._derivatives: dict[tuple[Term, int], Term] = {}
        self._num_with_properties = 0
        self.nothing = self._term("union", (), is_nullable=False, num_chars=20)
        self.empty = self._term("concat", (), is_nullable=True, num_chars=0)
        self.any_character = self.characters(Characters(_ALL))
        self.any_text = self.repeat(self.any_character, 0, None)

    @property
    def num_steps(self) -> int:
        """A measure of the work done so far: a few microseconds each."""
        return len(self._derivatives) + _PROPERTY_STEPS * self._num_with_properties

    def characters(self, characters: Characters) -> Term:
        if not characters.properties:
            characters = Characters(characters.resolved())
            if not characters.ranges:
                return self.nothing
        length = sum(1 if first == last else 4 for first, last in characters.ranges[:1000])
        length += sum(map(len, characters.properties))
        return self._term("characters", (), is_nullable=False, num_chars=length, characters=characters)

    def concat(self, *terms: Term) -> Term:
        parts: list[Term] = []
        for term in terms:
            if term is self.nothing:
                return self.nothing
            for part in term.parts if term.kind == "concat" else (term,):
                if not (part is self.any_text and parts and parts[-1] is part):
                    parts.append(part)
        if len(parts) == 1:
            return parts[0]
        return self._term("concat", tuple(parts), all(part.is_nullable for part in parts))

    def union(self, *terms: Term) -> Term:
        parts = self._flat("union", terms)
        parts.pop(self.nothing, None)
        if self.any_text in parts:
            return self.any_text
        singles = [part.characters for part in parts if part.kind == "characters" and not part.characters.properties]
        if len(singles) > 1:
            joined = self.characters(Characters(ranges_of(pair for single in singles for pair in single.ranges)))
            others = [part for part in parts if part.kind != "characters" or part.characters.properties]
            parts = dict.fromkeys([joined, *others])
        if self.empty in parts and any(part.is_nullable for part in parts if part is not self.empty):
            del parts[self.empty]
        if len(parts) == 1:
            return next(iter(parts))
        if not parts:
            return self.nothing
        return self._term("union", tuple(parts), any(part.is_nullable for part in parts))

    def both(self, *terms: Term) -> Term:
        """The intersection."""
        parts = self._flat("both", terms)
        parts.pop(self.any_text, None)
        if self.nothing in parts:
            return self.nothing
        if self.empty in parts:
            return self.empty if all(part.is_nullable for part in parts) else self.nothing
        if len(parts) == 1:
            return next(iter(parts))
        if not parts:
            return self.any_text
        ordered = tuple(sorted(parts, key=id))
        return self._term("both", ordered, all(part.is_nullable for part in parts))

    def complement(self, term: Term) -> Term:
        if term.kind == "complement":
            return term.parts[0]
        if term is self.nothing:
            return self.any_text
        if term is self.any_text:
            return self.nothing
        return self._term("complement", (term,), not term.is_nullable)

    def repeat(self, term: Term, low: int, high: int | None) -> Term:
        if term is self.empty or high == 0:
            return self.empty
        if term is self.nothing:
            return self.empty if low == 0 else self.nothing
        if (low, high) == (1, 1):
            return term
        low = 0 if term.is_nullable else low
        if (low, high) == (0, None) and term.kind == "repeat" and (term.low, term.high) == (0, None):
            return term
        return self._term("repeat", (term,), low == 0, low=low, high=high)

    def _flat(self, kind: str, terms: Iterable[Term]) -> dict[Term, None]:
        return dict.fromkeys(part for term in terms for part in (term.parts if term.kind == kind else (term,)))

    def _term(
        self,
        kind: str,
        parts: tuple[Term, ...],
        is_nullable: bool,
        num_chars: int | None = None,
        characters: Characters = Characters(),
        low: int = 0,
        high: int | None = 0,
    ) -> Term:
        # the parts of a union are unordered, but keep the order in which they were first made
        key = (kind, frozenset(parts) if kind == "union" else parts, characters, low, high)
        found = self._terms.get(key)
        if found is not None:
            return found
        term = Term()
        term.kind, term.parts, term.characters, term.low, term.high = kind, parts, characters, low, high
        term.is_nullable = is_nullable
        term.is_plain = kind not in ("both", "complement") and all(part.is_plain for part in parts)
        term.num_chars = 1 + sum(part.num_chars for part in parts) if num_chars is None else num_chars
        if term.num_chars > _MAX_CHARS:
            raise LanguageError("is too large")
        self._terms[key] = term
        return term

    def derivative(self, term: Term, code: int) -> Term:
        """What may follow the character in texts of the term. Precondition: no character of the term has properties."""
        key = (term, code)
        found = self._derivatives.get(key)
        if found is None:
            self._check_work()
            found = self._derivatives[key] = self._derive(term, code)
        return found

    def _check_work(self) -> None:
        if self.num_steps >= _MAX_STEPS:
            raise LanguageError("needs too much work")

    def _derive(self, term: Term, code: int) -> Term:
        parts = term.parts
        match term.kind:
            case "characters":
                return self.empty if _contains(term.characters.ranges, code) else self.nothing
            case "concat":
                options = []
                for index, part in enumerate(parts):
                    options.append(self.concat(self.derivative(part, code), *parts[index + 1 :]))
                    if not part.is_nullable:
                        break
                return self.union(*options)
            case "union":
                return self.union(*(self.derivative(part, code) for part in parts))
            case "both":
                return self.both(*(self.derivative(part, code) for part in parts))
            case "complement":
                return self.complement(self.derivative(parts[0], code))
        low, high = max(term.low - 1, 0), None if term.high is None else term.high - 1
        return self.concat(self.derivative(parts[0], code), self.repeat(parts[0], low, high))

    def plain(self, term: Term) -> Term:
        """The same language without intersection and complement. Raises LanguageError if it becomes too large."""
        if term.is_plain:
            return term
        plain = self._regular_expression(*self._automaton(self._without_properties(term)))
        if plain.num_chars > _MAX_ELIMINATED_CHARS:
            raise LanguageError("is too large")
        return plain

    def contains(self, term: Term, text: str) -> bool:
        """Whether the text belongs to the language. Raises LanguageError."""
        term = self._without_properties(term)
        for character in text:
            term = self.derivative(term, ord(character))
        return term.is_nullable

    def is_nothing(self, term: Term) -> bool:
        """Whether the language contains no text. Raises LanguageError."""
        if term.is_plain:
            return term is self.nothing
        edges, _ = self._automaton(self._without_properties(term))
        return not edges

    def _without_properties(self, term: Term) -> Term:
        match term.kind:
            case "characters":
                if term.characters.properties:
                    self._num_with_properties += 1
                    self._check_work()
                return self.characters(Characters(term.characters.resolved()))
            case "concat":
                return self.concat(*map(self._without_properties, term.parts))
            case "union":
                return self.union(*map(self._without_properties, term.parts))
            case "both":
                return self.both(*map(self._without_properties, term.parts))
            case "complement":
                return self.complement(self._without_properties(term.parts[0]))
        return self.repeat(self._without_properties(term.parts[0]), term.low, term.high)

    def _automaton(self, term: Term) -> tuple[list[dict[int, Term]], set[int]]:
        """A minimal deterministic automaton that begins in state 0: edges of each state to states, with their
        characters, and the accepting states. No edges at all if the language is empty."""
        blocks = _blocks(term)
        states, targets = {term: 0}, []
        waiting = [term]
        while waiting:
            following = []
            for state in waiting:
                row = []
                for block in blocks:
                    target = self.derivative(state, block[0][0])
                    if target not in states:
                        if len(states) >= _MAX_STATES:
                            raise LanguageError("needs too many states")
                        states[target] = len(states)
                        following.append(target)
                    row.append(states[target])
                targets.append(row)
            waiting = following
        accepting = {number for state, number in states.items() if state.is_nullable}
        classes = _minimal_classes(targets, accepting)
        alive = _leading_to(targets, accepting)
        if 0 not in alive:
            return [], set()
        names: dict[int, int] = {}  # numbers of the classes, the beginning first
        for number in range(len(targets)):
            if number in alive:
                names.setdefault(classes[number], len(names))
        edges: list[dict[int, Term]] = [{} for _ in names]
        for number in alive:
            gathered: dict[int, list[tuple[int, int]]] = {}
            for following_state, block in zip(targets[number], blocks, strict=True):
                if following_state in alive:
                    gathered.setdefault(names[classes[following_state]], []).extend(block)
            edges[names[classes[number]]] = {
                target: self.characters(Characters(ranges_of(pairs))) for target, pairs in gathered.items()
            }
        return edges, {names[classes[number]] for number in accepting}

    def _regular_expression(self, edges: list[dict[int, Term]], accepting: set[int]) -> Term:
        """The language of an automaton, whose states are eliminated one after another."""
        if not edges:
            return self.nothing
        begin, end = -1, -2
        outgoing = {number: dict(row) for number, row in enumerate(edges)}
        outgoing[begin] = {0: self.empty}
        for number in accepting:
            outgoing[number][end] = self.empty
        incoming: dict[int, set[int]] = {number: set() for number in [*outgoing, end]}
        for number, row in outgoing.items():
            for target in row:
                incoming[target].add(number)
        remaining = set(range(len(edges)))
        while remaining:
            state = min(remaining, key=lambda number: (len(incoming[number]) * len(outgoing[number]), number))
            remaining.remove(state)
            row = outgoing.pop(state)
            loop = self.repeat(row.pop(state, self.nothing), 0, None)
            for source in incoming.pop(state) - {state}:
                before = outgoing[source].pop(state)
                for target, after in row.items():
                    path = self.concat(before, loop, after)
                    outgoing[source][target] = self.union(outgoing[source].get(target, self.nothing), path)
                    incoming[target].discard(state)
                    incoming[target].add(source)
        return outgoing[begin].get(end, self.nothing)


def _contains(ranges: Ranges, code: int) -> bool:
    return any(first <= code <= last for first, last in ranges)


def _blocks(term: Term) -> list[Ranges]:
    """All characters, divided such that each set in the term contains all or none of a block."""
    sets: dict[Ranges, None] = {}
    seen, waiting = {term}, [term]
    while waiting:
        found = waiting.pop()
        if found.kind == "characters":
            sets[found.characters.ranges] = None
        waiting.extend(part for part in found.parts if part not in seen)
        seen.update(found.parts)
    starts = sorted({0, 0xE000, *(edge for ranges in sets for first, last in ranges for edge in (first, last + 1))})
    if len(starts) * len(sets) > 200_000:
        raise LanguageError("has too many sets of characters")
    gathered: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    for first, following in zip(starts, [*starts[1:], 0x110000], strict=True):
        if first < 0x110000 and not 0xD800 <= first < 0xE000:
            signature = tuple(_contains(ranges, first) for ranges in sets)
            gathered.setdefault(signature, []).append((first, following - 1))
    return [ranges_of(pairs) for pairs in gathered.values()]


def _minimal_classes(targets: list[list[int]], accepting: set[int]) -> list[int]:
    """The number of each state's class, after Moore: states of one class accept the same texts."""
    classes = [int(number in accepting) for number in range(len(targets))]
    while True:
        numbers: dict[tuple[int, ...], int] = {}
        refined = [
            numbers.setdefault((classes[state], *(classes[target] for target in row)), len(numbers))
            for state, row in enumerate(targets)
        ]
        if len(numbers) == len(set(classes)):
            return refined
        classes = refined


def _leading_to(targets: list[list[int]], accepting: set[int]) -> set[int]:
    """States from which an accepting state can be reached."""
    sources: dict[int, set[int]] = {}
    for state, row in enumerate(targets):
        for target in row:
            sources.setdefault(target, set()).add(state)
    found, waiting = set(accepting), list(accepting)
    while waiting:
        new = sources.get(waiting.pop(), set()) - found
        found |= new
        waiting.extend(new)
    return found


def write_rust(term: Term) -> str:
    """A plain term in the syntax of Rust's regex crate, which also stands between the slashes of a Lark terminal."""
    return _write(term, 0)


def write_literal(text: str) -> str:
    """A text that stands for itself, in the same syntax."""
    return "".join(_write_character(ord(character)) for character in text)


def _write(term: Term, level: int) -> str:
    """level: 0 in an alternative, 1 in a sequence, 2 before a quantifier."""
    match term.kind:
        case "characters":
            return _write_characters(term.characters)
        case "concat":
            written = "".join(_write(part, 1) for part in term.parts)
            return written if level < 2 else f"(?:{written})"
        case "union":
            if not term.parts:
                return r"[^\x00-\x{10ffff}]"
            options = [_write(part, 0) for part in term.parts if part.kind != "concat" or part.parts]
            written = "|".join(options)
            if len(options) == len(term.parts):
                return written if level == 0 else f"(?:{written})"
            return f"(?:{written})?" if level < 2 else f"(?:(?:{written})?)"
    assert term.kind == "repeat", term.kind
    body = _write(term.parts[0], 2)
    counts = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    high = "" if term.high is None else term.high
    count = f"{{{term.low}}}" if term.low == term.high else f"{{{term.low},{high}}}"
    written = body + counts.get((term.low, term.high), count)
    return written if level < 2 else f"(?:{written})"


@lru_cache(maxsize=1024)
def _write_characters(characters: Characters) -> str:
    if characters.ranges == _ALL:
        return "(?s:.)"
    ranges, is_negated = characters.ranges, characters.is_negated
    if not characters.properties and len(others := complement_of(ranges)) < len(ranges):
        ranges, is_negated = others, not is_negated
    if not characters.properties and not is_negated and len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _write_character(ranges[0][0])
    pairs = "".join(
        _write_character(first) + ("" if first == last else f"-{_write_character(last)}") for first, last in ranges
    )
    return f"[{'^' if is_negated else ''}{pairs}{''.join(characters.properties)}]"


def _write_character(code: int) -> str:
    character = chr(code)
    if character in _ESCAPED:
        return f"\\{character}"
    return character if character.isprintable() and character != "/" else f"\\x{{{code:x}}}"
