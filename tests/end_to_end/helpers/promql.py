"""What a PromQL query reads, and whether a scrape has it. No evaluation: the long tests run Prometheus itself."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.end_to_end.helpers.scrape import Scrape

FUNCTIONS = frozenset({"sum", "max", "rate", "increase", "histogram_quantile"})
_GROUPING = re.compile(r"\b(by|on)\s*\(([\w\s,]*)\)")
_RANGE = re.compile(r"\[(\d+[smh])\]")
_SELECTOR = re.compile(r"(?<![\w.:])([A-Za-z_:][\w:]*)\s*(\{[^{}]*\})?\s*(\()?")
_MATCHER = re.compile(r'\s*(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*')
_REST = re.compile(r"[\s\d.()+\-*/,<>=]*")
_ADDED = {"instance": "127.0.0.1:10210", "job": "toka"}
"""Labels that Prometheus gives to all samples of a server."""


@dataclass(frozen=True)
class Selector:
    """The series of a query that have one name."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]
    """(label, operator, value)."""

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(_is_match(labels.get(label, ""), operator, value) for label, operator, value in self.matchers)


def _is_match(found: str, operator: str, value: str) -> bool:
    is_equal = found == value if operator in ("=", "!=") else re.fullmatch(value, found) is not None
    return is_equal == (operator in ("=", "=~"))


def read_query(query: str) -> tuple[list[Selector], set[str]]:
    """The query's selectors, and the labels that it groups by. Variables must have been replaced.

    Raises AssertionError if the query has anything that this does not know.
    """
    groups = {label.strip() for _, labels in _GROUPING.findall(query) for label in labels.split(",")}
    rest = _RANGE.sub("", _GROUPING.sub("", query))
    assert rest.count("(") == rest.count(")"), query
    selectors = []
    for name, matchers, call in _SELECTOR.findall(rest):
        if call:
            assert name in FUNCTIONS, f"{name}() in {query}"
        elif name != "and":
            parsed = tuple(_MATCHER.findall(matchers))
            assert ",".join(f'{one}{two}"{three}"' for one, two, three in parsed) == re.sub(
                r",\s+", ",", matchers.strip("{}")
            ), matchers
            selectors.append(Selector(name, parsed))
    left = _SELECTOR.sub(lambda match: match[3] or "", rest)
    assert _REST.fullmatch(left), f"{left!r} in {query}"
    return selectors, groups


def missing_series(query: str, scrape: Scrape) -> Iterator[str]:
    """One line for each series or label that the query reads and the scrape lacks."""
    samples = [(sample.name, {**sample.labels, **_ADDED}) for family in scrape.families for sample in family.samples]
    samples.append(("up", dict(_ADDED)))
    selectors, groups = read_query(query)
    assert selectors, query
    seen: set[str] = set()
    for selector in selectors:
        found = [labels for name, labels in samples if name == selector.name and selector.matches(labels)]
        if not found:
            yield f"no sample of {selector.name} with {selector.matchers}"
        for labels in found:
            seen |= labels.keys()
    yield from (f"no label {label} in {query}" for label in groups - seen)
