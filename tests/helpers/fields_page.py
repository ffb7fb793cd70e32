"""docs/fields.md, made from the table of known fields: `python -m tests.helpers.fields_page` writes it."""

from collections.abc import Callable
from pathlib import Path

import orjson

from tokasaurus.server.protocol.known_fields import KNOWN_FIELDS, KnownField

PATH = Path(__file__).parents[2] / "docs" / "fields.md"

INTRODUCTION = """\
# Fields of other servers

`python -m tests.helpers.fields_page` makes this page from `tokasaurus/server/protocol/known_fields.py`, the table that
bodies and error messages are made from too; a test compares the two.

Clients that were written for other servers send fields that OpenAI's API does not have. They are accepted by
`/v1/completions`, `/v1/chat/completions`, `/v1/responses` and `/v1/messages`, live and in the lines of `/v1/bulk` and
of batches. Those marked (completions) belong to `/v1/completions` only, those marked (chat) to the others.
[The API](api.md#fields) has what the implemented ones mean in detail. Integers may be written with a point
(`"top_k": 20.0`).

Errors about fields are 400s whose `param` is the field, and whose `code` is `unsupported_parameter` for a known field
with a value that is not accepted, `unsupported_value` for a part of a value that is not implemented,
`unknown_parameter` for any other name (with "did you mean" where one is close), `missing_required_parameter`,
`invalid_type` or `invalid_value`.
"""


def page() -> str:
    """The whole page."""
    parts: list[tuple[str, str, str, Callable[[KnownField], bool], Callable[[KnownField], str]]] = [
        (
            "Implemented",
            "The values without effect are accepted as well.",
            "| field | of | no effect | other values |\n|---|---|---|---|",
            lambda field: bool(field.effect),
            lambda field: f" {_values(field.neutral)} | {_effect(field)} |",
        ),
        (
            "Without effect",
            "Every value of the right type is accepted, since nothing here depends on it.",
            "| field | of |\n|---|---|",
            lambda field: field.is_ignored,
            lambda _: "",
        ),
        (
            "Accepted at neutral values",
            "Any other value is refused.",
            "| field | of | accepted | instead of other values |\n|---|---|---|---|",
            lambda field: field.is_neutral_only,
            lambda field: f" {_values(field.neutral)} | {field.instead} |",
        ),
    ]
    lines = [INTRODUCTION]
    for heading, text, head, is_in, rest in parts:
        rows = [
            f"| `{name}`{_only(field)} | {', '.join(field.servers)} |{rest(field)}"
            for name, field in sorted(KNOWN_FIELDS.items())
            if is_in(field)
        ]
        lines += [f"## {heading}", "", text, "", head, *rows, ""]
    return "\n".join(lines)


def _only(field: KnownField) -> str:
    return "" if len(field.endpoints) > 1 else f" ({field.endpoints[0]})"


def _values(values: tuple[object, ...]) -> str:
    return ", ".join(f"`{orjson.dumps(value).decode()}`" for value in values)


def _effect(field: KnownField) -> str:
    return field.effect + (f"; for example {_values(field.examples)}" if field.examples else "")


if __name__ == "__main__":
    PATH.write_text(page())
