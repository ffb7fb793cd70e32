"""What tells a local model from another one of the same name, such as two checkpoints of a training run."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tokasaurus.checkpoint.gguf.pointer import POINTER_NAME

# Files that decide what the model answers. Others come and go beside them, such as the results of an eval.
_PATTERNS = (
    "*.safetensors",
    POINTER_NAME,
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A local model, as it was found."""

    path: str
    """The directory, or the GGUF file, that its weights are from."""
    sample: str
    """Hash of samples of its files: equal for copies."""


def find_model_files(*models: Path) -> ModelFiles | None:
    """models: directories or GGUF files; later ones have replaced some weights of the ones before.

    None if there are no such files. Reads at most 256 KiB of each, since whole models take minutes."""
    with suppress(OSError):
        files = [file for model in models for file in _files_of(model)]
        if files:
            sample = hashlib.blake2b(b"".join(map(_sample, files)), digest_size=16).hexdigest()
            return ModelFiles(str(models[-1]), sample)
    return None


def _files_of(model: Path) -> list[Path]:
    return [model] if model.is_file() else sorted(path for pattern in _PATTERNS for path in model.glob(pattern))


def _sample(path: Path) -> bytes:
    """Hash of its size and of parts that are evenly spaced. Raises OSError."""
    digest = hashlib.blake2b()
    with path.open("rb") as file:
        num_bytes = path.stat().st_size
        digest.update(b"%d" % num_bytes)
        last = max(0, num_bytes - _SAMPLE_BYTES)
        for start in sorted({last * index // (_NUM_SAMPLES - 1) for index in range(_NUM_SAMPLES)}):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()
