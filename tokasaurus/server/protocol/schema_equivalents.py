"""Keywords of JSON schemas that llguidance does not implement → equivalent schemas of keywords that it does.

A function returns None where there is no equivalent, or none that is small.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from itertools import combinations, permutations
from typing import Any, ParamSpec, TypeGuard, TypeVar
from urllib.parse import unquote

from tokasaurus.server.protocol.string_formats import FORMATS

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_MAX_ARRANGEMENTS = 400
"""Alternatives for an array of distinct items: at most 5 values in any order."""
_MAX_WORK = 20_000
"""Schemas that are visited for one root, where references may lead to the same one many times."""
_ARRANGEMENT_WORK = 4
"""What one alternative for an array counts: it is rewritten later."""
_SYNTAX = re.compile(r"[\\^$.*+?()\[\]{}|/\-]")
_NO_NAME = "[]"
_ANNOTATING = frozenset({"title", "description", "default", "examples", "deprecated"})
_IGNORED_BESIDE_VALUES = _ANNOTATING | {"type"}

# For each keyword that applies to values of one type: how a value of this type fails it.
_OPPOSITE_BOUNDS = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_COUNTED = {"Length": "string", "Items": "array", "Properties": "object"}
_ASSERTING = frozenset(
    {"items", "prefixItems", "additionalItems", "patternProperties", "multipleOf", "oneOf", "if", "then", "else"}
    | {"uniqueItems", "contains", "minContains", "maxContains", "propertyNames", "dependencies", "dependentRequired"}
    | {"dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"}
)
"""Keywords that have no opposite here."""


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def unescape(part: str) -> str:
    """A part of a JSON pointer in a URI."""
    return unquote(part).replace("~1", "/").replace("~0", "~")


def literal_pattern(texts: Iterable[str]) -> str:
    """A pattern of ECMA 262 that matches these whole texts and no other."""
    return f"^(?:{'|'.join(map(_escaped, texts))})$"


def _escaped(text: str) -> str:
    return _SYNTAX.sub(r"\\\g<0>", text)


P = ParamSpec("P")
T = TypeVar("T")


def _none_if_malformed(function: Callable[P, T]) -> Callable[P, T | None]:
    """None for a schema that is none, such as {"enum": 5}: llguidance says what is wrong with it; and for a recursive
    one."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(*args, **kwargs)
        except (TypeError, AttributeError, ValueError, RecursionError):
            return None

    return guarded


class Equivalents:
    """Of one schema with its definitions."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._work = 0

    @_none_if_malformed
    def conditional(self, schema: Mapping[str, Any]) -> dict[str, Any] | None:
        """For `if`, `then` and `else`."""
        fails = self.negated(schema["if"])
        if fails is None:
            return None
        holds = [schema["if"], schema.get("then", True)]
        return {"anyOf": [{"allOf": holds}, {"allOf": [fails, schema.get("else", True)]}]}

    @_none_if_malformed
    def dependent(self, dependencies: object) -> dict[str, Any] | None:
        """For `dependentRequired`, `dependentSchemas` and `dependencies`."""
        if not isinstance(dependencies, Mapping):
            return None
        rules = [
            {"anyOf": [{"properties": {name: False}}, {"required": rule} if isinstance(rule, list) else rule]}
            for name, rule in dependencies.items()
        ]
        return {"allOf": rules}

    @_none_if_malformed
    def negated(self, schema: object) -> Any | None:
        """For `not`: a schema of all values that the given one refuses."""
        if isinstance(schema, bool):
            return not schema
        self._work += 1
        if not isinstance(schema, Mapping) or self._work > _MAX_WORK:
            return None
        failures = []
        for keyword, value in schema.items():
            failure = self._failure(keyword, value)
            if failure is None:
                return None
            failures.append(failure)
        failures = [failure for failure in failures if failure is not False]
        return failures[0] if len(failures) == 1 else {"anyOf": failures} if failures else False

    def _failure(self, keyword: str, value: Any) -> Any | None:
        """A schema of the values that fail one keyword; False if none does."""
        if keyword in _OPPOSITE_BOUNDS:
            return {"type": "number", _OPPOSITE_BOUNDS[keyword]: value} if is_number(value) else None
        if keyword[:3] in ("min", "max") and keyword[3:] in _COUNTED:
            return _failing_count(keyword[:3], keyword[3:], value)
        if keyword in _ASSERTING:
            return None
        match keyword:
            case "type":
                return _failing_type([value] if isinstance(value, str) else value)
            case "const":
                return _failing_values([value])
            case "enum":
                return _failing_values(value)
            case "pattern":
                return _failing_pattern(value) if isinstance(value, str) else None
            case "format":
                return _failing_pattern(FORMATS[value]) if value in FORMATS else False
            case "required":
                return _any_of([{"type": "object", "properties": {name: False}} for name in value])
            case "properties":
                return self._failing_properties(value)
            case "additionalProperties":
                return False if value is True else None
            case "not":
                return value
            case "$ref":
                return self.negated(self.resolved(value))
            case "allOf" | "anyOf":
                opposites = [self.negated(entry) for entry in value]
                if any(opposite is None for opposite in opposites):
                    return None
                return _any_of(opposites) if keyword == "allOf" else {"allOf": opposites}
        return False  # an annotation, or a keyword that the standard does not define

    def _failing_properties(self, properties: Mapping[str, Any]) -> Any | None:
        failures = []
        for name, schema in properties.items():
            failure = self.negated(schema)
            if failure is None:
                return None
            if failure is not False:
                failures.append({"type": "object", "properties": {name: failure}, "required": [name]})
        return _any_of(failures)

    def resolved(self, reference: object) -> object:
        """What a reference within the schema leads to; None if there is nothing."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return None
        found: object = self._root
        for part in map(unescape, reference.split("/")[1:]):
            if isinstance(found, list) and part.isdecimal():
                found = found[int(part)] if int(part) < len(found) else None
            else:
                found = found.get(part) if isinstance(found, Mapping) else None
        return found

    @_none_if_malformed
    def are_disjoint(self, schemas: list[Any]) -> bool:
        """Whether it is clear that no value matches two of the schemas, so that oneOf of them is anyOf."""
        return self._has_discriminator(schemas) or all(
            self._is_disjoint(one, other) for one, other in combinations(schemas, 2)
        )

    def _has_discriminator(self, schemas: list[Any]) -> bool:
        """Whether all are objects that require one property, whose values are others in each."""
        targets = [self._without_reference(schema) for schema in schemas]
        objects = [one for one in targets if isinstance(one, Mapping) and _types_of(one) == {"object"}]
        if not objects or len(objects) < len(targets):
            return False
        for name in set.intersection(*(set(one.get("required", [])) for one in objects)):
            values = [self._values(one.get("properties", {}).get(name)) for one in objects]
            known = [value for few in values if few is not None for value in few]
            if None not in values and len({_identity(value) for value in known}) == len(known):
                return True
        return False

    def _is_disjoint(self, one: object, other: object) -> bool:
        one, other = self._without_reference(one), self._without_reference(other)
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return one is False or other is False
        values, other_values = self._values(one), self._values(other)
        if values is not None and other_values is not None:
            return all(value != other_value for value in values for other_value in other_values)
        types, other_types = _types_of(one), _types_of(other)
        if types is not None and other_types is not None and not types & other_types:
            return True
        if types != {"object"} or other_types != {"object"}:
            return False
        properties, others = one.get("properties", {}), other.get("properties", {})
        return any(
            name in properties and name in others and self._is_disjoint(properties[name], others[name])
            for name in [*one.get("required", []), *other.get("required", [])]
        )

    def _without_reference(self, schema: object) -> object:
        """What a schema that is just a reference leads to."""
        while isinstance(schema, Mapping) and set(schema) - _ANNOTATING == {"$ref"} and self._work < _MAX_WORK:
            self._work += 1
            schema = self.resolved(schema["$ref"])
        return schema

    @_none_if_malformed
    def distinct_arrays(self, schema: Mapping[str, Any]) -> dict[str, Any] | None:
        """For `uniqueItems` of an array whose items have few values: every arrangement of these."""
        values = self._values(schema.get("items"))
        if values is None or schema.get("type") != "array" or "prefixItems" in schema or "contains" in schema:
            return None
        fewest, most = schema.get("minItems", 0), min(schema.get("maxItems", len(values)), len(values))
        if not isinstance(fewest, int | float) or not isinstance(most, int | float):
            return None
        counts = range(int(fewest), int(most) + 1)
        arrays: list[dict[str, Any]] = []
        for count in counts:
            for chosen in permutations(values, count):
                self._work += _ARRANGEMENT_WORK
                if len(arrays) == _MAX_ARRANGEMENTS or self._work > _MAX_WORK:
                    return None
                items = [{"const": value} for value in chosen]
                arrays.append({"prefixItems": items, "items": False, "minItems": count, "maxItems": count})
        return {"type": "array", "anyOf": arrays} if arrays else None

    def _values(self, schema: object) -> list[Any] | None:
        """The values of a schema that has few, all of them scalars."""
        self._work += 1
        if not isinstance(schema, Mapping) or self._work > _MAX_WORK:
            return None
        if set(schema) - _IGNORED_BESIDE_VALUES == {"$ref"} and "type" not in schema:
            return self._values(self.resolved(schema["$ref"]))
        if set(schema) <= _IGNORED_BESIDE_VALUES:
            few: dict[object, list[Any]] = {"boolean": [False, True], "null": [None]}
            return few.get(str(schema.get("type")))
        if set(schema) - _IGNORED_BESIDE_VALUES not in ({"enum"}, {"const"}):
            return None
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if not isinstance(values, list) or not all(_is_of_type(value, schema.get("type")) for value in values):
            return None
        return list({_identity(value): value for value in values}.values())

    @_none_if_malformed
    def names(self, schema: object) -> list[str] | None:
        """For `propertyNames`: patterns of ECMA 262, all of which the names match."""
        self._work += 1
        if isinstance(schema, bool):
            return [] if schema else [_NO_NAME]
        if not isinstance(schema, Mapping) or self._work > _MAX_WORK:
            return None
        patterns: list[str] = []
        for keyword, value in schema.items():
            found = self._name_patterns(keyword, value)
            if found is None:
                return None
            patterns += found
        return patterns

    def _name_patterns(self, keyword: str, value: Any) -> list[str] | None:
        match keyword:
            case "type":
                return [] if "string" in ([value] if isinstance(value, str) else value) else [_NO_NAME]
            case "enum" | "const":
                texts = [text for text in (value if keyword == "enum" else [value]) if isinstance(text, str)]
                return [literal_pattern(texts) if texts else _NO_NAME]
            case "pattern":
                return [value] if isinstance(value, str) else None
            case "format":
                return [FORMATS[value]] if value in FORMATS else []
            case "minLength" | "maxLength":
                if not isinstance(value, int) or isinstance(value, bool):
                    return None
                return [f"^[^]{{{value},}}$" if keyword == "minLength" else f"^[^]{{0,{value}}}$"]
            case "$ref":
                return self.names(self.resolved(value))
            case "not":
                refused = self.names(value)
                return None if refused is None else [f"^(?!{_all_of(refused)})"]
            case "allOf" | "anyOf":
                options = [self.names(entry) for entry in value]
                known = [option for option in options if option is not None]
                if len(known) < len(options):
                    return None
                every = [_all_of(option) for option in known]
                return [f"^{one}" for one in every] if keyword == "allOf" else [f"^(?:{'|'.join(every)})"]
        return None if keyword in ("oneOf", "if", "then", "else", "$dynamicRef", "$recursiveRef") else []

    @_none_if_malformed
    def enumerated_names(self, schema: object) -> list[str] | None:
        """For `propertyNames` that list the names."""
        values = self._values(schema)
        return None if values is None else [value for value in values if isinstance(value, str)]


def _all_of(patterns: Iterable[str]) -> str:
    """A look-ahead, for the beginning of a text, that all patterns are found in it."""
    return "".join(f"(?=[^]*(?:{pattern}))" for pattern in patterns) or "(?:)"


def _identity(value: object) -> tuple[bool, object]:
    """The same for equal values of JSON: 1 is 1.0, and not true."""
    return isinstance(value, bool), value


def _is_of_type(value: object, type_: object) -> bool:
    """Whether a value is a scalar of this type; type_: None for any."""
    if value is None or isinstance(value, bool | str):
        names = {type(None): "null", bool: "boolean", str: "string"}
        return type_ in (None, names[type(value)])
    return is_number(value) and (type_ in (None, "number") or (type_ == "integer" and isinstance(value, int)))


def _types_of(schema: Mapping[str, Any]) -> set[str] | None:
    """Names of the types that a schema allows, all numbers as one; None: all, or unknown."""
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list):
        return None
    return {"number" if name == "integer" else str(name) for name in names}


def _any_of(schemas: list[Any]) -> Any:
    return {"anyOf": schemas} if schemas else False


def _failing_count(end: str, counted: str, value: object) -> Any | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if end == "max":
        return {"type": _COUNTED[counted], f"min{counted}": value + 1}
    return {"type": _COUNTED[counted], f"max{counted}": value - 1} if value > 0 else False


def _failing_type(types: list[str]) -> Any | None:
    if "integer" in types and "number" not in types:
        return None  # no keyword asks for a fraction
    others = [name for name in _TYPES if name not in types]
    return {"type": others} if others else False


def _failing_pattern(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^(?![^]*(?:{pattern}))"}


def _failing_values(values: list[Any]) -> Any | None:
    texts = [value for value in values if isinstance(value, str)]
    numbers = sorted({value for value in values if is_number(value)})
    truths = {value for value in values if isinstance(value, bool)}
    if len(texts) + sum(map(is_number, values)) + sum(isinstance(value, bool | None) for value in values) < len(values):
        return None  # arrays and objects
    free = [
        *(["null"] if None not in values else []),
        *(["boolean"] if not truths else []),
        *(["number"] if not numbers else []),
        *(["string"] if not texts else []),
    ]
    failures: list[Any] = [{"type": [*free, "array", "object"]}]
    failures += [{"const": truth} for truth in (False, True) if truths == {not truth}]
    if texts:
        failures.append(_failing_pattern(literal_pattern(texts)))
    for low, high in zip([None, *numbers], [*numbers, None], strict=True) if numbers else ():
        ends = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        failures.append({"type": "number"} | {keyword: end for keyword, end in ends.items() if end is not None})
    return {"anyOf": failures}
