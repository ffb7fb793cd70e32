"""The most memory that a forward on the CPU's kernels takes beside weights and KV cache, and getting it at start-up."""

from dataclasses import dataclass

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.model.cpu import huge_pages
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.sampling.prompt_logprobs import SCORED_AT_ONCE
from tokasaurus.model.sampling.token_masks import num_mask_words
from tokasaurus.model.worker.warmup import ForwardLimits

_TILE_QUERIES = 96
"""Query heads of a tile of attention, at most: kTileQueries of attention_partition.h."""

_MAX_HEAD_DIM = 256
"""For which each thread's tile has room: kMaxHeadDim of attention_partition.h."""

_CHUNK_TOKENS = 128
"""Whose keys and values each thread widens at a time: kChunk of attention_tile.h."""

_PARTITIONS_PER_THREAD = 16
"""Partitions of tiles, merged at the end: twice kPartitionsPerThread of attention_work.h, for rounding up."""

_FLOAT = 4
_INDEX = 8

_HOST_INDICES_PER_TOKEN = 24
_HOST_INDICES_PER_ROW = 64
"""Of the arrays that device_batch.py, slot_table.py and sampling.py make of a step, counted generously."""

_BLOCK_TABLE_COPIES = 10
"""Of int32: tables of rows, of groups and of rows with rules, and the indices, of 8 bytes, that they are taken by."""

_BYTES_PER_PARTITION = 240
"""Of attention's lists of tiles and of pieces, which grow by doubling."""

_VOCABULARIES_PER_THREAD = 10
"""float32 copies of a row of logits that sampling makes at most: changed, allowed, masked, likely, counts, tokens seen,
and candidates, of 8 bytes, which grow by doubling."""

_MAX_PANEL = 32
"""Outputs of a panel of weights, at most: kPanel of gemm_tile.h. Each thread widens one at a time."""

_OTHER = 4 << 20
"""Python's objects, and what the allocators round up."""


@dataclass(frozen=True, slots=True)
class ForwardMemory:
    """Upper bounds in bytes, by part. kept: from one forward to the next. passing: given back at its end."""

    kept: dict[str, int]
    passing: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.kept.values()) + sum(self.passing.values())


def largest_forward(
    info: ModelInfo, limits: ForwardLimits, page_size: int, activation_bytes: int, num_threads: int, num_top: int
) -> ForwardMemory:
    """activation_bytes: of one number between layers. num_threads: the kernels'. num_top: most top-k logprobs of a
    token."""
    num_tokens = limits.max_tokens
    num_rows = min(limits.max_seqs, num_tokens)
    num_logit_rows = _num_logit_rows(limits)
    num_blocks = -(-limits.context_length // page_size)  # of a sequence
    query_size = info.num_heads * info.head_dim
    kv_size = info.num_kv_heads * info.head_dim

    # forward.cpp: queries, keys and values; what attention gives; and the inner state of the feed-forward.
    layer_row = query_size + 2 * kv_size + query_size + info.intermediate_size
    # With the angles of rotary embedding.
    hidden_row = info.hidden_size * activation_bytes + info.head_dim * _FLOAT
    # The log-sum-exp of every head; the output and log-sum-exp of rows that share a prefix; lists of tiles; what
    # threads hold of a tile; and pieces of tiles to be merged.
    num_tiles = (2 * num_rows + num_tokens * info.num_heads // _TILE_QUERIES + 1) * info.num_kv_heads
    attention = (
        num_tokens * info.num_heads * _FLOAT
        + num_rows * (query_size + info.num_heads) * _FLOAT
        + num_tiles * _BYTES_PER_PARTITION
        + num_threads * (3 * _TILE_QUERIES + 2 * _CHUNK_TOKENS) * _MAX_HEAD_DIM * _FLOAT
        + num_threads * _PARTITIONS_PER_THREAD * _TILE_QUERIES * (info.head_dim + 1) * _FLOAT
    )
    # Masks as they arrive, unpickled, and as a tensor.
    masks = 3 * num_rows * num_mask_words(info.vocab_size) * _FLOAT
    # Of sampled and of scored tokens: ids and log-probabilities, and the message that they are sent in.
    answers = 2 * (num_rows + num_tokens) * (2 * _INDEX + num_top * 2 * _FLOAT)
    host = (
        num_tokens * _HOST_INDICES_PER_TOKEN * _INDEX
        + num_rows * _HOST_INDICES_PER_ROW * _INDEX
        + num_rows * num_blocks * _BLOCK_TABLE_COPIES * 4
    )
    panel_bytes = _MAX_PANEL * _FLOAT  # for each input
    return ForwardMemory(
        kept={
            "layers": num_tokens * layer_row * activation_bytes,
            "normed states": num_tokens * info.hidden_size * activation_bytes,
            "logits": num_logit_rows * info.vocab_size * activation_bytes,
            "widened weights": num_threads * max(info.intermediate_size, query_size, info.hidden_size) * panel_bytes,
        },
        passing={
            "hidden states": num_tokens * hidden_row + num_logit_rows * info.hidden_size * activation_bytes,
            "attention": attention,
            "sampling": num_threads * _VOCABULARIES_PER_THREAD * info.vocab_size * _FLOAT + masks,
            "answers": answers,
            "batch": host + _OTHER,
        },
    )


def reserve(memory: ForwardMemory, model: Decoder, limits: ForwardLimits) -> None:
    """Get what is kept, and show that the system has the rest by touching as much and giving it back: better a start
    that fails than a forward."""
    model.reserve(limits.max_tokens, _num_logit_rows(limits))
    huge_pages.allocate(sum(memory.passing.values())).fill_(1)


def _num_logit_rows(limits: ForwardLimits) -> int:
    """Rows that pass the LM head together, at most: those that sample, or those of prompts that are scored."""
    return max(min(limits.max_seqs, limits.max_tokens), min(limits.max_tokens, SCORED_AT_ONCE))
