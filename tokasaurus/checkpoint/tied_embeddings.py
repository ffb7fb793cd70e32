"""Whether a checkpoint's LM head is its embedding: the stored tensors decide, as in transformers.

config.json only says whether the two may be one (tie_word_embeddings). They are where one of them is missing, or both
are equal. Where they differ, each is used as it is stored.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tokasaurus.checkpoint.info import EMBEDDING, HEAD, ModelInfo
from tokasaurus.checkpoint.weight_files import StoredTensor, check_tensor_sizes, is_old_buffer, read_tensors

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 24


def fit_to_tensors(
    info: ModelInfo, files: Sequence[Path], on_phase: Callable[[str], None] = lambda _: None
) -> ModelInfo:
    """`info` of config.json, with what the tensors in `files` decide: whether and from which of them the embeddings are
    tied.

    on_phase: called before a comparison that may read both matrices. Raises CheckpointError if a header is malformed
    or the tensors do not have the sizes in config.json (see check_weight_sizes).
    """
    tensors = read_tensors(files)
    embedding, head = tensors.get(EMBEDDING), tensors.get(HEAD)
    if info.tie_embeddings and head is not None:
        if embedding is None:
            info = replace(info, embedding_tensor=HEAD)
        else:
            on_phase(f"comparing {HEAD} with the embedding")
            if not are_equal(embedding, head):
                logger.warning("%s differs from the embedding and is used, although tie_word_embeddings is true", HEAD)
                info = replace(info, tie_embeddings=False)
    check_tensor_sizes(tensors, info)
    if buffers := [name for name in tensors if is_old_buffer(name)]:
        logger.warning("buffers of an old checkpoint are passed over: %d, such as %s", len(buffers), buffers[0])
    return info


def are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether both have the same shape, dtype and bytes. Reads both up to the first difference."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    with first.file.open("rb") as first_file, second.file.open("rb") as second_file:
        first_file.seek(first.begin)
        second_file.seek(second.begin)
        left = first.end - first.begin
        while left > 0:
            chunk = first_file.read(min(left, _CHUNK_BYTES))
            if chunk != second_file.read(min(left, _CHUNK_BYTES)) or not chunk:
                return False
            left -= len(chunk)
    return True
