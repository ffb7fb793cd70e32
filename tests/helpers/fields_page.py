"""docs/fields.md, made from the table of known fields."""

from collections.abc import Callable
from pathlib import Path

import orjson
from pydantic import BaseModel

from tokasaurus.server.protocol.fields import Only
from tokasaurus.server.protocol.known_fields import KNOWN_FIELDS, KnownField
from tokasaurus.server.protocol.sglang_rollouts import GenerateRequest
from tokasaurus.server.protocol.vllm_rollouts import TokensRequest

PATH = Path(__file__).parents[2] / "docs" / "fields.md"

INTRODUCTION = """\
# Fields of other servers

`make reference` makes this page from `tokasaurus/server/protocol/known_fields.py`, the table that bodies and error
messages are made from too; a test compares the two.

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
            "| field | of | why |\n|---|---|---|",
            lambda field: field.is_ignored,
            lambda field: f" {field.instead} |",
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
    return "\n".join([*lines, *_of_rollouts()])


ROLLOUTS: dict[str, type[BaseModel]] = {"/inference/v1/generate": TokensRequest, "/generate": GenerateRequest}
"""Route → its body."""


def rollout_fields(body: type[BaseModel]) -> dict[str, Only | None]:
    """Each field of a body for roll-outs, with those of sampling_params → what alone it accepts; None for a field that
    is implemented or without effect."""
    found: dict[str, Only | None] = {}
    for name, field in body.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found |= {f"{name}.{one}": limit for one, limit in rollout_fields(inner).items()}
        else:
            found[name] = next((one for one in field.metadata if isinstance(one, Only)), None)
    return found


def _of_rollouts() -> list[str]:
    lines = ["## Roll-outs", ""]
    lines += ["The bodies of the routes that `rl=T` serves, in the forms of vLLM and of SGLang: [roll-outs](rl.md)."]
    for route, body in ROLLOUTS.items():
        fields = rollout_fields(body)
        accepted = [f"`{name}`" for name, limit in fields.items() if limit is None]
        rows = [f"| `{name}` | {_values(limit.neutral)} |" for name, limit in fields.items() if limit is not None]
        lines += ["", f"`POST {route}` accepts {', '.join(accepted)}. Other fields have no effect at these values:", ""]
        lines += ["| field | accepted |", "|---|---|", *rows]
    return [*lines, ""]


def _only(field: KnownField) -> str:
    return "" if len(field.endpoints) > 1 else f" ({field.endpoints[0]})"


def _values(values: tuple[object, ...]) -> str:
    return ", ".join(f"`{orjson.dumps(value).decode()}`" for value in values)


def _effect(field: KnownField) -> str:
    return field.effect + (f"; for example {_values(field.examples)}" if field.examples else "")
