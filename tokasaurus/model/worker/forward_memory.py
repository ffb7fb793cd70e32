"""Upper bound on a forward's memory on the CPU kernels, besides weights and KV cache; reserved at start-up."""

from dataclasses import dataclass

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.model.cpu.bindings import allocate_huge_pages
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.sampling.prompt_logprobs import LOGPROBS_AT_ONCE
from tokasaurus.model.sampling.rules import num_mask_words
from tokasaurus.model.worker.warmup import ForwardLimits

_TILE_QUERIES = 96
"""Most query heads in an attention tile: kTileQueries of attention_partition.h."""

_MAX_HEAD_DIM = 256
"""Largest head size that a thread's tile has room for: kMaxHeadDim of attention_partition.h."""

_CHUNK_TOKENS = 128
"""Tokens whose keys and values a thread widens at a time: kChunk of attention_tile.h."""

_PARTITIONS_PER_THREAD = 16
"""Partitions of tiles that are merged at the end: twice kPartitionsPerThread of attention_work.h, for rounding up."""

_FLOAT = 4
_INDEX = 8

_HOST_INDICES_PER_TOKEN = 24
_HOST_INDICES_PER_ROW = 64
"""Indices in the arrays that device_batch.py, slot_table.py and sample.py build for a step: generous estimates."""

_BLOCK_TABLE_COPIES = 10
"""int32 copies of the block tables: of rows, of prefix groups, of rows with rules, and the 8-byte gather indices."""

_BYTES_PER_PARTITION = 240
"""Entries in attention's lists of tiles and partitions, which grow by doubling."""

_VOCABULARIES_PER_THREAD = 10
"""Most float32 copies of a row of logits in sampling: changed, allowed, masked and likely logits, token counts, tokens
seen, and 8-byte candidates in a list that grows by doubling."""

_MAX_PANEL = 32
"""Most outputs in a weight panel: kPanel of gemm_tile.h. Each thread widens one panel at a time."""

_OTHER = 4 << 20
"""Bytes for Python objects and the allocators' rounding."""


@dataclass(frozen=True, slots=True)
class ForwardMemory:
    """Upper bounds in bytes, by part of the forward."""

    kept: dict[str, int]
    """Memory kept between forwards."""

    passing: dict[str, int]
    """Memory freed at the end of a forward."""

    @property
    def total(self) -> int:
        return sum(self.kept.values()) + sum(self.passing.values())


def largest_forward(
    info: ModelInfo, limits: ForwardLimits, page_size: int, activation_bytes: int, num_threads: int, num_top: int
) -> ForwardMemory:
    """The memory of a forward with as many tokens and rows as `limits` allows.

    activation_bytes: size of one activation element. num_threads: threads of the kernels. num_top: most top-k logprobs
    of a token.
    """
    num_tokens = limits.max_tokens
    num_rows = min(limits.max_seqs, num_tokens)
    num_logit_rows = _num_logit_rows(limits)
    num_blocks = -(-limits.context_length // page_size)  # of the longest sequence
    query_size = info.num_heads * info.head_dim
    kv_size = info.num_kv_heads * info.head_dim

    # forward.cpp: queries, keys and values; attention's output; and the intermediate activations of the feed-forward.
    layer_row = query_size + 2 * kv_size + query_size + info.intermediate_size
    # Plus the cosines and sines of the rotary embedding.
    hidden_row = info.hidden_size * activation_bytes + info.head_dim * _FLOAT
    # The LSE of every head; the output and LSE of rows that share a prefix; lists of tiles; each thread's tile; and
    # the partitions of tiles to be merged.
    num_tiles = (2 * num_rows + num_tokens * info.num_heads // _TILE_QUERIES + 1) * info.num_kv_heads
    attention = (
        num_tokens * info.num_heads * _FLOAT
        + num_rows * (query_size + info.num_heads) * _FLOAT
        + num_tiles * _BYTES_PER_PARTITION
        + num_threads * (3 * _TILE_QUERIES + 2 * _CHUNK_TOKENS) * _MAX_HEAD_DIM * _FLOAT
        + num_threads * _PARTITIONS_PER_THREAD * _TILE_QUERIES * (info.head_dim + 1) * _FLOAT
    )
    # Masks three times: as received, unpickled, and as a tensor.
    masks = 3 * num_rows * num_mask_words(info.vocab_size) * _FLOAT
    # Ids and log-probabilities of sampled tokens and of prompt tokens, and the message that carries them.
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
    """Allocate the kept memory, then allocate, touch and free the passing memory.

    A lack of memory thus fails the start instead of a later forward.
    """
    model.reserve(limits.max_tokens, _num_logit_rows(limits))
    allocate_huge_pages(sum(memory.passing.values())).fill_(1)


def _num_logit_rows(limits: ForwardLimits) -> int:
    """Most rows that pass the LM head together: rows that sample, or rows for prompt logprobs."""
    return max(min(limits.max_seqs, limits.max_tokens), min(limits.max_tokens, LOGPROBS_AT_ONCE))
