"""Reads typed fields of JSON objects; an error names the field, its value, and what is allowed."""

from collections.abc import Mapping
from typing import Any

from tokasaurus.checkpoint.errors import CheckpointError

Fields = Mapping[str, Any]


def positive_int(fields: Fields, name: str, maximum: int, default: int | None = None) -> int:
    """An absent or null field takes the default; without a default it is an error."""
    value = _value(fields, name, default)
    if type(value) is not int or not 1 <= value <= maximum:
        raise CheckpointError(f"{name} must be a positive integer, at most {maximum}, not {value!r}")
    return value


def positive_float(fields: Fields, name: str, maximum: float, default: float | None = None) -> float:
    """As positive_int."""
    value = _value(fields, name, default)
    # not NaN, which compares as false
    if type(value) not in (int, float) or not 0 < value <= maximum:
        raise CheckpointError(f"{name} must be a positive number, at most {maximum:g}, not {value!r}")
    return float(value)


def flag(fields: Fields, name: str, default: bool = False) -> bool:
    """An absent or null field takes the default."""
    value = fields.get(name)
    if value is not None and type(value) is not bool:
        raise CheckpointError(f"{name} must be true or false, not {value!r}")
    return default if value is None else value


def json_object(fields: Fields, name: str) -> dict[str, Any]:
    """An absent or null field is empty."""
    value = fields.get(name)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{name} must be an object, not {value!r}")
    return value or {}


def _value(fields: Fields, name: str, default: float | None) -> Any:
    value = fields.get(name)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"{name} is missing")
    return value
