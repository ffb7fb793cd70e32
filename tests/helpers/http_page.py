"""docs/http.md: every route with its fields, made from /openapi.json and from the routes that it leaves out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi.routing import APIRoute

from tokasaurus.server.app import ROLLOUT_ROUTES, SERVED_ROUTES
from tokasaurus.server.openapi import DescribedApp

PATH = Path(__file__).parents[2] / "docs" / "http.md"

INTRODUCTION = """\
# Routes and objects

`make reference` makes this page from the server's routes, as `GET /openapi.json` describes them; a test compares the
two. [The HTTP API](api.md) says what the fields mean together, what their limits are, and when each error is answered.

In a body, a field with a default may also be null, which means the default; in an answer, a field that is "required"
is always there. "any" is any JSON value. Objects that have a name are described [at the end](#objects).
"""
NOT_DESCRIBED = """\
`/openapi.json` leaves these out, since they answer with pages for people:
"""
GENERATION = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
HEAD = ("field", "type", "default")
_JSON = "application/json"
_ERRORS = ("ErrorResponse", "MessagesError")
LARGEST_BOUND = 2**53
"""Bounds beyond it are those of 64 bits, and rounded in JSON."""

Schema = Mapping[str, Any]


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
        bodies = [self._fields(self._body(path)) for path in GENERATION]
        self._shared = [row for row in bodies[0] if all(row in body for body in bodies[1:])]
        """Rows of the fields that are the same in all bodies of GENERATION."""

    def text(self) -> str:
        parts = [INTRODUCTION]
        by_tag: dict[str, list[str]] = {}
        for path, operations in self._paths.items():
            for method, operation in operations.items():
                by_tag.setdefault(operation["tags"][0], []).append(self._route(method.upper(), path, operation))
        for tag, routes in by_tag.items():
            parts.append(f"## {tag.capitalize()}\n")
            if tag == "generation":
                parts.append("These fields are the same in the bodies of completions, chats, responses and messages:\n")
                parts.append(_table(HEAD, self._shared))
            if tag == "roll-outs":
                parts.append("Served with `rl=T`: [roll-outs](rl.md).\n")
            parts += routes
        parts += ["## Pages\n", NOT_DESCRIBED, _table(("route", "what it answers"), self._hidden_rows())]
        parts += ["## Objects\n", *self._objects()]
        return "\n".join(parts).rstrip("\n") + "\n"

    def _hidden_rows(self) -> Iterator[tuple[str, ...]]:
        for route in self._hidden:
            assert route.description, f"{route.path} has no docstring"
            yield (
                f"`{'`, `'.join(f'{method} {route.path}' for method in sorted(route.methods or ()))}`",
                _flow(route.description),
            )
        yield "`GET /openapi.json`", "What this page is made from."

    def _route(self, method: str, path: str, operation: Schema) -> str:
        description = operation.get("description")
        assert description, f"{method} {path} has no docstring"
        parts = [f"### {method} {path}\n", _flow(description) + "\n"]
        rows = [
            (f"`{one['name']}`", self._type(one["schema"]), _default(one["schema"], one.get("required", False)))
            for one in operation.get("parameters", ())
            if one["in"] == "query"
        ]
        if rows:
            parts.append(_table(("in the query", "type", "default"), rows))
        if "requestBody" in operation:
            parts += self._described_body(operation)
        answers = self._answers(operation["responses"])
        parts.append(f"Answers: {answers}.\n")
        return "\n".join(parts)

    def _described_body(self, operation: Schema) -> Iterator[str]:
        ((kind, content),) = operation["requestBody"]["content"].items()
        schema = self._resolved(content["schema"])
        if schema.get("type") == "string":
            yield f"The body (`{kind}`): {schema['description']}\n"
            return
        if "description" in schema:
            yield _meanings(schema)
        rows = self._fields(schema)
        neutral = [name for name, field in schema["properties"].items() if _is_neutral(field)]
        if set(self._shared) <= set(rows):
            rows = [row for row in rows if row not in self._shared]
            yield "The body has [the shared fields](#generation) and:\n"
        elif kind != _JSON:
            yield f"The body is a form (`{kind}`):\n"
        elif not rows:
            yield "The body may be `{}`.\n"
        if rows:
            yield _table(HEAD, rows)
        if neutral:
            names = ", ".join(f"`{name}`" for name in neutral)
            yield f"Accepted only [at values without effect](fields.md): {names}.\n"

    def _answers(self, responses: Schema) -> str:
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
        errors = ", ".join(sorted(status for status in responses if status != "200"))
        return f"200 with {' or '.join(kinds)}" + (f"; [errors](api.md#errors) {errors}" if errors else "")

    def _objects(self) -> Iterator[str]:
        """Each object that the text mentions, or that one of these mentions, by their names."""
        parts = {name: self._object(name) for name in self._mentioned()}
        yield from (parts[name] for name in sorted(parts))

    def _mentioned(self) -> Iterator[str]:
        yield from self._used  # which grows meanwhile

    def _object(self, name: str) -> str:
        schema = self._schemas[name]
        parts = [f"### {name}\n"]
        if "description" in schema:
            parts.append(_meanings(schema))
        rows = self._fields(schema)
        if rows:
            parts.append(_table(HEAD, rows))
        neutral = [f"`{field}`" for field, one in schema["properties"].items() if _is_neutral(one)]
        if neutral:
            parts.append(f"Accepted only at values without effect: {', '.join(neutral)}.\n")
        return "\n".join(parts)

    def _fields(self, schema: Schema) -> list[tuple[str, str, str]]:
        """(name, type, default) of each field but those that have no effect."""
        required = schema.get("required", ())
        return [
            (f"`{name}`", self._type(field, name in required), _default(field, name in required))
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
            name = _name(schema)
            if name not in self._used:
                self._used.append(name)
            return f"[{name}](#{name.lower()})"
        alternatives = schema.get("anyOf") or schema.get("oneOf")
        if alternatives:
            with_null = any(one.get("type") == "null" for one in alternatives)
            rest = [self._type(one, shows_null) for one in alternatives if one.get("type") != "null"]
            return " or ".join(dict.fromkeys([*rest, *(["null"] if with_null and shows_null else [])]))
        if "const" in schema or "enum" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            return " or ".join(f"`{json.dumps(value)}`" for value in values if shows_null or value is not None)
        kind = str(schema.get("type", "any"))
        if kind == "array":
            return f"{_counted('list', schema, 'Items', 'entries')} of {self._type(schema.get('items', {}))}"
        if kind == "object":
            extra = schema.get("additionalProperties")
            return f"object of {self._type(extra)}" if isinstance(extra, dict) and extra else "object"
        if kind == "string":
            pattern = f" that matches `{schema['pattern']}`" if "pattern" in schema else ""
            word = "bytes" if schema.get("format") == "binary" else "string"
            return _counted(word, schema, "Length", "characters") + pattern
        signs = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        limits = [f"{sign} {schema[key]:g}" for key, sign in signs if abs(schema.get(key, math.inf)) < LARGEST_BOUND]
        return kind + (f" {', '.join(limits)}" if limits else "")


def _name(schema: Schema) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _is_neutral(field: Schema) -> bool:
    """Accepted at values without effect only."""
    description = str(field.get("description", ""))
    return description.startswith("Not implemented: only") or field.get("type") == "null"


def _counted(word: str, schema: Schema, of: str, unit: str) -> str:
    """A list or a text with its limits."""
    most = f", at most {schema[f'max{of}']} {unit}" if f"max{of}" in schema else ""
    return ("non-empty " if schema.get(f"min{of}") else "") + word + (f" ({most[2:]})" if most else "")


def _default(field: Schema, is_required: bool) -> str:
    if is_required:
        return "required"
    default = field.get("default")
    if default == [] and "object" in [one.get("type") for one in field.get("anyOf", ())]:
        default = {}  # an object that is kept as pairs
    return "null" if default is None else f"`{json.dumps(default)}`"


def _as_note(text: str) -> str:
    return text[0].lower() + text[1:].rstrip(".")


def _flow(text: str) -> str:
    return " ".join(text.split())


def _meanings(schema: Schema) -> str:
    """A docstring, whose sentences `name: meaning` become a list."""
    text = "\n\n".join(map(_flow, schema["description"].split("\n\n")))
    one = "|".join(map(re.escape, schema.get("properties", ()))) or "(?!)"
    # (text before the first name), (names, what is in parentheses, text up to the next name), …
    first, *others = re.split(rf"(?:^|(?<=\. )|(?<=\n))((?:{one})(?:, (?:{one}))*)((?: \([^)]*\))?): ", text)
    lines = [first.strip(), ""]
    for names, note, meaning in zip(others[::3], others[1::3], others[2::3], strict=True):
        of_name, _, after = meaning.strip().partition("\n\n")
        lines.append(f"- {', '.join(f'`{name}`' for name in names.split(', '))}{note}: {of_name}")
        if after:
            lines += ["", after, ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
