"""From the tensors that the layers have to those that a family's checkpoint stores: other names, fused tensors, norms
by 1 + weight, and another order of the channels of queries and keys.

The scores are products of queries and keys, so that both may have their channels in any order. Rotary embedding here
turns channels half a head apart, all of them: where a family turns adjacent ones, or only the first ones of each head,
the rows of both projections change places, and the channels that stay have the frequency 0.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.checkpoint.families import FAMILIES, StoredTensors
from tokasaurus.checkpoint.families.family import ExpertStack
from tokasaurus.checkpoint.spec import AttentionSpec, ExpertsSpec, GatedDeltaSpec, LayerSpec
from tokasaurus.model.decoder.weights import WeightShard

_OF_EXPERT = re.compile(r"mlp\.experts\.([0-9]+)\.(.+)")
_ROTATED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.q_norm", "self_attn.k_norm")


def as_stored(shards: list[WeightShard], info: ModelInfo) -> list[WeightShard]:
    """shards: with the names of modules here."""
    stored = FAMILIES[info.family].stored
    if stored == StoredTensors() and all(rope.partial_factor == 1 for rope in info.spec.rotary):
        return shards
    return [_as_stored(shard, stored, info) for shard in shards]


def _as_stored(shard: WeightShard, stored: StoredTensors, info: ModelInfo) -> WeightShard:
    path, _, kind = shard.source.rpartition(".")
    prefix, module, layer = "", path, 0
    if path.startswith("model.layers."):
        _, _, index, module = path.split(".", 3)
        prefix, layer = f"model.layers.{index}.", int(index)
    if info.stacks_experts and (expert := _OF_EXPERT.fullmatch(module)) and stored.stack is not None:
        return _in_stack(shard, stored.stack, prefix, int(expert[1]), f"{expert[2]}.{kind}", info.spec.layers[layer])
    name, before = stored.place(module)
    shape, part = shard.shape, shard.shard
    if name in stored.fused:
        sizes = _sizes(info.spec.layers[layer], stored)
        offset, total = sum(sizes[each] for each in before), sum(sizes[each] for each in stored.fused[name])
        shape = (total, *shape[1:])
        if part:
            part = (slice(part[0].start + offset, part[0].stop + offset), *part[1:])
    elif stored.norms_by_head and module in ("self_attn.q_norm", "self_attn.k_norm"):
        attention = info.spec.layers[layer].own_attention
        shape = (prod(shape) // attention.head_dim, attention.head_dim)
        if part:
            part = (slice(part[0].start // attention.head_dim, part[0].stop // attention.head_dim), slice(None))
    elif stored.has_choice_bias_row and module == "mlp.choice":
        shape, part = (1, *shape), (slice(None), *part)
    order = None
    if module in _ROTATED and shard.target is not None:
        order = _order_of_heads(shard, info, info.spec.layers[layer].own_attention, stored)
    if name in stored.by_head and part:
        by_head, part = _by_head(shard, stored, info.spec.layers[layer], name, before)
        order = by_head if order is None else by_head[order]
    factor = dict(info.spec.layers[layer].weight_factors).get(f"{module}.{kind}", 1.0)
    kind = stored.choice_bias if module == "mlp.choice" else kind
    is_norm = len(shard.shape) == 1 and "_proj" not in module and kind == "weight" and module != "state.norm"
    return replace(
        shard,
        source=f"{prefix}{name}.{kind}",
        shape=shape,
        shard=part,
        order=order,
        factor=factor,
        take_blocks=shard.take_blocks if factor == 1 else None,
        added=1.0 if stored.adds_one and is_norm else 0.0,
        is_flattened=shard.is_flattened or (shape != shard.shape and len(shape) != len(shard.shape)),
    )


def _sizes(layer: LayerSpec, stored: StoredTensors) -> dict[str, int]:
    """Output features of modules that are stored with others."""
    if stored.is_shared_alone and isinstance(layer.mlp, ExpertsSpec) and layer.mlp.shared is not None:
        layer = replace(layer, mlp=layer.mlp.shared)
    return layer.output_sizes


def _by_head(
    shard: WeightShard, stored: StoredTensors, layer: LayerSpec, name: str, before: Sequence[str]
) -> tuple[Tensor, tuple[slice, ...]]:
    """The rows of a module that are stored head by head with those of others -> `order` of WeightShard, and the part of
    the tensor that has the rank's heads. before: the modules whose rows come first in each head."""
    if name.startswith("self_attn"):
        num_heads = layer.own_attention.num_heads
    else:
        assert isinstance(layer.state, GatedDeltaSpec)
        num_heads = layer.state.num_key_heads
    sizes = {module: layer.output_sizes[module] // num_heads for module in stored.fused[name]}
    whole, offset, own = sum(sizes.values()), sum(sizes[each] for each in before), shard.shape[0] // num_heads
    first, end = shard.shard[0].start // own, shard.shard[0].stop // own
    order = torch.arange(end - first).unsqueeze(1) * whole + offset + torch.arange(own)
    return order.flatten(), (slice(first * whole, end * whole), *shard.shard[1:])


def _order_of_heads(
    shard: WeightShard, info: ModelInfo, attention: AttentionSpec, stored: StoredTensors
) -> Tensor | None:
    """As of WeightShard, of the rows of queries or keys."""
    if attention.rotary is None:
        return None
    channels = channel_order(attention, info.spec.rotary[attention.rotary].num_rotated(attention.head_dim), stored)
    num_rows = len(range(*shard.shard[0].indices(shard.shape[0])))  # a packed weight's target is empty
    heads = torch.arange(0, num_rows, attention.head_dim).unsqueeze(1)
    return None if channels is None else (heads + channels).flatten()


def _in_stack(
    shard: WeightShard, stack: ExpertStack, prefix: str, expert: int, own: str, layer: LayerSpec
) -> WeightShard:
    """own: the part's name within the expert, such as "up_proj.weight"."""
    assert isinstance(layer.mlp, ExpertsSpec)
    is_bias, is_down, is_up = own.endswith("bias"), own.startswith("down"), own.startswith("up")
    source = f"{prefix}{stack.down if is_down else stack.gate_up}{'_bias' if is_bias else ''}"
    shape, part, order = shard.shape, shard.shard, None
    if not is_down:
        width = shape[0]
        shape = (2 * width, *shape[1:])
        if part and stack.takes_turns:
            part = (slice(2 * part[0].start, 2 * part[0].stop), *part[1:])
            order = torch.arange(int(is_up), part[0].stop - part[0].start, 2)
        elif part:
            part = (slice(part[0].start + is_up * width, part[0].stop + is_up * width), *part[1:])
    is_transposed = stack.is_transposed and not is_bias
    if is_transposed:
        shape, part = shape[::-1], part[::-1]
    return replace(
        shard,
        source=source,
        shape=(layer.mlp.router.num_experts, *shape),
        shard=(slice(expert, expert + 1), *part) if part else (),
        order=order,
        is_flattened=is_bias,
        is_stacked=not is_bias,
        is_transposed=is_transposed,
    )


def channel_order(attention: AttentionSpec, num_rotated: int, stored: StoredTensors) -> Tensor | None:
    """int64 [D]: which of a stored head's channels each channel here is; None if they are the same."""
    channels, rest = torch.arange(num_rotated), torch.arange(num_rotated, attention.head_dim)
    pairs = channels.view(-1, 2) if stored.is_interleaved else channels.view(2, -1).T
    unturned = rest.view(2, -1)
    order = torch.cat((pairs[:, 0], unturned[0], pairs[:, 1], unturned[1]))
    return None if torch.equal(order, torch.arange(attention.head_dim)) else order
