"""Remembers the beginnings of the prompts that a replica was sent, to guess how much of the next one it has cached."""

from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate, chain, repeat, takewhile

import numpy as np
from numpy.typing import NDArray

CHUNKS_PER_SIZE = 64
FIRST_CHUNK_TOKENS = 16
MAX_TOKENS = 1 << 32

# Chunks of 16 tokens up to token 1,024, then 64 of 64 tokens, 64 of 256 and so on: a prompt of 100,000 tokens has 292.
_SIZES = chain.from_iterable(repeat(FIRST_CHUNK_TOKENS * 4**level, CHUNKS_PER_SIZE) for level in range(16))
CHUNK_ENDS = tuple(takewhile(lambda end: end <= MAX_TOKENS, accumulate(_SIZES)))
"""Tokens up to the end of each chunk."""


def hash_prefixes(prompt_ids: NDArray[np.int32], salt: str) -> list[int]:
    """Hashes of the prompt's prefixes that end with a whole chunk, shortest first.

    prompt_ids: [N]. salt: prompts with different salts share no prefix.
    """
    data = prompt_ids.tobytes()
    hashes, prefix, begin = [], hash(salt), 0
    for tokens in CHUNK_ENDS[: bisect_right(CHUNK_ENDS, len(prompt_ids))]:
        end = tokens * prompt_ids.itemsize
        prefix = hash((prefix, data[begin:end]))
        hashes.append(prefix)
        begin = end
    return hashes


class PrefixIndex:
    """The prefixes of one replica's prompts. Forgets those not used for longest, as the replica's KV cache does.

    max_tokens: tokens of the KV cache. Completions are not counted, so the index may remember more than is cached.
    """

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens = 0
        """Tokens of all remembered prefixes; those of a shared prefix count once."""
        self._max_tokens = max_tokens
        # Tokens of each prefix's last chunk, by hash; least recently used first. A prefix is used after the longer ones
        # that begin with it, and therefore forgotten after them.
        self._chunks: OrderedDict[int, int] = OrderedDict()

    def num_cached_tokens(self, prefixes: list[int]) -> int:
        """Tokens of the longest of these prefixes that is remembered. prefixes: from `hash_prefixes`."""
        num_known = sum(1 for _ in takewhile(self._chunks.__contains__, prefixes))
        return CHUNK_ENDS[num_known - 1] if num_known else 0

    def add(self, prefixes: list[int]) -> None:
        """The replica is sent a prompt with these prefixes."""
        for index in range(len(prefixes) - 1, -1, -1):
            prefix = prefixes[index]
            if prefix not in self._chunks:
                tokens = CHUNK_ENDS[index] - (CHUNK_ENDS[index - 1] if index else 0)
                self._chunks[prefix] = tokens
                self.num_tokens += tokens
            self._chunks.move_to_end(prefix)
        while self.num_tokens > self._max_tokens:
            _, tokens = self._chunks.popitem(last=False)
            self.num_tokens -= tokens
