"""How large the buffers between host and device must be for the largest step."""

from typing import NamedTuple

from tokasaurus.messages.generation import SAMPLING_DTYPE

_BYTES_PER_TOKEN = 80
"""Its id, position and kv index, the row and the target of its prompt logprob, and its place in attention's lists."""

_BYTES_PER_ROW = 256 + SAMPLING_DTYPE.itemsize
"""Its slot, first opened and then run, its noise, its place in each list of rows with a feature, its new blocks and the
ranges of its context in attention's lists."""

_BIASES_PER_ROW = 32
"""On average; OpenAI's API allows 300 in one request."""

_BYTES_PER_BIAS = 8
_BYTES_PER_TOP = 8
"""A top logprob and its token."""

_OTHER = 1 << 16
"""Alignment, padding, and arrays of a few numbers."""


class BufferSizes(NamedTuple):
    """Bytes of one buffer each."""

    inputs: int = 1 << 20
    results: int = 1 << 16


def sizes_for(max_tokens: int, max_seqs: int, vocab_size: int, num_top: int) -> BufferSizes:
    """Sizes for any step of at most max_tokens tokens and max_seqs rows, each with a mask, top logprobs and rules.

    num_top: most top logprobs of a token. The block tables of many long prefixes that are opened at once, and more
    biases than usual, do not fit: PackedStaging has another buffer for these.
    """
    mask_bytes = -(-vocab_size // 32) * 4
    bytes_per_row = _BYTES_PER_ROW + _BIASES_PER_ROW * _BYTES_PER_BIAS + mask_bytes
    bytes_per_answer = 16 + num_top * _BYTES_PER_TOP
    return BufferSizes(
        inputs=max_tokens * _BYTES_PER_TOKEN + max_seqs * bytes_per_row + _OTHER,
        results=(max_tokens + max_seqs) * bytes_per_answer + _OTHER,
    )
