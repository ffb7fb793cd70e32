"""A straightforward decode attention kernel compiled by numba, with its own KV cache layout, for comparison."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# S sequences, H query heads, K key/value heads, D head size, P tokens per block, B blocks per sequence


def make_decode(
    query: Tensor, caches: list[tuple[Tensor, Tensor]], block_table: Tensor, num_tokens: int
) -> list[Callable[[], NDArray[np.float32]]]:
    """One call per cache: each row attends to the first `num_tokens` tokens of its blocks -> float32 [S, H, D].

    query: bfloat16 [S, H, D]. caches: keys and values of each layer, bfloat16 [blocks, K, P, D].
    block_table: int32 [S, B]. The first call compiles. numba has no bfloat16, so the kernel widens the bits to float32.
    """
    import numba  # type: ignore[import-not-found, import-untyped, unused-ignore]

    @numba.njit(parallel=True, fastmath=True)  # type: ignore[untyped-decorator, unused-ignore]
    def attend(query: Any, keys: Any, values: Any, table: Any, num_tokens: int) -> Any:
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads, page_size = keys.shape[1], keys.shape[2]
        group = num_heads // num_kv_heads
        out = np.zeros((num_rows, num_heads, head_dim), np.float32)
        for item in numba.prange(num_rows * num_kv_heads):
            row, kv_head = item // num_kv_heads, item % num_kv_heads
            scores = np.empty((group, num_tokens), np.float32)
            wide = np.empty(head_dim, np.uint32)
            for token in range(num_tokens):
                key = keys[table[row, token // page_size], kv_head, token % page_size]
                for d in range(head_dim):
                    wide[d] = np.uint32(key[d]) << np.uint32(16)
                numbers = wide.view(np.float32)
                for i in range(group):
                    total = np.float32(0)
                    for d in range(head_dim):
                        total += query[row, kv_head * group + i, d] * numbers[d]
                    scores[i, token] = total
            for i in range(group):
                scores[i] = np.exp((scores[i] - scores[i].max()) * np.float32(1 / math.sqrt(head_dim)))
                scores[i] /= scores[i].sum()
            for token in range(num_tokens):
                value = values[table[row, token // page_size], kv_head, token % page_size]
                for d in range(head_dim):
                    wide[d] = np.uint32(value[d]) << np.uint32(16)
                numbers = wide.view(np.float32)
                for i in range(group):
                    for d in range(head_dim):
                        out[row, kv_head * group + i, d] += scores[i, token] * numbers[d]
        return out

    def bits(tensor: Tensor) -> NDArray[np.uint16]:
        array: NDArray[np.uint16] = tensor.contiguous().view(torch.uint16).numpy()
        return array

    rows, table = query.float().numpy(), block_table.numpy()

    def call(keys: NDArray[np.uint16], values: NDArray[np.uint16]) -> Callable[[], NDArray[np.float32]]:
        def run() -> NDArray[np.float32]:
            attended: NDArray[np.float32] = attend(rows, keys, values, table, num_tokens)
            return attended

        return run

    return [call(bits(keys), bits(values)) for keys, values in caches]
