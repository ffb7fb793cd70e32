"""Attention of transformers' layers, sent here: one function in the place of its own, for all models.

A layer calls `function(module, query, key, value, mask, **options)`; what answers is set from outside (`answering`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from tokasaurus.checkpoint.spec import AttentionSpec
from tokasaurus.model.attention.row_split import Attends
from tokasaurus.model.decoder.decoder import zero_nonfinite
from tokasaurus.model.parallel.collectives import gather_shards
from tokasaurus.model.parallel.mesh import Mesh

# T tokens, H query heads, K key/value heads, D head size

NAME = "tokasaurus"
"""Of attn_implementation."""

COMPUTED = frozenset(("scaling", "sliding_window", "softcap", "s_aux"))
"""Options that AttentionSpec has, by their names in transformers."""
WITHOUT_EFFECT = frozenset(("dropout", "position_ids", "use_cache", "output_attentions", "is_causal"))
"""Options that change nothing of a decoder's layer that does not learn."""


class Answers(Protocol):
    """Computes the attention of one call, or looks at it."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Mapping[str, Any], /
    ) -> Tensor:
        """query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D] of the values."""


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


class Mask(torch.Tensor):
    """What a layer gets in the place of a mask: which keys a query may see, as transformers' function says it."""

    sees: Any
    """(batch, head, query position, key position), tensors -> bool."""


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any = None,
    device: Any = None,
    **_: Any,
) -> Tensor:
    mask = torch.empty((batch_size, 1, q_length, kv_length), dtype=torch.bool, device=device).as_subclass(Mask)
    mask.sees = mask_function
    return mask


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


class PagedAnswers:
    """Answers the calls of one rank's layers by paged attention."""

    def __init__(
        self, specs: tuple[AttentionSpec, ...], sinks: tuple[Tensor | None, ...], dtype: torch.dtype, mesh: Mesh
    ) -> None:
        """sinks: as in KVShape, filled by each call: new weights may have changed them. dtype: of what attention
        takes."""
        self._specs = specs
        self._dtype = dtype
        self._sinks = sinks
        self._mesh = mesh
        self._layer_of: dict[nn.Module, int] = {}
        """In the order of their first calls, which is that of the probe."""
        self.attends: Attends | None = None

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,  # noqa: ARG002  (the probe has looked at it)
        options: Mapping[str, Any],
    ) -> Tensor:
        """Heads are the rank's, or those of all ranks."""
        assert self.attends is not None
        layer, mesh = self._layer_of.setdefault(module, len(self._layer_of)), self._mesh
        spec, sinks = self._specs[layer], self._sinks[layer]
        own, own_kv = (
            slice(start, start + length)
            for start, length in (mesh.shard(spec.num_heads, "heads"), mesh.kv_head_shard(spec.num_kv_heads))
        )
        has_all = query.shape[1] == spec.num_heads
        if sinks is not None:
            sinks.copy_(options["s_aux"][own] if has_all else options["s_aux"])
        value_dim, dtype = value.shape[-1], value.dtype
        query, key, value = (_by_token(each.to(self._dtype), spec.head_dim) for each in (query, key, value))
        num_kv_heads = spec.num_kv_heads if has_all else own_kv.stop - own_kv.start
        if key.shape[1] < num_kv_heads:  # layers with fewer have each as often as the others need
            key, value = (each.repeat_interleave(num_kv_heads // each.shape[1], dim=1) for each in (key, value))
        if has_all:
            query, key, value = query[:, own], key[:, own_kv], value[:, own_kv]
        key, value, is_finite = zero_nonfinite(key, value)
        attended = self.attends(query.contiguous(), key.contiguous(), value.contiguous(), layer)
        attended = torch.where(is_finite[:, None, None], attended, torch.nan)[..., :value_dim]
        if has_all:
            attended = gather_shards(attended, mesh).movedim(0, 1).flatten(1, 2)
        return attended.unsqueeze(0).to(dtype)


def _by_token(heads: Tensor, head_dim: int) -> Tensor:
    """[1, heads, T, d] -> [T, heads, D]; a head that is smaller is filled with zeros, which change no score."""
    by_token = nn.functional.pad(heads[0].transpose(0, 1), (0, head_dim - heads.shape[-1]))
    return torch.unflatten(by_token.flatten(1), 1, (-1, head_dim))  # a single head has its stride, too
