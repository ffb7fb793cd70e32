"""docs/fields.md, made from the table of known fields."""

from collections.abc import Callable
from pathlib import Path

import orjson
from pydantic import BaseModel

from tokasaurus.server.dialects.sglang_rollouts import GenerateRequest
from tokasaurus.server.dialects.vllm_rollouts import TokensRequest
from tokasaurus.server.protocol.fields import Only
from tokasaurus.server.protocol.known_fields import KNOWN_FIELDS, KnownField

PATH = Path(__file__).parents[2] / "docs" / "fields.md"

INTRODUCTION = """\
# Fields of other servers

`make reference` makes this page from `tokasaurus/server/protocol/known_fields.py`, the table that bodies and error
messages are made from too; a test compares the two.

Clients that were written for other servers send fields that OpenAI's API does not have. They are accepted by
`/v1/completions`, `/v1/chat/completions`, `/v1/responses` and `/v1/messages`, live and in the lines of `/v1/bulk` and
of batches. Fields with † belong to `/v1/completions` only, fields with ‡ to the others.
"""


def page() -> str:
    """The whole page."""
    parts: list[tuple[str, str, Callable[[KnownField], bool], Callable[[KnownField], str]]] = [
        (
            "Implemented",
            "What they mean is told [in the API](api.md#fields). At these values they have no effect:",
            lambda field: bool(field.effect),
            lambda field: _values(field.neutral),
        ),
        (
            "Without effect",
            "Every value of the right type is accepted, since nothing here depends on it.",
            lambda field: field.is_ignored,
            lambda field: field.instead,
        ),
        (
            "Accepted at neutral values",
            "Only these values are accepted; then what to use instead of others.",
            lambda field: field.is_neutral_only,
            lambda field: _values(field.neutral) + (f"; {field.instead}" if field.instead else ""),
        ),
    ]
    lines = [INTRODUCTION]
    for heading, text, is_in, rest in parts:
        names: dict[tuple[str, str], list[str]] = {}
        """(servers, what is said) → the fields of which this is said."""
        for name, field in sorted(KNOWN_FIELDS.items()):
            if is_in(field):
                names.setdefault((", ".join(field.servers), rest(field)), []).append(f"`{name}`{_only(field)}")
        lines += [f"## {heading}", "", text, ""]
        lines += [
            f"- {', '.join(fields)} ({servers})" + (f": {said}" if said else "")
            for (servers, said), fields in names.items()
        ]
        lines += [""]
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
    lines += [
        "Routes that `rl=T` serves in the forms of vLLM and SGLang have [bodies of their own](http.md#roll-outs)."
    ]
    for route, body in ROLLOUTS.items():
        names: dict[str, list[str]] = {}
        """Accepted values → fields."""
        for name, limit in rollout_fields(body).items():
            if limit is not None:
                names.setdefault(_values(limit.neutral), []).append(f"`{name}`")
        lines += ["", f"`POST {route}` accepts these fields only at values without effect:", ""]
        lines += [f"- {', '.join(fields)}: {values}" for values, fields in names.items()]
    return [*lines, ""]


def _only(field: KnownField) -> str:
    return "" if len(field.endpoints) > 1 else {"chat": "‡", "completions": "†"}[field.endpoints[0]]


def _values(values: tuple[object, ...]) -> str:
    return ", ".join(f"`{orjson.dumps(value).decode()}`" for value in values)
