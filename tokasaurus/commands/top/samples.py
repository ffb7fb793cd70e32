"""Samples of a server's state, as `GET /live` sends them and a recording keeps them: server/protocol/live.py declares
their fields, of which those that are absent or of another type get a value that says nothing."""

import itertools
import math
from dataclasses import is_dataclass, replace
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import orjson
from typing_extensions import get_type_hints, is_typeddict

from tokasaurus.messages.status import TimeLeft
from tokasaurus.server.protocol.live import FORMAT, LiveEvent, LiveJob, LiveReplica


class NotASample(Exception):
    """The message says why, in one line."""


class UnknownFormat(NotASample):
    """The sample has another version of the format."""


class Sample(LiveEvent):
    is_past: bool
    """The server has taken it by itself, and it tells less: own blocks are all that are in use."""


def read_sample(line: bytes) -> Sample:
    """A sample from its JSON. Raises NotASample, UnknownFormat for another version of the format."""
    try:
        value = orjson.loads(line)
    except ValueError:
        raise NotASample("no JSON") from None
    version = value.get("format") if isinstance(value, dict) else None
    if version is None:
        raise NotASample('no sample: it has no "format"')
    if version is True or version != FORMAT:
        raise UnknownFormat(f"format {_clean(str(version))[:20]} of samples is not known, this toka reads {FORMAT}")
    if _number(value.get("time")) is None:
        raise NotASample('no sample: it has no "time"')
    sample = _sample(value)
    moments = value.get("past")
    sample["past"] = [
        _sample({**value, "keys": [], "jobs": [], **moment}, is_past=True)  # type: ignore[misc]  # more than a moment
        for moment in (moments if isinstance(moments, list) else [])
        if isinstance(moment, dict) and _number(moment.get("time")) is not None
    ]
    return sample


def time_left(of: LiveReplica | LiveJob) -> TimeLeft | None:
    """A recording of an earlier server has no range."""
    seconds, ends = of["eta_seconds"], of["eta_range"]
    if ends is not None and len(ends) == 2:
        return TimeLeft(*ends)
    return None if seconds is None else TimeLeft(seconds, seconds)


def _sample(value: dict[str, Any], is_past: bool = False) -> Sample:
    sample: Sample = _read(LiveEvent, {**value, "past": []})
    sample["is_past"] = is_past
    for replica, told in zip(sample["replicas"], _objects(value.get("replicas")), strict=True):
        if _number(told.get("step")) is None:  # the engine did not answer in time
            del replica["step"]
        if not isinstance(told.get("tokens"), dict):  # nor before
            del replica["tokens"]
        if is_past and isinstance(blocks := told.get("blocks"), dict):
            replica["blocks"] = replace(replica["blocks"], own=int(_number(blocks.get("used")) or 0))
        forecast = replica["forecast"]
        if forecast is not None:
            steps, blocks = forecast.steps, forecast.blocks
            if not len(steps) == len(blocks) > 0 or any(a > b for a, b in itertools.pairwise(steps)):
                replica["forecast"] = None
            else:
                replica["forecast"] = replace(forecast, peak=forecast.peak or max(blocks))
    return sample


def _read(kind: Any, value: Any) -> Any:
    """The value as `kind` declares it."""
    origin, kinds = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        (inner,) = set(kinds) - {type(None)}
        return _read(inner, value) if _fits(inner, value) else None
    if is_typeddict(kind) or is_dataclass(kind):
        told = value if isinstance(value, dict) else {}
        return kind(**{name: _read(field, told.get(name)) for name, field in _fields(kind).items()})
    if origin is list:
        return [_read(kinds[0], one) for one in value if _fits(kinds[0], one)] if isinstance(value, list) else []
    if origin is tuple:
        return tuple(_read(kind, one) for kind, one in zip(kinds, value, strict=True))
    if origin is dict:
        numbers = {_clean(key): _number(one) for key, one in value.items()} if isinstance(value, dict) else {}
        return {key: number for key, number in numbers.items() if number is not None}
    if kind is bool:
        return value is True
    if kind in (int, float):
        return kind(_number(value) or 0)
    return _clean(value) if isinstance(value, str) else ""


def _fits(kind: Any, value: Any) -> bool:
    origin = get_origin(kind)
    if is_typeddict(kind) or is_dataclass(kind):
        return isinstance(value, dict) and bool(value)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(get_args(kind)) and all(map(_fits, get_args(kind), value))
    if kind in (int, float):
        return _number(value) is not None
    return isinstance(value, str if origin is Literal else origin or kind)


@cache
def _fields(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict) and one] if isinstance(value, list) else []


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def _clean(text: str) -> str:
    """Without characters that would move a terminal's cursor or change its state: clients choose names of jobs."""
    return "".join(char if char.isprintable() else "?" for char in text)
