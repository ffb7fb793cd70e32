"""What all workers of a replica can do: they run the same steps."""

from collections.abc import Sequence
from dataclasses import astuple

from tokasaurus.messages.lifecycle import EngineLimits, HydragenCosts


def common_limits(limits: Sequence[EngineLimits]) -> EngineLimits:
    """The least capacity, the highest costs and the features that are switched off, of any worker. All have blocks of
    one size."""
    assert len({one.page_size for one in limits}) == 1
    hydragen = HydragenCosts(*map(max, zip(*(astuple(one.hydragen) for one in limits), strict=True)))
    shortest = min(limits, key=lambda one: one.max_tokens_per_sequence)
    return EngineLimits(
        num_kv_blocks=min(one.num_kv_blocks for one in limits),
        page_size=limits[0].page_size,
        max_tokens_per_sequence=shortest.max_tokens_per_sequence,
        hydragen=hydragen,
        seconds_per_token=max(one.seconds_per_token for one in limits),
        limited_by=shortest.limited_by,
        seconds_per_step=max(one.seconds_per_step for one in limits),
        seconds_per_pair=max(one.seconds_per_pair for one in limits),
        switched_off=tuple(dict.fromkeys(name for one in limits for name in one.switched_off)),
    )
