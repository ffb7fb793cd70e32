"""What TRL's AsyncGRPOTrainer takes for granted and this machine lacks: three parts outside its loop are replaced."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@contextmanager
def replaced_parts() -> Iterator[None]:
    """While the trainer is made and runs.

    - It asks CUDA for the name of its device, to look up how fast it is.
    - Its roll-out worker refuses to start unless vLLM is installed, of which it uses nothing: it sends HTTP requests.
    - Its attention calls FlashAttention 3 from the Hub, which is compiled for GPUs only.
    """
    from trl.experimental.async_grpo import async_rollout_worker, packing

    kernels = SimpleNamespace(flash_attn_varlen_func=attend)
    with (
        mock.patch.object(torch.cuda, "get_device_name", return_value="cpu"),
        mock.patch.object(async_rollout_worker, "is_vllm_available", return_value=True),
        mock.patch.object(packing, "_flash_attn", return_value=kernels),
    ):
        yield


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    *_: int,
    softmax_scale: float | None,
    **options: Any,
) -> Tensor:
    """Causal attention within each segment, whose queries are the last of its positions. query: [N, H, D]; key and
    value: [K, H_KV, D]; *_ends: N or K at the end of each segment, and 0 before the first."""
    assert options == {"causal": True, "window_size": (-1, -1)}
    attended = []
    query_ranges, key_ranges = query_ends.tolist(), key_ends.tolist()
    for segment in range(len(query_ranges) - 1):
        queries = query[query_ranges[segment] : query_ranges[segment + 1]].transpose(0, 1)
        keys = key[key_ranges[segment] : key_ranges[segment + 1]].transpose(0, 1)
        values = value[key_ranges[segment] : key_ranges[segment + 1]].transpose(0, 1)
        num_queries, num_keys = queries.shape[1], keys.shape[1]
        is_seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        part = scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=is_seen, scale=softmax_scale, enable_gqa=True
        )
        attended.append(part[0].transpose(0, 1))
    return torch.cat(attended)


def share_of_even_ids(completion_ids: list[list[int]], **_: object) -> list[float]:
    """A reward that a random model can learn in a few steps. In this module, since the worker's process imports it."""
    return [sum(token_id % 2 == 0 for token_id in ids) / len(ids) for ids in completion_ids]
