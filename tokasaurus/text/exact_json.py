"""JSON whose integers are exact: orjson reads those beyond 64 bits as floats, and writes none of them."""

import json
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import orjson
import pydantic_core

_LONG_NUMBER = b"0" * 19
"""Digits that an integer beyond 64 bits has at least."""
_MAX_FLOAT = int(sys.float_info.max)
_DIGITS_AS_ZEROS = bytes(b"0"[0] if byte in b"0123456789" else b" "[0] for byte in range(256))


def loads(content: bytes | bytearray | str) -> Any:
    """The value. Raises orjson.JSONDecodeError, also for NaN, halves of surrogate pairs, numbers beyond the range of
    floats, and nesting deeper than 1,024."""
    value = orjson.loads(content)
    encoded = content.encode() if isinstance(content, str) else content
    if _LONG_NUMBER not in encoded.translate(_DIGITS_AS_ZEROS):
        return value
    try:
        return pydantic_core.from_json(encoded, allow_inf_nan=False)
    except ValueError:  # it is nested deeper than 200
        try:
            return json.loads(encoded)
        except RecursionError:
            raise orjson.JSONDecodeError("nested too deeply beside a number of 19 digits", "", 0) from None


def dumps(value: object, default: Callable[[Any], Any] | None = None, option: int | None = None) -> bytes:
    """The value as orjson writes it. Raises TypeError, also for an integer that `loads` would not read."""
    try:
        return orjson.dumps(value, default, option)
    except TypeError as error:
        try:
            return orjson.dumps(_with_long_integers(value), default, option)
        except RecursionError:
            raise error from None


def _with_long_integers(value: Any) -> Any:
    """The value with integers beyond 64 bits as fragments of JSON."""
    if type(value) is int:
        is_long = not -(2**63) <= value < 2**64 and abs(value) <= _MAX_FLOAT
        return orjson.Fragment(str(value).encode()) if is_long else value
    if isinstance(value, dict):
        return {name: _with_long_integers(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_with_long_integers(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        shown = (field.name for field in fields(value) if not field.name.startswith("_"))
        return {name: _with_long_integers(getattr(value, name)) for name in shown}
    return value
