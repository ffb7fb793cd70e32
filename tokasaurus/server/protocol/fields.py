"""The kinds of fields and objects that bodies are made of.

Null means the default for every optional field: OpenAI's clients send it. An unimplemented field is declared with
`Only(...)`: neutral values are accepted, any other value is refused with an error that names the field. Where a
validator of our own parses a field, `PlainValidator`'s second argument is its form on the OpenAPI page.
"""

from itertools import islice
from typing import Annotated, Any, TypeVar, get_args

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from tokasaurus.server.value_words import MAX_COUNTED

Model = TypeVar("Model", bound=BaseModel)
Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]


class StrictObject(BaseModel):
    """Types are strict; an unknown field is refused with an error that names it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _limit_unknown_fields(cls, value: object) -> object:
        """Drop most of very many: pydantic would create an error for each, and there may be a million."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields) + MAX_COUNTED:
            return value
        known = [field.alias or name for name, field in cls.model_fields.items()]
        unknown = islice((name for name in value if name not in known), MAX_COUNTED)
        return {name: value[name] for name in (*known, *unknown) if name in value}


class OptionalObject(StrictObject):
    """A body that may be left out: it then has its defaults. All its fields have one."""


def value_error(message: str) -> PydanticCustomError:
    """For validators. message: follows the field's name, such as "must not be empty"."""
    return PydanticCustomError("value_not_allowed", "{message}", {"message": message})


def not_implemented(message: str) -> PydanticCustomError:
    """The error of a value that OpenAI or vLLM allow and this server does not. message: as for `value_error`."""
    return PydanticCustomError("not_implemented", "{message}", {"message": message})


def field_not_implemented(message: str) -> PydanticCustomError:
    """The error of a field that is not implemented as a whole. message: as for `value_error`."""
    return PydanticCustomError("field_not_implemented", "{message}", {"message": message})


def missing() -> PydanticCustomError:
    return PydanticCustomError("missing", "is required")


class Only:
    """Metadata of an unimplemented field: accepts only these neutral values, see `is_same`.

    instead: why others are refused, or what to do instead; a clause after a semicolon."""

    description = "Not implemented: only these neutral values."
    """Description of the field on the OpenAPI page."""

    def __init__(self, *neutral: object, instead: str = "") -> None:
        self.neutral = neutral
        self._instead = f"; {instead}" if instead else ""

    def __get_pydantic_core_schema__(self, _source: object, _handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": list(self.neutral), "description": self.description}

    def _check(self, value: object) -> object:
        if any(is_same(value, neutral) for neutral in self.neutral):
            return value
        raise field_not_implemented(self.refusal())

    def refusal(self) -> str:
        """To be read after the field's name."""
        allowed = " and ".join(orjson.dumps(neutral).decode() for neutral in self.neutral)
        return f"is not implemented beyond {allowed}{self._instead}"


def is_same(value: object, neutral: object) -> bool:
    """Whether two JSON values are equal; true and 1 are not, while 1 and 1.0 are."""
    if isinstance(value, bool) or isinstance(neutral, bool):
        return value is neutral
    if isinstance(value, int | float) and isinstance(neutral, int | float):
        return value == neutral
    return type(value) is type(neutral) and value == neutral


def as_integer(value: object) -> object:
    """16 for 16.0, since some clients write every number with a point; other values as they are.

    Beyond 2^53 a float may stand for several integers: JSON's -9223372036854775809 is read as one."""
    return int(value) if type(value) is float and value.is_integer() and abs(value) <= 2**53 else value


WHOLE_FLOATS = BeforeValidator(as_integer)
"""Metadata of an integer, after its bounds: accepts 16.0 for 16."""


def as_integers(values: list[Any]) -> list[Any]:
    """The list with each value converted as by `as_integer`."""
    return values if float not in set(map(type, values)) else list(map(as_integer, values))


def typed_object(value: object) -> tuple[dict[str, Any], str]:
    """For validators: an object and its "type"."""
    if not isinstance(value, dict):
        raise value_error("must be an object")
    if not isinstance(kind := value.get("type"), str):
        raise value_error("must have a string as its type")
    return value, kind


def by_type(*models: type[Model]) -> dict[str, type[Model]]:
    """The models by each value that their field `type` may have."""
    return {kind: model for model in models for kind in get_args(model.model_fields["type"].annotation)}


class NullMeans:
    """Metadata of a field, placed last: reads an explicit null as the default, and documents null in OpenAPI."""

    def __init__(self, default: object) -> None:
        self._default = default

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            lambda value: self._default if value is None else value, handler(source)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [handler(schema), {"type": "null"}]}


VersionName = Annotated[str, Field(min_length=1, max_length=256)]
"""Name of a version of weights, which each answer has."""


def parse_token_ids(value: object) -> list[int]:
    """For validators: a list with at least one token id. Ids are compared with the vocabulary later."""
    if isinstance(value, list):
        value = as_integers(value)
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:  # refuses bool, a subclass of int
        raise value_error("must be a list of token ids")
    if not value:
        raise value_error("must not be empty")
    return value


TokenIds = Annotated[list[int], PlainValidator(parse_token_ids, Annotated[list[TokenId], Field(min_length=1)])]
