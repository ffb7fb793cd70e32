"""The results of a batch, which come in two files, as one file in the order of the input."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import orjson

from tokasaurus.batch_command.errors import CommandError
from tokasaurus.batch_command.input_file import custom_ids
from tokasaurus.server.batches.store.data_dir import NewContent

_Place = tuple[int, int, int]
"""(index of the file, start, size) of a line."""


def merge_results(input_path: Path, results: Sequence[BinaryIO], output: NewContent) -> str:
    """Write the result of each line of the input; returns the output's SHA-256 in hexadecimal digits.

    Raises CommandError unless each line has exactly one result, and OSError."""
    places = _find_places(results)
    digest = hashlib.sha256()
    for custom_id in custom_ids(input_path):
        place = places.pop(custom_id, None)
        if place is None:
            raise CommandError(f"the server has no result of the line with the custom_id {custom_id!r}")
        index, start, size = place
        results[index].seek(start)
        line = results[index].read(size) + b"\n"
        digest.update(line)
        output.write(line)
    if places:
        raise CommandError(f"the server has a result of {next(iter(places))!r}, which is no custom_id of the input")
    return digest.hexdigest()


def _find_places(results: Sequence[BinaryIO]) -> dict[str, _Place]:
    """By custom_id. Raises CommandError."""
    places: dict[str, _Place] = {}
    for index, file in enumerate(results):
        file.seek(0)
        start = 0
        for line in file:
            if line.strip():
                custom_id = _custom_id(line)
                if custom_id in places:
                    raise CommandError(f"the server has two results of the line with the custom_id {custom_id!r}")
                places[custom_id] = index, start, len(line.rstrip(b"\r\n"))
            start += len(line)
    return places


def _custom_id(line: bytes) -> str:
    try:
        custom_id = orjson.loads(line)["custom_id"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        custom_id = None
    if not isinstance(custom_id, str):
        raise CommandError("a line of the server's results has no custom_id")
    return custom_id
