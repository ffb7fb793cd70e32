"""Finds the safetensors files that contain a model's weights."""

from pathlib import Path

from tokasaurus.checkpoint.errors import CheckpointError
from tokasaurus.checkpoint.json_files import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def weight_file_names(directory: Path) -> list[str]:
    """Names of the shards in the index, sorted, or of the single file if there is no index. Opens no weight file."""
    index_path = directory / INDEX_NAME
    if not index_path.exists():
        return [SINGLE_NAME]
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path} has no weight_map")
    names = set(weight_map.values())
    for name in names:
        # The index is untrusted: a name must not lead out of the directory.
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index_path} names {name!r}, which is not a file name")
    return sorted(names)


def weight_files(directory: Path) -> list[Path]:
    """Paths of the safetensors files. Raises CheckpointError, naming the first one that does not exist."""
    paths = [directory / name for name in weight_file_names(directory)]
    for path in paths:
        if path.exists():
            continue
        if path.name != SINGLE_NAME:
            raise CheckpointError(f"{directory} has no {path.name}, which {INDEX_NAME} names")
        hint = "; PyTorch .bin weights are not read" if any(directory.glob("*.bin")) else ""
        raise CheckpointError(f"{directory} has no {SINGLE_NAME} and no {INDEX_NAME}{hint}")
    return paths
