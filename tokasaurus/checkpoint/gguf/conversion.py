"""Makes a directory in Hugging Face format of a GGUF model, whose weights stay in the GGUF files."""

from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokasaurus.checkpoint.gguf.config import generation_config, model_config
from tokasaurus.checkpoint.gguf.model import GGUFModel, read_model
from tokasaurus.checkpoint.gguf.pointer import write_pointer
from tokasaurus.checkpoint.gguf.tokenizer import write_tokenizer
from tokasaurus.checkpoint.json_files import CheckpointError, write_json

_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_MALFORMED = (ValueError, TypeError, LookupError, ArithmeticError)
"""What reading metadata of a wrong type or value raises here."""


def write_hf_directory(files: Sequence[Path], directory: Path) -> None:
    """Write config, generation config, tokenizer, and which files have the weights. files: all parts.

    Raises CheckpointError."""
    model = read_model(files, wanted=lambda _: True)
    embedding = model.tensors.get("model.embed_tokens.weight")
    try:
        if embedding is None:
            raise CheckpointError("tensor token_embd.weight is missing")
        config = model_config(
            model.architecture,
            model.metadata,
            vocab_size=embedding.shape[0],
            names=model.tensors,
            dtype=_main_dtype(model),
            rope_factors=_rope_factors(model),
        )
        write_json(directory / "config.json", config)
        write_json(directory / "generation_config.json", generation_config(model.metadata))
        write_tokenizer(model.metadata, directory)
    except CheckpointError as error:
        raise CheckpointError(f"{files[0]}: {error}") from None
    except _MALFORMED as error:
        raise CheckpointError(f"{files[0]}: its metadata are malformed ({error})") from None
    write_pointer(files, directory)


def _main_dtype(model: GGUFModel) -> str:
    """The dtype of most elements; norms are float32 in every file. Quantised blocks are computed as float32."""
    counts = Counter[str]()
    for tensor in model.tensors.values():
        counts[_DTYPE_NAMES.get(tensor.dtype, "float32")] += prod(tensor.shape)
    return counts.most_common(1)[0][0]


def _rope_factors(model: GGUFModel) -> dict[str, NDArray[np.float32]]:
    found = {}
    for name, tensor in model.rope_factors.items():
        if tensor.dtype != "F32":
            raise CheckpointError(f"{name} has type {tensor.dtype}, not F32")
        numbers = np.fromfile(tensor.file, np.float32, prod(tensor.shape), offset=tensor.begin)
        found[name] = numbers.reshape(tensor.shape)
    return found
