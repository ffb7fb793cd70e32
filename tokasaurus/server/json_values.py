"""JSON → pydantic models, with errors in OpenAI's form.

FastAPI's own parsing answers 500 to a lone surrogate and accepts NaN; orjson refuses both, and nesting deeper than
1,024. Parsing is one C call, which blocks the event loop: how long it would take is estimated from the bytes before.
"""

from collections.abc import Collection, Sequence
from typing import TypeVar, get_args

import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tokasaurus.server.errors import (
    InvalidRequest,
    NotJson,
    TooManyValues,
    field_name,
    invalid_value,
    one_error,
    unknown_field,
)
from tokasaurus.server.protocol.known_fields import advice, meant_field
from tokasaurus.server.value_words import MAX_TOLD
from tokasaurus.text.exact_json import loads

Body = TypeVar("Body", bound=BaseModel)

_MAX_INLINE_BYTES = 32_768
# Of fields and of keywords of schemas that become automata or many alternatives, which may take tenths of a second.
# JSON may write their letters as escapes; a schema may be text within the JSON.
_SLOW_WORDS = (
    *(b"pattern", b"regex", b"propertyNames", b"uniqueItems", b'"not"', b'"not\\"', b'"if"', b'"if\\"'),
    *(b"\\u00%d" % digit for digit in range(2, 8)),
)

_SLICE_BYTES = 1 << 19
# A list or an object takes as long to make and to free as this many numbers.
_CONTAINER_WORK = 8
_KEY_WORK = 3


def is_parsed_quickly(content: bytes | bytearray) -> bool:
    """Whether `parse_body` takes under a millisecond; otherwise it must run in a thread."""
    return len(content) <= _MAX_INLINE_BYTES and not any(word in content for word in _SLOW_WORDS)


def parse_body(content: bytes | bytearray, body_model: type[Body], max_values: int) -> Body:
    """Raises InvalidRequest unless `content` is a JSON object that matches the model, NotJson if it is no JSON.

    max_values: as in `load_json`."""
    try:
        value = load_json(content, max_values)
    except orjson.JSONDecodeError as error:
        raise NotJson(f"the body is not valid JSON: {error.msg} (character {error.pos})") from None
    return validate_body(value, body_model)


def load_json(content: bytes | bytearray, max_values: int) -> object:
    """Raises JSONDecodeError, and TooManyValues for JSON whose parsing would block the event loop for too long."""
    if has_too_many_values(content, max_values):
        raise TooManyValues(
            f"the body has too many numbers, strings, lists and objects, about {max_values} are possible: "
            "send several requests"
        )
    return loads(content)


def validate_body(value: object, body_model: type[Body]) -> Body:
    """value: parsed JSON. Raises InvalidRequest, which tells all that is wrong, unless it is an object that matches the
    model."""
    try:
        return body_model.model_validate(value)
    except ValidationError as error:
        raise one_error(*problems_of(error.errors(include_url=False, include_input=False), body_model)) from None


_SAY_NO_TYPE = ("missing", "extra_forbidden", "string_type")
"""Problems of "type" after which the object's other fields are checked all the same. string_type: of a key that a
client chose, as in metadata."""


def problems_of(found: Sequence[ErrorDetails], body_model: type[BaseModel] | None) -> tuple[list[InvalidRequest], int]:
    """(the first MAX_TOLD problems, how many there are beside them). Unknown fields come first, since a misspelt one is
    why another is missing; that one is then no problem of its own. Neither are the other fields of an object whose
    "type" is wrong.

    found: by pydantic. body_model: whose fields unknown ones are compared with; None: with no others."""
    types = {
        details["loc"] for details in found if details["loc"][-1:] == ("type",) and details["type"] not in _SAY_NO_TYPE
    }
    found = [
        details
        for details in found
        if details["loc"] in types
        or not any((*details["loc"][:end], "type") in types for end in range(1, len(details["loc"])))
    ]
    unknown = [details for details in found if details["type"] == "extra_forbidden"]
    problems: list[InvalidRequest] = []
    meant: set[tuple[int | str, ...]] = set()
    for details in unknown[:MAX_TOLD]:
        *place, name = details["loc"]
        fields = () if body_model is None else _fields_at(body_model, place)
        problems.append(unknown_field(str(field_name(details["loc"])), advice(str(name), fields)))
        if (other := meant_field(str(name), fields)) is not None:
            meant.add((*place, other))
    others = [
        details
        for details in found
        if details["type"] != "extra_forbidden" and not (details["type"] == "missing" and details["loc"] in meant)
    ]
    problems += map(invalid_value, others[: MAX_TOLD - len(problems)])
    return problems, len(unknown) + len(others) - len(problems)


def _fields_at(model: type[BaseModel], place: Sequence[int | str]) -> Collection[str]:
    """The fields of the object at this place of a body; none where they cannot be told."""
    found: Collection[str] = model.model_fields
    for part in place:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        models = [] if field is None else _models_in(field.annotation)
        if len(models) != 1:
            return ()
        (model,) = models
        found = model.model_fields
    return found


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]


def has_too_many_values(content: bytes | bytearray, max_work: int) -> bool:
    """Whether parsing the body would take more than `max_work`. Valid JSON is not required.

    max_work: numbers and strings, with 8 more for each list or object and 3 more for each key. A million take 150 ms.
    In slices of a few milliseconds; other threads may run between them.
    """
    if len(content) <= max_work // _CONTAINER_WORK:  # each byte may be a list
        return False
    slices = range(0, len(content), _SLICE_BYTES)
    # First as if no mark were inside a string, which is faster and enough for nearly all bodies.
    if sum(_work(content[start : start + _SLICE_BYTES]) for start in slices) <= max_work:
        return False
    work = position = 0
    is_in_string = False
    while position < len(content) and work <= max_work:
        part = content[position : position + _SLICE_BYTES]
        position += len(part)
        if (len(part) - len(part.rstrip(b"\\"))) % 2 == 1:  # the border must not cut an escape
            part += content[position : position + 1]
            position += 1
        texts = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        work += _work(b"".join(texts[is_in_string::2]))
        is_in_string ^= len(texts) % 2 == 0
    return work > max_work


def _work(part: bytes | bytearray) -> int:
    num_containers = part.count(b"[") + part.count(b"{")
    return part.count(b",") + _CONTAINER_WORK * num_containers + _KEY_WORK * part.count(b":")
