"""Reads and writes JSON objects; errors name the file."""

import json
from pathlib import Path
from typing import Any

from tokasaurus.checkpoint.errors import CheckpointError

_MAX_BYTES = 1 << 28
"""More than any configuration, index or tokenizer has; the parsed value may take ten times as much memory."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError if the file is missing or contains anything else."""
    if not path.is_file():  # reading a pipe would not end
        raise CheckpointError(f"{path.parent} has no {path.name}")
    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise CheckpointError(f"{path} has {size:,} bytes, which is too large for a JSON file")
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not contain a JSON object")
    return value


def parse_json(content: bytes) -> object:
    """The value of JSON in UTF-8. Raises ValueError."""
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
