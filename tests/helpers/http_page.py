"""docs/http.md: every route with its fields, made from /openapi.json and from the routes that it leaves out."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastapi.routing import APIRoute

from tokasaurus.server.app import ROLLOUT_ROUTES, SERVED_ROUTES
from tokasaurus.server.openapi import DescribedApp
from tokasaurus.server.protocol.known_fields import KNOWN_FIELDS

PATH = Path(__file__).parents[2] / "docs" / "http.md"

INTRODUCTION = """\
# Routes and objects

`make reference` makes this page from the server's routes, as `GET /openapi.json` describes them; a test compares the
two. [The HTTP API](api.md) says what the fields mean together.

A field is `name`: type = default; meaning. In a body, a field with a question mark may be left out or null, which means
the default, or else null. In an answer, such a field is left out only if it has no default. "any" is any JSON value.
`"a"|"b"` are the texts that are possible, `string[]` is a list, `[≥1,≤16]` limits its entries, `(≥1)` the characters
of a string. Fields after "Neutral" are accepted only at values without effect. Objects that have a name are
described [at the end](#objects).

Numbers after an answer are errors. Besides them, each route may answer 500, one that needs a key 401, one that changes
something 403, and one that reads a JSON body 400, 413 and 415: [errors](api.md#errors).
"""
NOT_DESCRIBED = """\
`/openapi.json` leaves these out, since they answer with pages for people:
"""
GENERATION = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_JSON = "application/json"
_ERRORS = ("ErrorResponse", "MessagesError")
LARGEST_BOUND = 2**53
"""Bounds beyond it are those of 64 bits, and rounded in JSON."""

GENERATION_TEXT = """\
These fields are the same in the bodies of completions, chats, responses and messages:
"""
MAX_INLINE_FIELDS = 3
"""Fields of an object that is written out where it is used."""

MIN_OF_OTHERS = 40
"""Fields of other servers that only the bodies of generation have; a page of their own lists them."""

MIN_SAME_FIELDS = 4
"""Fields in common with a part above from which a part refers to it instead of repeating them."""

Schema = Mapping[str, Any]


class Field(NamedTuple):
    name: str
    type: str
    """In words, with limits."""

    default: str
    """In JSON; "required", or "" for null."""

    meaning: str

    @property
    def values(self) -> str:
        """What it may be, its default, and its meaning."""
        value = f" = {self.default}" if self.default not in ("required", "") else ""
        parts = [f"{self.type}{value}" if self.type != self.default else self.type, self.meaning]
        return "; ".join(part for part in parts if part)

    @property
    def marked(self) -> str:
        return f"`{self.name}`" if self.default == "required" else f"`{self.name}?`"

    def told_by(self, others: Iterable[Field]) -> Field | None:
        """The one of the others that takes the same values, if any."""
        return next((other for other in others if other[:3] == self[:3]), None)


class Part(NamedTuple):
    """A part of the page with fields, which later parts may refer to."""

    link: str

    fields: list[Field]
    """Those that it tells itself."""

    all_fields: list[Field]
    neutral: list[str]
    """Names of fields that are accepted at values without effect only."""


class Described(NamedTuple):
    """What the docstring of an object says."""

    text: str
    meanings: dict[str, str]
    """Name of a field → its meaning."""

    notes: list[str]
    """Further paragraphs."""


def page() -> str:
    """The whole page."""
    app = DescribedApp(title="Tokasaurus", version="any")
    described = [route for module in (*SERVED_ROUTES, *ROLLOUT_ROUTES) for route in module.router.routes]
    app.router.routes = [*app.router.routes, *described]
    return _Page(app.openapi(), [route for route in described if isinstance(route, APIRoute)]).text()


class _Page:
    """openapi: the content of /openapi.json. routes: all of them."""

    def __init__(self, openapi: Schema, routes: Sequence[APIRoute]) -> None:
        self._paths: Schema = openapi["paths"]
        self._schemas: Schema = openapi["components"]["schemas"]
        self._hidden = [route for route in routes if not route.include_in_schema]
        self._used: list[str] = []
        """Names of objects that the text mentions."""
        self._uses = Counter(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(openapi)))
        """Name of an object → how often schemas refer to it."""
        bodies = [self._fields(self._body(path), {}) for path in GENERATION]
        shared = [field for field in bodies[0] if all(field in body for body in bodies[1:])]
        self._parts = [Part("[generation](#generation)", shared, shared, [])]
        """What is told so far; the first has the fields that are the same in all bodies of GENERATION."""

    def text(self) -> str:
        parts = [INTRODUCTION]
        by_tag: dict[str, dict[str, list[str]]] = {}
        """Tag → what is said of routes → those routes."""
        for path, operations in self._paths.items():
            for method, operation in operations.items():
                heading = f"{method.upper()} {path}"
                text = self._route(method.upper(), heading, operation)
                by_tag.setdefault(operation["tags"][0], {}).setdefault(text, []).append(heading)
        for tag, routes in by_tag.items():
            parts.append(f"## {tag.capitalize()}\n")
            if tag == "generation":
                parts.append(GENERATION_TEXT)
                parts.append(_list(self._parts[0].fields))
            if tag == "roll-outs":
                parts.append("Served with `rl=T`: [roll-outs](rl.md).\n")
            parts += [f"### {', '.join(headings)}\n\n{text}" for text, headings in routes.items()]
        parts += ["## Pages\n", NOT_DESCRIBED, "\n".join(self._hidden_lines()) + "\n"]
        parts += ["## Objects\n", *self._objects()]
        return "\n".join(parts).rstrip("\n") + "\n"

    def _hidden_lines(self) -> Iterator[str]:
        for route in self._hidden:
            assert route.description, f"{route.path} has no docstring"
            names = ", ".join(f"`{method} {route.path}`" for method in sorted(route.methods or ()))
            yield f"- {names}: {_flow(route.description)}"
        yield "- `GET /openapi.json`: what this page is made from."

    def _route(self, method: str, heading: str, operation: Schema) -> str:
        description = operation.get("description")
        assert description, f"{heading} has no docstring"
        queries = [one for one in operation.get("parameters", ()) if one["in"] == "query"]
        described = _described(description, [one["name"] for one in queries])
        parts = [described.text + "\n"]
        if queries:
            parts.append("Query:\n")
            parts.append(
                _list(
                    Field(
                        one["name"],
                        self._type(one["schema"], shows_null=False),
                        _default(one["schema"], one.get("required", False)),
                        described.meanings.get(one["name"], ""),
                    )
                    for one in queries
                )
            )
        parts += [f"{note}\n" for note in described.notes]
        if "requestBody" in operation:
            parts += self._described_body(heading, operation)
        parts.append(self._answers(method, operation) + "\n")
        return "\n".join(parts)

    def _described_body(self, heading: str, operation: Schema) -> Iterator[str]:
        ((kind, content),) = operation["requestBody"]["content"].items()
        schema = self._resolved(content["schema"])
        if schema.get("type") == "string":
            yield f"The body (`{kind}`): {schema['description']}\n"
            return
        if kind != _JSON:
            yield f"The body is a form (`{kind}`):\n"
        elif not self._fields(schema, {}):
            yield "The body may be `{}`.\n"
        yield from self._with_fields(f"[{heading}](#{_anchor(heading)})", schema)

    def _with_fields(self, link: str, schema: Schema) -> Iterator[str]:
        """Of a body or an object: what it is, its fields, and which fields another part tells."""
        described = _described(schema.get("description", ""), schema["properties"])
        if described.text:
            yield described.text + "\n"
        fields = self._fields(schema, described.meanings)
        neutral = [name for name, field in schema["properties"].items() if _is_neutral(field)]
        further = neutral
        own = fields
        lines: list[str] = []
        whole = [part for part in self._parts if all(field.told_by(fields) for field in part.all_fields)]
        for part in sorted(whole, key=lambda part: len(part.all_fields), reverse=True):
            same = {field: told for field in own if (told := field.told_by(part.all_fields)) is not None}
            if len(same) >= MIN_SAME_FIELDS:
                own = [field for field in own if field not in same]
                further = [name for name in further if name not in part.neutral]
                yield f"All of {part.link}.\n"
                lines += _other_meanings(same)
        for part in sorted(self._parts, key=lambda part: sum(field.told_by(part.fields) is not None for field in own))[
            ::-1
        ]:
            same = {field: told for field in own if (told := field.told_by(part.fields)) is not None}
            if len(same) >= MIN_SAME_FIELDS:
                own = [field for field in own if field not in same]
                others = [field for field in part.fields if field.told_by(same) is None]
                if len(others) < len(same):
                    besides = ",".join(field.marked for field in others)
                    yield f"All listed at {part.link}{f' but {besides}' if besides else ''}.\n"
                else:
                    yield f"As in {part.link}: {','.join(field.marked for field in same)}.\n"
                lines += _other_meanings(same)
        lines += _lines(own)
        if lines:
            yield "\n".join(lines) + "\n"
        self._parts.append(Part(link, own, fields, neutral))
        yield from (f"{note}\n" for note in described.notes)
        listed = [name for name in further if name in KNOWN_FIELDS and KNOWN_FIELDS[name].is_neutral_only]
        names = [f"`{name}`" for name in further if name not in listed or len(listed) < MIN_OF_OTHERS]
        if len(listed) >= MIN_OF_OTHERS:
            names.insert(0, "[fields of other servers](fields.md#accepted-at-neutral-values)")
        if names:
            yield f"Neutral: {','.join(names)}.\n"

    def _answers(self, method: str, operation: Schema) -> str:
        responses = operation["responses"]
        content = responses["200"].get("content", {})
        kinds = []
        for kind, one in content.items():
            schema = one["schema"]
            if kind != _JSON and "$ref" in schema:
                kinds.append(f"`{kind}` of {self._type(schema)}")
            elif kind != _JSON:
                kinds.append(f"`{kind}`" + (f" ({_as_note(schema['description'])})" if "description" in schema else ""))
            else:
                kinds.append(self._type(schema) if schema else "a JSON object")
        expected = {"200", "500", "401"} | ({"403"} if method != "GET" else set())
        if _JSON in operation.get("requestBody", {}).get("content", ()):
            expected |= {"400", "413", "415"}
        further = sorted(responses.keys() - expected)
        missing = sorted(expected - responses.keys())
        return (
            f"Answers {' or '.join(kinds)}"
            + (f"; {','.join(further)}" if further else "")
            + (f"; never {', '.join(missing)}" if missing else "")
            + "."
        )

    def _objects(self) -> Iterator[str]:
        """Each object that the text mentions, or that one of these mentions, by their names."""
        parts = {name: self._object(name) for name in self._mentioned()}
        yield from (parts[name] for name in sorted(parts))

    def _mentioned(self) -> Iterator[str]:
        yield from self._used  # which grows meanwhile

    def _object(self, name: str) -> str:
        return "\n".join([f"### {name}\n", *self._with_fields(f"[{name}](#{name.lower()})", self._schemas[name])])

    def _fields(self, schema: Schema, meanings: Mapping[str, str]) -> list[Field]:
        """All fields but those that are accepted at values without effect only."""
        required = schema.get("required", ())
        return [
            Field(
                name,
                self._type(field, name in required),
                _default(field, name in required),
                meanings.get(name, ""),
            )
            for name, field in schema["properties"].items()
            if not _is_neutral(field)
        ]

    def _body(self, path: str) -> Schema:
        return self._resolved(self._paths[path]["post"]["requestBody"]["content"][_JSON]["schema"])

    def _resolved(self, schema: Schema) -> Schema:
        return self._schemas[_name(schema)] if "$ref" in schema else schema

    def _type(self, schema: Schema, shows_null: bool = True) -> str:
        """In words. shows_null: of a field without a default; others may always be null."""
        if "$ref" in schema:
            return self._object_type(_name(schema))
        alternatives = schema.get("anyOf") or schema.get("oneOf")
        if alternatives:
            with_null = any(one.get("type") == "null" for one in alternatives)
            rest = [self._type(one, shows_null) for one in alternatives if one.get("type") != "null"]
            return "|".join(dict.fromkeys([*rest, *(["null"] if with_null and shows_null else [])]))
        if "const" in schema or "enum" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            return f"`{'|'.join(json.dumps(value) for value in values if shows_null or value is not None)}`"
        kind = str(schema.get("type", "any"))
        if kind == "array":
            entry = self._type(schema.get("items", {}))
            return (f"({entry})" if {" ", "|", "{"} & set(entry) else entry) + f"[{_limits(schema, 'Items')}]"
        if kind == "object":
            extra = schema.get("additionalProperties")
            return f"object of {self._type(extra)}" if isinstance(extra, dict) and extra else "object"
        if kind == "string":
            pattern = f" that matches `{schema['pattern']}`" if "pattern" in schema else ""
            word = "bytes" if schema.get("format") == "binary" else "string"
            limits = _limits(schema, "Length")
            return word + (f"({limits})" if limits else "") + pattern
        signs = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        bounds = [f"{sign}{schema[key]:.12g}" for key, sign in signs if abs(schema.get(key, math.inf)) < LARGEST_BOUND]
        return kind + ",".join(bounds)

    def _object_type(self, name: str) -> str:
        """A link to the object; a small one that is used once, and about which there is no more to say, itself."""
        schema = self._schemas[name]
        fields = schema["properties"]
        is_small = self._uses[name] == 1 and len(fields) <= MAX_INLINE_FIELDS
        if is_small and "description" not in schema and not any(map(_is_neutral, fields.values())):
            inner = self._fields(schema, {})
            return f"{{{', '.join(f'{field.marked}: {field.values}' for field in inner)}}}"
        if name not in self._used:
            self._used.append(name)
        return f"[{name}](#{name.lower()})"


def _name(schema: Schema) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _is_neutral(field: Schema) -> bool:
    """Accepted at values without effect only."""
    description = str(field.get("description", ""))
    return description.startswith("Not implemented: only") or field.get("type") == "null"


def _limits(schema: Schema, of: str) -> str:
    """Of a list's entries or of a text's characters."""
    limits = [f"≥{schema[f'min{of}']}"] if schema.get(f"min{of}") else []
    return ",".join(limits + ([f"≤{schema[f'max{of}']}"] if f"max{of}" in schema else []))


def _default(field: Schema, is_required: bool) -> str:
    if is_required:
        return "required"
    default = field.get("default")
    if default == [] and "object" in [one.get("type") for one in field.get("anyOf", ())]:
        default = {}  # an object that is kept as pairs
    return "" if default is None else f"`{json.dumps(default)}`"


def _as_note(text: str) -> str:
    return text[0].lower() + text[1:].rstrip(".")


def _flow(text: str) -> str:
    return " ".join(text.split())


def _anchor(heading: str) -> str:
    """As links to a heading name it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _described(docstring: str, names: Iterable[str]) -> Described:
    """A docstring, whose sentences `name: meaning` tell of one of the names."""
    text = "\n\n".join(map(_flow, docstring.split("\n\n")))
    one = "|".join(map(re.escape, names)) or "(?!)"
    # (text before the first name), (names, what is in parentheses, text up to the next name), …
    first, *others = re.split(rf"(?:^|(?<=\. )|(?<=\n))((?:{one})(?:, (?:{one}))*)((?: \([^)]*\))?): ", text)
    meanings, notes = {}, []
    for of, note, meaning in zip(others[::3], others[1::3], others[2::3], strict=True):
        of_name, _, after = meaning.strip().partition("\n\n")
        for name in of.split(", "):
            meanings[name] = f"{note.strip(' ()')}: {of_name}" if note else of_name
        notes += [after] if after else []
    return Described(first.strip(), meanings, notes)


def _other_meanings(fields: Mapping[Field, Field]) -> list[str]:
    """A line for each field that means something else than the one that tells the same of it otherwise."""
    return [
        f"- {field.marked}: {field.meaning}"
        for field, told in fields.items()
        if field.meaning not in ("", told.meaning)
    ]


def _lines(fields: Iterable[Field]) -> list[str]:
    """A line for each, or for several of which the same is told; those without a meaning are in one."""
    marked: dict[bool, dict[str, list[str]]] = {False: {}, True: {}}
    for field in fields:
        marked[field.meaning != ""].setdefault(field.values, []).append(field.marked)
    plain, told = ([f"{','.join(names)}: {values}" for values, names in each.items()] for each in marked.values())
    return [f"- {each}" for each in (["; ".join(plain)] if plain else []) + told]


def _list(fields: Iterable[Field]) -> str:
    return "\n".join(_lines(fields)) + "\n"
