"""From a model's name to local files and its configuration.

Knows the Hugging Face formats, GGUF and the cache of files. Does not know how a model is computed. Imports no torch:
all three processes use it.
"""

from tokasaurus.checkpoint.cache import cache_directory
from tokasaurus.checkpoint.info import ModelInfo, read_model_info
from tokasaurus.checkpoint.json_files import CheckpointError
from tokasaurus.checkpoint.resolve import Checkpoint, resolve_checkpoint, with_safetensors
from tokasaurus.checkpoint.rope import RopeInfo
from tokasaurus.checkpoint.update import UpdateChecks, check_copy, quantization_of_update
from tokasaurus.checkpoint.weight_files import (
    check_weight_sizes,
    file_states,
    fit_to_tensors,
    update_files,
    weight_files,
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ModelInfo",
    "RopeInfo",
    "UpdateChecks",
    "cache_directory",
    "check_copy",
    "check_weight_sizes",
    "file_states",
    "fit_to_tensors",
    "quantization_of_update",
    "read_model_info",
    "resolve_checkpoint",
    "update_files",
    "weight_files",
    "with_safetensors",
]
