"""Fields that contain token ids: logit_bias and stop_token_ids. Ids are compared with the vocabulary later."""

import re
from typing import Annotated

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from tokasaurus.messages.generation import MAX_STOP_TOKEN_IDS

MAX_LOGIT_BIASES = 1024
_LARGEST_BIAS = 100

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)  # exactly one spelling of each id


def _error(message: str) -> PydanticCustomError:
    return PydanticCustomError("value_not_allowed", message)


def _parse_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    biases = {} if value is None else value
    if not isinstance(biases, dict):
        raise _error("must be an object of token ids and their biases")
    if len(biases) > MAX_LOGIT_BIASES:
        raise _error(f"may have at most {MAX_LOGIT_BIASES} tokens")
    if not all(isinstance(key, str) and _TOKEN_ID.fullmatch(key) for key in biases):
        raise _error('must contain token ids as keys, such as "50256"')
    # refuses bool, a subclass of int, and NaN, which is in no range
    if not all(type(bias) in (int, float) and -_LARGEST_BIAS <= bias <= _LARGEST_BIAS for bias in biases.values()):
        raise _error(f"must contain numbers from -{_LARGEST_BIAS} to {_LARGEST_BIAS}")
    return tuple((int(key), float(bias)) for key, bias in biases.items())


LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_parse_logit_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
                    "additionalProperties": {"type": "number", "minimum": -_LARGEST_BIAS, "maximum": _LARGEST_BIAS},
                    "maxProperties": MAX_LOGIT_BIASES,
                },
                {"type": "null"},
            ]
        }
    ),
]


def _parse_stop_token_ids(value: object) -> tuple[int, ...]:
    ids = [] if value is None else value
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise _error("must be a list of token ids")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise _error(f"may have at most {MAX_STOP_TOKEN_IDS} token ids")
    return tuple(ids)


StopTokenIds = Annotated[
    tuple[int, ...],
    PlainValidator(_parse_stop_token_ids),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MAX_STOP_TOKEN_IDS},
                {"type": "null"},
            ]
        }
    ),
]
