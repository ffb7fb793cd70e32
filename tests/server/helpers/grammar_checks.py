"""Runs GrammarChecker with its real child processes."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import orjson
import pytest

from tokasaurus.server.errors import InvalidRequest
from tokasaurus.server.grammars import validator
from tokasaurus.server.grammars.validator import GrammarChecker
from tokasaurus.server.protocol.grammar_fields import GrammarFormat, GrammarSource
from tokasaurus.server.served_model import ServedModel

Result = TypeVar("Result")

DEEP_REFERENCES = {  # objects nested through 10,000 references: overflows the compiler's stack
    "$ref": "#/$defs/d0",
    "$defs": {
        **{
            f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]}
            for i in range(10_000)
        },
        "d10000": {"type": "string"},
    },
}
SLOW_REGEX = "a*" * 40_000  # takes half a minute to compile


def source(format: GrammarFormat, text: str | dict[str, Any], param: str = "field") -> GrammarSource:
    return GrammarSource(format, text if isinstance(text, str) else orjson.dumps(text).decode(), param)


def run(
    model: ServedModel,
    work: Callable[[GrammarChecker], Awaitable[Result]],
    time_limit_s: float = validator.TIME_LIMIT_S,
) -> Result:
    async def with_checker() -> Result:
        checker = GrammarChecker(model, time_limit_s)
        try:
            return await work(checker)
        finally:
            await checker.close()

    return asyncio.run(with_checker())


async def refusal(checker: GrammarChecker, wrong: GrammarSource) -> str:
    with pytest.raises(InvalidRequest) as error:
        await checker.check(wrong)
    assert error.value.param == wrong.param
    return error.value.message


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"  # a zombie: dead, not yet reaped
    except (FileNotFoundError, ProcessLookupError):
        return False
