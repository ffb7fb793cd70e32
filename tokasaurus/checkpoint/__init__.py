"""From a model's name to its local files and its facts. Imports no torch: all three processes read it."""

from tokasaurus.checkpoint.cache import cache_directory
from tokasaurus.checkpoint.errors import CheckpointError
from tokasaurus.checkpoint.info import ModelInfo, RopeInfo, read_model_info
from tokasaurus.checkpoint.resolve import Checkpoint, resolve_checkpoint
from tokasaurus.checkpoint.weight_files import weight_files

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ModelInfo",
    "RopeInfo",
    "cache_directory",
    "read_model_info",
    "resolve_checkpoint",
    "weight_files",
]
