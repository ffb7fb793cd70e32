"""JSON schemas → equivalent schemas that llguidance follows exactly, or an error that names what it cannot follow.

Keywords that change nothing are left out, since llguidance refuses them whatever their value. It reads numbers as
float64, which changes integers beyond 2^53, so these are checked and bounds are narrowed.
"""

import math
from collections.abc import Iterator, Mapping
from decimal import ROUND_CEILING, ROUND_DOWN, Context, Decimal
from itertools import combinations, count
from typing import Any

from tokasaurus.server.protocol.ecma_patterns import PatternError, Translation, read_pattern, translate_pattern
from tokasaurus.server.protocol.regular_languages import LanguageError, Languages, Term, write_rust
from tokasaurus.server.protocol.schema_equivalents import Equivalents, is_number, unescape
from tokasaurus.server.protocol.string_formats import FORMATS

Schema = Mapping[str, Any]

_MAX_PATH_CHARS = 200
_MAX_EXACT = 2**53
_MAX_INTEGER = 2**63 - 1
"""llguidance's largest integer: what it reads as 2^63, it replaces by this."""
_MIN_INTEGER = -(2**63) + 1024
"""The next float64 above llguidance's smallest integer, for which it crashes."""
_MAX_FLOAT_BOUND = 10**18
"""Largest bound of a number that may have a fraction."""
_MAX_DIGITS = 15
_MAX_PLACES = 22
"""Significant digits and decimal places of a bound for which llguidance's reading is exact: 10^22 is a float64."""
_MAX_BEGINNING = 8
"""Decimal places of numbers that are allowed although a bound begins with their digits."""
_BOUNDS = ("maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_LIMITING = frozenset({*_BOUNDS, *_COUNTS, "multipleOf"})
_MAX_MULTIPLE = 2**32 - 1
_MAX_PATTERN_WORK = 50_000
"""Characters of all patterns, and steps of work on them: each takes some 10 microseconds."""
_FAILED_PATTERN_WORK = 5_000
"""What a pattern without a translation counts: most take less, some that are too large take 50 ms."""
_MAX_PARTS = 16
"""Sets of names into which overlapping patterns divide all names."""
_MAX_LENGTH = 2**31
"""No answer is longer: a higher limit on characters, items or properties changes nothing."""

_REPLACED_BY_ARRAYS = frozenset({"type", "items", "uniqueItems", "minItems", "maxItems"})
_SCHEMAS = ("additionalProperties", "items", "additionalItems")
_SCHEMA_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_SCHEMA_MAPS = ("properties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "$vocabulary", "$dynamicAnchor", "$recursiveAnchor"}
)


_IMPLEMENTED = frozenset(
    {
        *("type", "enum", "const", "anyOf", "oneOf", "allOf"),
        *("$ref", "$defs", "definitions", "$schema", "$id", "id", "$anchor"),
    }
    | {"items", "additionalItems", "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format"}
    | {"properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "x-guidance"}
)


class SchemaError(ValueError):
    """The schema cannot be followed exactly. The message follows the name of the request field."""


def exact_schema(schema: Schema, is_strict: bool = True) -> dict[str, Any]:
    """An equivalent schema for llguidance. Raises SchemaError.

    What is wrong in a definition that is never used is no error. is_strict: False: a keyword that cannot be followed is
    left out, as far as possible, so that the model may deviate from it.
    """
    try:
        return _Rewriting(schema, is_strict).root()
    except RecursionError:
        raise SchemaError("is nested too deeply") from None


def _is_any(schema: object) -> bool:
    """Whether every value matches."""
    return schema is True or (isinstance(schema, Mapping) and _ANNOTATIONS.issuperset(schema))


def _is_none(schema: object) -> bool:
    """Whether the schema says that no value matches."""
    return schema is False or (isinstance(schema, Mapping) and set(schema) == {"not"} and _is_any(schema["not"]))


NOT_IMPLEMENTED = frozenset(
    {"uniqueItems", "unevaluatedProperties", "unevaluatedItems", "dependentRequired", "dependentSchemas", "not", "if"}
    | {"then", "else", "contains", "minContains", "maxContains", "propertyNames", "dependencies"}
    | {"$dynamicRef", "$recursiveRef"}
)
"""Keywords that llguidance does not implement."""


def _is_neutral(keyword: str, schema: Schema) -> bool:
    """Whether one of NOT_IMPLEMENTED, which the schema has, changes nothing in it."""
    value = schema[keyword]
    match keyword:
        case "uniqueItems":
            return value is False or _has_at_most_one_item(schema)
        case "unevaluatedProperties" | "unevaluatedItems" | "propertyNames":
            return _is_any(value)
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return isinstance(value, Mapping) and all(entry == [] or _is_any(entry) for entry in value.values())
        case "not":
            return _is_none(value)
        case "if":
            return _is_any(schema.get("then", True)) and _is_any(schema.get("else", True))
        case "then" | "else":
            return "if" not in schema or _is_any(value)
        case "contains":
            return schema.get("minContains") == 0 and "maxContains" not in schema
        case "minContains":
            return "contains" not in schema or value == 0
        case "maxContains":
            return "contains" not in schema
    return False


def _has_at_most_one_item(schema: Schema) -> bool:
    most = schema.get("maxItems")
    return isinstance(most, int) and not isinstance(most, bool) and most <= 1


class _Rewriting:
    """One schema with its definitions."""

    def __init__(self, schema: Schema, is_strict: bool) -> None:
        self._schema = schema
        self._is_strict = is_strict
        self._equivalents = Equivalents(schema)
        self._errors: dict[str, SchemaError] = {}  # by the pointer of a definition
        self._references: dict[str, list[str]] = {"": []}  # by the pointer of a definition; "" for all else
        self._definition = ""
        self._pattern_work = 0
        self._moved: dict[str, str] = {}  # references to parts that are no definitions -> new names among $defs
        self._multiples: set[Decimal] = set()  # values of multipleOf
        self._common = Decimal(0)  # their least common multiple

    def root(self) -> dict[str, Any]:
        written = self._object(self._schema, "#")
        added: dict[str, Any] = {}
        while len(added) < len(self._moved):  # a moved part may refer to another one
            reference, name = list(self._moved.items())[len(added)]
            added[name] = self._defined(self._equivalents.resolved(reference), f"#/$defs/{name}")
        if added:
            written["$defs"] = {**written.get("$defs", {}), **added}
        waiting, seen = [""], {""}
        while waiting:
            for reference in self._references.get(waiting.pop(), []):
                definition = "/".join(map(unescape, reference.split("/")[:3]))
                used = [definition] if reference.startswith("#/") or reference == "#" else list(self._errors)
                for pointer in used:
                    if pointer in self._errors:
                        raise self._errors[pointer]
                    if pointer not in seen:
                        seen.add(pointer)
                        waiting.append(pointer)
        return written

    def _any(self, schema: Any, path: str) -> Any:
        return self._object(schema, path) if isinstance(schema, Mapping) else schema

    def _object(self, schema: Schema, path: str) -> dict[str, Any]:
        arrays = self._equivalents.distinct_arrays(schema) if schema.get("uniqueItems") is True else None
        if arrays is not None:
            schema = {key: value for key, value in schema.items() if key not in _REPLACED_BY_ARRAYS}
        written: dict[str, Any] = {}
        more = [] if arrays is None else [self._any(arrays, path)]  # schemas that hold as well
        for keyword, value in schema.items():
            if keyword == "additionalItems" and not isinstance(schema.get("items"), list):
                continue  # as in draft 7, the standard that has it
            try:
                if keyword in _IMPLEMENTED:
                    written[keyword] = self._keyword(keyword, value, f"{path}/{keyword}")
                elif keyword in NOT_IMPLEMENTED and not _is_neutral(keyword, schema):
                    more += self._equivalent(keyword, schema, path)
            except SchemaError:
                self._tolerate()
        if not _LIMITING.isdisjoint(written):
            try:
                _narrow_bounds(written, path)
                more += _with_beginnings(written)
            except SchemaError:
                self._tolerate()
                for keyword in _BOUNDS:
                    written.pop(keyword, None)
        if "pattern" in written or "format" in written:
            more += self._strings(written, path)
        alternatives = schema.get("oneOf")
        if isinstance(alternatives, list) and (not self._is_strict or self._equivalents.are_disjoint(alternatives)):
            options = written.pop("oneOf")
            # allOf would intersect the alternatives, which llguidance cannot do with recursive references
            more += [{"anyOf": options}] if "anyOf" in written else []
            written.setdefault("anyOf", options)
        if not self._is_strict:
            _remove_counts(written)
        if "propertyNames" in schema or "patternProperties" in written:
            try:
                self._name_properties(written, schema, path)
            except SchemaError:
                self._tolerate()
        if more and isinstance(written.setdefault("allOf", []), list):
            written["allOf"] = [*written["allOf"], *more]
        return written

    def _tolerate(self) -> None:
        """Raises the SchemaError that is handled if the schema is strict."""
        if self._is_strict:
            raise

    def _equivalent(self, keyword: str, schema: Schema, path: str) -> list[Any]:
        """Schemas that stand for a keyword that llguidance does not implement. Raises SchemaError."""
        value, found = schema[keyword], None
        match keyword:
            case "if":
                found = self._equivalents.conditional(schema)
            case "then" | "else":
                return []
            case "not":
                found = self._equivalents.negated(value)
            case "dependentRequired" | "dependentSchemas" | "dependencies":
                found = self._equivalents.dependent(value)
            case "propertyNames" if self._equivalents.names(value) is not None:
                return []
        if found is None:
            raise SchemaError(f"contains {keyword} at {path[:_MAX_PATH_CHARS]}, which is not implemented")
        return [self._any(found, f"{path}/{keyword}")]

    def _strings(self, written: dict[str, Any], path: str) -> list[Any]:
        """Translates `pattern` and `format`. Returns schemas that hold as well."""
        patterns: list[str] = []
        pattern, format_ = written.get("pattern"), written.get("format")
        if isinstance(pattern, str):
            del written["pattern"]
            try:
                patterns += self._patterns(pattern, f"{path}/pattern")
            except SchemaError:
                self._tolerate()
        if isinstance(format_, str):
            del written["format"]
            if format_ in FORMATS:
                patterns += _anchored(translate_pattern(FORMATS[format_]))
        if patterns:
            written["pattern"] = patterns[0]
        return [{"pattern": other} for other in patterns[1:]]

    def _patterns(self, pattern: str, path: str) -> list[str]:
        """Patterns for llguidance, all of which must match. Raises SchemaError."""
        self._count_work(len(pattern))
        try:
            translation = translate_pattern(pattern)
        except PatternError as error:
            self._pattern_work += _FAILED_PATTERN_WORK
            raise SchemaError(f"contains a pattern at {path[:_MAX_PATH_CHARS]} that {error}") from None
        self._count_work(translation.num_steps)
        return _anchored(translation)

    def _count_work(self, work: int) -> None:
        self._pattern_work += work
        if self._pattern_work > _MAX_PATTERN_WORK:
            raise SchemaError("contains patterns that are too long or need too much work")

    def _name_properties(self, written: dict[str, Any], schema: Schema, path: str) -> None:
        """Makes patternProperties such that no two match the same name, and all names match `propertyNames`.

        Raises SchemaError."""
        names = self._equivalents.names(schema.get("propertyNames", True)) or []  # patterns that all names match
        given = written.get("patternProperties", {})
        if not isinstance(given, Mapping) or not (given or names):
            return
        written.pop("patternProperties", None)
        additional = written.get("additionalProperties", True)
        listed = self._equivalents.enumerated_names(schema.get("propertyNames"))
        languages = Languages()
        try:
            self._count_work(sum(map(len, [*given, *names])))
            allowed = languages.both(*(read_pattern(languages, pattern) for pattern in names))
            named = [(languages.both(read_pattern(languages, name), allowed), entry) for name, entry in given.items()]
            properties = written.get("properties", {})
            properties = properties if isinstance(properties, Mapping) else {}
            refused = [name for name in properties if names and not languages.contains(allowed, name)]
            if refused:
                written["properties"] = {**properties, **dict.fromkeys(refused, False)}
            if names:
                written["additionalProperties"] = False
            if names and listed is not None and not given and not _counts_properties(written):
                written["properties"] = {
                    **dict.fromkeys(listed, additional),
                    **properties,
                    **dict.fromkeys(refused, False),
                }
                return
            parts = [(term, [entry]) for term, entry in named]  # names, and the schemas that all hold for them
            if not all(
                languages.is_nothing(languages.both(one, other)) for (one, _), (other, _) in combinations(named, 2)
            ):
                parts = _divided(languages, named)
            if names and additional is not False:
                others = (languages.complement(term) for term, _ in named)
                parts.append((languages.both(allowed, *others), [additional]))
            written["patternProperties"] = {
                f"^(?:{write_rust(languages.plain(term))})$": entries[0] if len(entries) == 1 else {"allOf": entries}
                for term, entries in parts
                if term is not languages.nothing
            }
            self._count_work(languages.num_steps)
        except (PatternError, LanguageError) as error:
            self._pattern_work += _FAILED_PATTERN_WORK + languages.num_steps
            written.pop("additionalProperties", None)  # which depends on the patterns
            place = "propertyNames" if names else "patternProperties"
            is_alone = len(given) + len(names) == 1
            reason = f"a pattern that {error}" if is_alone else f"patterns of which one or an overlap {error}"
            raise SchemaError(f"contains {reason} at {path[:_MAX_PATH_CHARS]}/{place}") from None
        except SchemaError:
            written.pop("additionalProperties", None)
            raise

    def _keyword(self, keyword: str, value: Any, path: str) -> Any:
        if keyword in _DEFINITIONS and path.count("/") == 1 and isinstance(value, Mapping):
            return {name: self._defined(entry, f"{path}/{name}") for name, entry in value.items()}
        if keyword in (*_SCHEMA_MAPS, *_DEFINITIONS) and isinstance(value, Mapping):
            return {name: self._any(entry, f"{path}/{name}") for name, entry in value.items()}
        if keyword in _SCHEMA_LISTS and isinstance(value, list):
            return [self._any(entry, f"{path}/{index}") for index, entry in enumerate(value)]
        if keyword in _SCHEMAS:
            return self._any(value, path)
        if keyword in ("const", "enum"):
            for number in _numbers_in(value):
                _check_literal(number, path)
        if keyword == "multipleOf" and is_number(value) and value > 0:
            self._add_multiple(value, path)
        if keyword == "$ref" and isinstance(value, str):
            value = self._reference(value)
            self._references.setdefault(self._definition, []).append(value)
        return value

    def _reference(self, reference: str) -> str:
        """A reference to a definition in place of one to any other part of the schema, which may not remain there."""
        parts = reference.split("/")
        is_definition = len(parts) == 3 and parts[1] in _DEFINITIONS
        is_definition = is_definition or not isinstance(self._schema.get("$defs", {}), Mapping)
        if parts[0] != "#" or len(parts) == 1 or is_definition or self._equivalents.resolved(reference) is None:
            return reference
        if reference not in self._moved:
            names = (f"part-{number}" for number in count(1))
            taken = self._schema.get("$defs", {})
            self._moved[reference] = next(name for name in names if name not in (*taken, *self._moved.values()))
        return f"#/$defs/{self._moved[reference]}"

    def _add_multiple(self, number: int | float, path: str) -> None:
        """Raises SchemaError if llguidance cannot read a value of multipleOf, or its 32-bit arithmetic might overflow
        where several meet."""
        multiple = Decimal(str(number))
        if multiple in self._multiples:
            return
        if number > _MAX_MULTIPLE:
            raise SchemaError(f"contains the number {number} at {path[:_MAX_PATH_CHARS]}: more than 2^32 - 1")
        if _digits_as_read(number) > _MAX_MULTIPLE:
            raise SchemaError(f"contains the number {number} at {path[:_MAX_PATH_CHARS]}: it has too many digits")
        digits = -min(int(value.normalize().as_tuple().exponent) for value in (multiple, self._common, Decimal(1)))
        first, second = int(self._common.scaleb(digits)), int(multiple.scaleb(digits))
        if first * second > _MAX_MULTIPLE:
            raise SchemaError(
                f"contains the number {multiple} at {path[:_MAX_PATH_CHARS]}: with the other values of multipleOf, "
                "it is too large"
            )
        self._multiples.add(multiple)
        self._common = Decimal(math.lcm(first, second) if first else second).scaleb(-digits)

    def _defined(self, schema: Any, path: str) -> Any:
        self._definition = path
        try:
            return self._any(schema, path)
        except SchemaError as error:
            self._errors[path] = error
            return schema
        finally:
            self._definition = ""


def _anchored(translation: Translation) -> list[str]:
    return [f"^(?:{expression})$" for expression in translation.expressions]


def _counts_properties(schema: Schema) -> bool:
    return "minProperties" in schema or "maxProperties" in schema


def _remove_counts(schema: dict[str, Any]) -> None:
    """Removes limits on the number of properties, of which llguidance implements few if there are optional ones."""
    properties, required = schema.get("properties"), schema.get("required", [])
    fewest, most = schema.get("minProperties", 0), schema.get("maxProperties", 0)
    if not (isinstance(properties, Mapping) and isinstance(required, list) and is_number(fewest) and is_number(most)):
        return
    if _counts_properties(schema) and any(name not in required for name in properties):
        num_more = schema.get("maxProperties", len(required) + 1) - len(required)
        is_about_one = fewest - len(required) <= 1 and num_more == 1
        if not is_about_one or schema.get("additionalProperties") is not False or schema.get("patternProperties"):
            schema.pop("minProperties", None)
            schema.pop("maxProperties", None)


def _divided(languages: Languages, named: list[tuple[Term, Any]]) -> list[tuple[Term, list[Any]]]:
    """Disjoint sets of names, and the schemas that hold for them. named: names that may overlap, and their schema.

    Raises LanguageError."""
    parts: list[tuple[Term, list[Any]]] = []
    rest = languages.any_text  # names that belong to no part
    for names, schema in named:
        others = languages.complement(names)
        divided = [(languages.both(rest, names), [schema])]
        for part, schemas in parts:
            divided += [(languages.both(part, names), [*schemas, schema]), (languages.both(part, others), schemas)]
        rest = languages.both(rest, others)
        parts = [(part, schemas) for part, schemas in divided if not languages.is_nothing(part)]
        if len(parts) > _MAX_PARTS:
            raise LanguageError(f"has more than {_MAX_PARTS} parts")
    return parts


def _numbers_in(value: Any) -> Iterator[int | float]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    elif isinstance(value, Mapping | list):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers_in(entry)


def _check_literal(number: int | float, path: str) -> None:
    """Raises SchemaError if llguidance would write another number."""
    if isinstance(number, float) and _as_read(number) != number:
        raise SchemaError(
            f"contains the number {number} at {path[:_MAX_PATH_CHARS]}: it has too many digits to be written exactly"
        )
    if abs(number) <= _MAX_EXACT or number == _MAX_INTEGER:
        return
    if isinstance(number, float) or abs(number) > _MAX_INTEGER or int(float(number)) != number:
        raise SchemaError(
            f"contains the number {number} at {path[:_MAX_PATH_CHARS]}: beyond 2^53, not every number is supported"
        )


def _narrow_bounds(schema: dict[str, Any], path: str) -> None:
    """Make the bounds of one schema such that llguidance can follow them. At most the outermost values are lost."""
    for keyword in ("maxLength", "maxItems", "maxProperties"):
        if is_number(schema.get(keyword)) and schema[keyword] >= _MAX_LENGTH:
            del schema[keyword]
    for keyword in _COUNTS:
        if isinstance(schema.get(keyword), float) and schema[keyword].is_integer():
            schema[keyword] = int(schema[keyword])
    types = schema.get("type")
    is_integer = types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types)
    highest, lowest = (_MAX_INTEGER, _MIN_INTEGER) if is_integer else (_MAX_FLOAT_BOUND, -_MAX_FLOAT_BOUND)
    given = [(keyword, schema[keyword]) for keyword in _BOUNDS if is_number(schema.get(keyword))]
    wide = [(keyword, bound) for keyword, bound in given if abs(bound) > _MAX_EXACT]
    for keyword, bound in wide:
        del schema[keyword]
        is_upper, is_exclusive = keyword in _BOUNDS[:2], keyword.startswith("exclusive")
        if is_upper:
            narrowed = _largest_within(bound, is_exclusive, is_integer, highest)
            schema["maximum"] = min(narrowed, schema["maximum"]) if is_number(schema.get("maximum")) else narrowed
        else:
            narrowed = -_largest_within(-bound, is_exclusive, is_integer, -lowest)
            schema["minimum"] = max(narrowed, schema["minimum"]) if is_number(schema.get("minimum")) else narrowed
    low = schema["minimum"] if is_number(schema.get("minimum")) else lowest
    high = schema["maximum"] if is_number(schema.get("maximum")) else highest
    if wide and not lowest <= low <= high <= highest:
        numbers = " and ".join(f"{number} ({name})" for name, number in given)
        raise SchemaError(
            f"contains the bounds {numbers} at {path[:_MAX_PATH_CHARS]}: no supported number is within them"
        )
    if low >= 10**18:  # without the other bound, llguidance fails
        schema.setdefault("maximum", highest)
    if high <= -(10**18):
        schema.setdefault("minimum", lowest)
    _mend_ends(schema, is_integer)


def _mend_ends(schema: dict[str, Any], is_integer: bool) -> None:
    """Make the ends of a range of numbers such that llguidance follows them.

    It reads some numbers inexactly, and allows n in n < x <= m unless there is an integer in between; m may come from
    another schema. Such an end is replaced by an included number next to it, with at most _MAX_DIGITS digits.
    """
    for keyword, exclusive, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        end = _end(schema, keyword, exclusive, sign)
        if end is None:
            continue
        bound, is_excluded = end
        is_open = is_excluded and not is_integer and bound >= 0 and float(bound).is_integer()
        if is_open or (isinstance(bound, float) and _as_read(bound) != bound):
            schema.pop(exclusive, None)
            schema[keyword] = sign * _shortened(bound, is_excluded)


def _end(schema: Schema, keyword: str, exclusive: str, sign: int) -> tuple[int | float, bool] | None:
    """One end of the range: bound times sign, so that it is a lower bound, and whether it is excluded."""
    included, excluded = schema.get(keyword), schema.get(exclusive)
    if excluded is True:  # draft 4
        excluded = included
    ends = [(sign * included, False)] if is_number(included) else []
    if is_number(excluded):
        ends.append((sign * excluded, True))
    return max(ends, default=None)


def _shortened(bound: int | float, is_excluded: bool) -> int | float:
    """The least number above a lower bound, or at it, with few digits, so that llguidance reads it exactly."""
    context = Context(prec=_MAX_DIGITS, rounding=ROUND_CEILING)
    exact = Decimal(repr(bound))
    value = context.plus(exact)
    if is_excluded and value == exact:
        value = context.next_plus(value)
    if -int(value.as_tuple().exponent) > _MAX_PLACES:
        value = value.quantize(Decimal(1).scaleb(-_MAX_PLACES), ROUND_CEILING)
    return float(value) or 0  # not -0.0


def _digits_as_read(multiple: int | float) -> int:
    """The digits of a value of multipleOf as llguidance finds them: it multiplies a float64 by 10 until it is whole."""
    number = float(multiple)
    while not number.is_integer():
        number *= 10
    return int(number)


def _with_beginnings(schema: dict[str, Any]) -> list[Any]:
    """Takes the bounds out of the schema of a number. Returns one with these and the numbers that llguidance loses.

    After the first digits of a bound, it demands further ones: with the maximum 0.95, it allows 0.90, but not 0.9.
    """
    types = [schema.get("type")] if isinstance(schema.get("type"), str) else schema.get("type")
    ends = [_end(schema, "minimum", "exclusiveMinimum", 1), _end(schema, "maximum", "exclusiveMaximum", -1)]
    if not isinstance(types, list) or "number" not in types:
        return []
    lost: dict[float, None] = {}
    for end, sign in zip(ends, (1, -1), strict=True):
        bound = Decimal(repr(sign * end[0])) if end is not None and end[0] < 0 else Decimal(0)
        for places in range(1, min(-int(bound.as_tuple().exponent), _MAX_BEGINNING)):
            number = float(bound.quantize(Decimal(1).scaleb(-places), ROUND_DOWN))
            if not number.is_integer() and number != bound and _is_within(number, *ends):
                lost[number] = None
    if not lost:
        return []
    bounds = {keyword: schema.pop(keyword) for keyword in _BOUNDS if keyword in schema}
    others = [name for name in types if name not in ("number", "integer")]
    more = [{"type": others}] if others else []
    return [{"anyOf": [*more, {"type": "number", **bounds}, *({"const": number} for number in lost)]}]


def _is_within(number: float, low: tuple[int | float, bool] | None, high: tuple[int | float, bool] | None) -> bool:
    """low, high: from `_end`."""
    return all(
        end is None or end[0] < value or (end[0] == value and not end[1])
        for end, value in ((low, number), (high, -number))
    )


def _as_read(number: float) -> float:
    """What llguidance reads for a JSON number: its digits as an integer, multiplied or divided by a power of ten.

    It calculates in float64, where some numbers of 16 digits or more become others, such as 0.9999999999999999."""
    sign, digits, exponent = Decimal(repr(number)).as_tuple()
    read = float("".join(map(str, digits)))
    read = read * 10.0 ** int(exponent) if int(exponent) >= 0 else read / float(f"1e{-int(exponent)}")
    return -read if sign else read


def _largest_within(bound: int | float, is_exclusive: bool, is_integer: bool, highest: int) -> int:
    """The largest integer, at most `highest`, that is within an upper bound and that llguidance reads as it is written.

    A float stands for all numbers that are rounded to it, so it counts as exclusive."""
    is_exclusive = is_exclusive or isinstance(bound, float)
    if bound > highest or (bound == highest and not is_exclusive):
        return highest
    if bound < -_MAX_INTEGER:
        return int(bound)  # beyond all that is supported: far from 0, few float64 have a short decimal form
    number = float(bound)
    while True:
        value = int(number)
        # llguidance has float64 bounds; for numbers with fractions, it uses their shortest decimal form
        if (value < bound or (value == bound and not is_exclusive)) and (is_integer or Decimal(repr(number)) == value):
            return value
        number = math.nextafter(number, -math.inf)
