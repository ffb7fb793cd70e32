"""Random patterns of ECMA 262 and texts that some of them match."""

import random

_ATOMS = (
    *(
        "a",
        "b",
        "c",
        "-",
        "&&",
        "~~",
        "--",
        "_",
        " ",
        "é",
        r"\u{1F600}",
        r"\uD83D\uDE00",
        r"\x41",
        r"\cA",
        r"\n",
        r"\0",
    ),
    *(r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", ".", r"\/", r"\.", r"\p{L}", r"\P{Lu}", r"\p{Script=Greek}"),
    *("[a-c]", "[^a-c]", "[a&&b]", "[^A-Za-z0-9&&_]", "[a~~b]", "[+--]", r"[\w.]", r"[^\s]", "[]", "[^]", r"[\d-]"),
    *("[a-]", r"[\p{Nd}_]", "[[a]", r"[^\S ]", r"[\b]", r"[\u{1F600}-\u{1F64F}]", r"[\ud800-\udfff]", "[😀é]"),
)
_CHARACTERS = "aabbcc-&~_ é😀A\x01\n1B.[]/\u2028\ufeffßλ"
_QUANTIFIERS = ("*", "+", "?", "{2}", "{1,2}", "{0,}", "*?", "+?", "??", "{1,2}?")
_GROUPS = ("(?:{})", "({})", "(?<name>{})")


def random_pattern(rng: random.Random) -> str:
    """A pattern that is valid with the flag u. Parts that are repeated contain no assertions."""
    pattern = _part(rng, 4, has_assertions=rng.random() < 0.6)
    pattern = pattern.replace("(?<name>", "(", pattern.count("(?<name>") - 1)  # a name may occur once
    return f"^(?:{pattern})$" if rng.random() < 0.4 else pattern


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(_CHARACTERS, k=rng.randint(0, 5)))


def _part(rng: random.Random, depth: int, has_assertions: bool) -> str:
    kind = rng.random()
    if depth == 0 or kind < 0.35:
        return rng.choice(_ATOMS)
    if kind < 0.55:
        return "".join(_part(rng, depth - 1, has_assertions) for _ in range(rng.randint(2, 4)))
    if kind < 0.67:
        return f"(?:{'|'.join(_part(rng, depth - 1, has_assertions) for _ in range(rng.randint(2, 3)))})"
    if kind < 0.8:
        return f"(?:{_part(rng, depth - 1, False)}){rng.choice(_QUANTIFIERS)}"
    if kind < 0.88 or not has_assertions:
        return rng.choice(_GROUPS).format(_part(rng, depth - 1, has_assertions))
    if kind < 0.94:
        return f"(?{rng.choice('=!')}{_part(rng, depth - 1, True)})"
    return rng.choice(["^", "$", r"\b", r"\B"])
