"""The largest steps of every kind fit in one buffer, at the limits of a real server."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.model.helpers.pretend_device import DEVICE, PretendEvent, PretendTransfers, pretended
from tokasaurus.messages.forward import ForwardInput, TokenMasks
from tokasaurus.model.attention.backend import KVShape
from tokasaurus.model.attention.torch_backend import TorchBackend
from tokasaurus.model.execution.device_batch import build_batch
from tokasaurus.model.execution.slot_table import SlotTable, SlotTableSize
from tokasaurus.model.staging.packed import RING_SIZE, PackedStaging
from tokasaurus.model.staging.sizes import sizes_for
from tokasaurus.model.worker.warmup import ForwardLimits, decode_after, longest_last_tokens, widest_prefill

PAGE_SIZE = 16
LIMITS = {
    "Llama 3": ForwardLimits(max_tokens=8192, max_seqs=1024, context_length=8192, vocab_size=128_256),
    "many rows": ForwardLimits(max_tokens=4096, max_seqs=4096, context_length=1024, vocab_size=32_000),
    "few rows": ForwardLimits(max_tokens=16_384, max_seqs=16, context_length=32_768, vocab_size=151_936),
}


class Counting(PretendTransfers):
    """Remembers the bytes of each upload."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: list[int] = []

    def upload(self, source: torch.Tensor, target: torch.Tensor, after: PretendEvent) -> PretendEvent:
        self.num_bytes.append(source.numel())
        return super().upload(source, target, after)


def with_masks(step: ForwardInput, limits: ForwardLimits) -> ForwardInput:
    """A mask for every row."""
    num_rows = len(step.slots)
    bits = np.full((num_rows, -(-limits.vocab_size // 32)), 0xFFFFFFFF, np.uint32)
    return dataclasses.replace(step, masks=TokenMasks(np.arange(num_rows, dtype=np.int32), bits))


@pytest.mark.parametrize("name", LIMITS)
def test_the_largest_steps_fit_in_one_buffer_and_fill_a_good_part_of_it(name: str) -> None:
    limits = LIMITS[name]
    sizes = sizes_for(limits.max_tokens, limits.max_seqs, limits.vocab_size, num_top=20)
    widest = widest_prefill(limits)
    steps = [widest, decode_after(widest), longest_last_tokens(limits)]
    with pretended():
        transfers = Counting()
        staging = PackedStaging(transfers, sizes.inputs)
        slots = SlotTable(SlotTableSize(limits.max_seqs + 1, limits.context_length // PAGE_SIZE), DEVICE)
        slots.rules.allocate(PAGE_SIZE)
        backend = TorchBackend(KVShape(1, 2, 1, 8, PAGE_SIZE, torch.float32, DEVICE, torch.float32))
        backend.allocate(1)
        for step in steps:
            staging.begin()
            slots.apply(step.changes, staging)
            batch = build_batch(with_masks(step, limits), slots, PAGE_SIZE, staging)
            backend.plan(batch.layout)
            staging.send()
            staging.finish()
    assert len(transfers.buffers) == 2 * RING_SIZE, "no buffer was added"
    assert len(transfers.num_bytes) == len(steps)
    assert sizes.inputs / 2 < max(transfers.num_bytes) <= sizes.inputs
