"""Attention of transformers' layers, sent here: one function in the place of its own, for all models.

A layer calls `function(module, query, key, value, mask, **options)`; what answers is set from outside (`answering`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

# T tokens in this forward, H query heads, K key/value heads, D head size

NAME = "tokasaurus"
"""Of attn_implementation."""

COMPUTED = frozenset(("scaling", "sliding_window", "softcap", "s_aux"))
"""Options that AttentionSpec has, by their names in transformers."""
WITHOUT_EFFECT = frozenset(("dropout", "position_ids", "use_cache", "output_attentions", "is_causal"))
"""Options that change nothing of a decoder's layer that does not learn."""

Answers: TypeAlias = Callable[[nn.Module, Tensor, Tensor, Tensor, Any, Mapping[str, Any]], Tensor]
"""Computes the attention of one call, or looks at it: module, query [1, H, T, D], key and value [1, K, T, D], mask and
options -> [1, T, H, D] of the values."""

_answers: Answers | None = None


@contextmanager
def answering(answers: Answers) -> Iterator[None]:
    """Inside, every layer's call is answered so."""
    global _answers  # transformers calls one function for all models
    before, _answers = _answers, answers
    try:
        yield
    finally:
        _answers = before


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    assert _answers is not None, "layers run inside `answering`"
    return _answers(module, query, key, value, attention_mask, options), None


def _mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Any = None, device: Any = None, **_: Any
) -> Tensor:
    """What a layer gets in the place of a mask. Its `sees` says which keys a query may see, as transformers' function
    does: (batch, head, query position, key position), tensors -> bool."""
    mask = torch.empty(1, dtype=torch.bool, device=device).expand(batch_size, 1, q_length, kv_length)
    mask.sees = mask_function  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
