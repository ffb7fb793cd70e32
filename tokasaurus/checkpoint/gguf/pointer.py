"""The file that names a converted model's GGUF files, in place of weights beside its config.json."""

from collections.abc import Sequence
from pathlib import Path

from tokasaurus.checkpoint.gguf.model import is_gguf
from tokasaurus.checkpoint.json_files import CheckpointError, read_json, write_json

POINTER_NAME = "gguf.json"


def write_pointer(files: Sequence[Path], directory: Path) -> None:
    """files: all parts of the model, in order."""
    entries = []
    for file in files:
        stat = file.stat()
        entries.append({"path": str(file), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns})
    write_json(directory / POINTER_NAME, {"files": entries})


def read_pointer(directory: Path) -> list[Path]:
    """The files, in order. Raises CheckpointError if one is gone or has changed since `write_pointer`."""
    pointer = directory / POINTER_NAME
    entries = read_json(pointer).get("files")
    if not isinstance(entries, list) or not entries:
        raise CheckpointError(f"{pointer} names no files")
    files = []
    for entry in entries:
        path = entry.get("path") if isinstance(entry, dict) else None
        if not isinstance(path, str) or "\0" in path or not is_gguf(Path(path)):
            raise CheckpointError(f"{pointer} names {path!r}, which is not a GGUF file")
        file = Path(path)
        if not file.is_file():
            raise CheckpointError(f"{file} is gone, which has the weights of {directory}")
        stat = file.stat()
        if (stat.st_size, stat.st_mtime_ns) != (entry.get("size"), entry.get("mtime_ns")):
            raise CheckpointError(f"{file} has changed since {directory} was made for it")
        files.append(file)
    return files
