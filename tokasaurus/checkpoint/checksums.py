"""Checksums of the files in a directory, stored in a file beside them: they show damage by a crash or a bad disk."""

import hashlib
import json
from pathlib import Path

CHECKSUMS = "checksums.json"
"""Name of the file that maps each other file's name to its size and checksum."""

WHOLE_BYTES = 128 << 20
"""Files up to this size are read whole, which takes a tenth of a second; larger ones only at `_NUM_SAMPLES` places."""

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 128 << 10
_READ_BYTES = 1 << 20


def write_checksums(directory: Path) -> None:
    """Store the checksums of all files in `directory` and below."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    sums = {path.relative_to(directory).as_posix(): checksum(path) for path in paths}
    (directory / CHECKSUMS).write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")


def find_damage(directory: Path) -> Path | None:
    """A file of `directory` that is missing or differs from its checksum; None if all are whole.

    A file above WHOLE_BYTES counts as whole if its size, its two ends and the samples between them are right: this
    finds a file that was cut off or not written to the end, but not one changed byte between the samples. Such a file
    has gigabytes of weights, which the start must not read twice.
    """
    path = directory / CHECKSUMS
    try:
        sums = json.loads(path.read_text(encoding="utf-8"))
        for name, expected in sums.items():
            path = directory / str(name)
            if checksum(path) != expected:
                return path
    except (OSError, ValueError, AttributeError):  # AttributeError: JSON, but not an object
        return path
    return None


def is_intact_file(path: Path) -> bool:
    """Whether the checksum of this one file, in the checksums beside it, is right."""
    try:
        sums = json.loads((path.parent / CHECKSUMS).read_text(encoding="utf-8"))
        return bool(sums[path.name] == checksum(path))
    except (OSError, ValueError, LookupError, TypeError):  # no checksums, or not an object with this name
        return False


def checksum(path: Path) -> str:
    """Size and SHA-256, as text; of a file above WHOLE_BYTES, the SHA-256 of evenly spaced samples."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size > WHOLE_BYTES:
            for index in range(_NUM_SAMPLES):
                file.seek(index * (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
        else:
            file.seek(0)
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
    return f"{size} {digest.hexdigest()}"
