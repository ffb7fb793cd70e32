"""JSON → pydantic models, with errors in OpenAI's form.

FastAPI's own parsing answers 500 to a lone surrogate and accepts NaN; orjson refuses both, and nesting deeper than
1,024.
"""

from typing import TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from tokasaurus.server.errors import InvalidRequest, TooManyValues, invalid_body, unknown_field
from tokasaurus.server.parsing.json_work import has_too_many_values

Body = TypeVar("Body", bound=BaseModel)

MAX_INLINE_BYTES = 32_768
"""A body up to this size is parsed in under a millisecond; a larger one must be parsed in a thread."""


def parse_body(content: bytes | bytearray, body_model: type[Body], max_values: int) -> Body:
    """Raises InvalidRequest unless `content` is a JSON object that matches the model. max_values: as in `load_json`."""
    try:
        value = load_json(content, max_values)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error.msg} (character {error.pos})") from None
    return validate_body(value, body_model)


def load_json(content: bytes | bytearray, max_values: int) -> object:
    """Raises JSONDecodeError, and TooManyValues for JSON whose parsing would block the event loop for too long."""
    if has_too_many_values(content, max_values):
        raise TooManyValues(
            f"the body has too many numbers, strings, lists and objects, about {max_values} are possible "
            "(max_json_values): send several requests"
        )
    return orjson.loads(content)


def validate_body(value: object, body_model: type[Body]) -> Body:
    """value: parsed JSON. Raises InvalidRequest unless it is an object that matches the model."""
    if isinstance(value, dict):
        # Checked here because pydantic would create an error for each name, of which there may be a million.
        for name in value:
            if name not in body_model.model_fields:
                raise unknown_field(name)
    try:
        return body_model.model_validate(value)
    except ValidationError as error:
        raise invalid_body(error) from None
