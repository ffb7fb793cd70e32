"""What recorded decode steps read, against a slow oracle."""

import itertools
from collections.abc import Callable

import numpy as np
import torch

from tests.model.attention.helpers.kernel_checks import unfilled_lists
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.model.attention.backend import RecordedMemory
from tokasaurus.model.attention.block_lists import lists_in
from tokasaurus.model.execution.recorded_inputs import RecordedInputs, SlotState, StagedRows

NUM_PARAMS = len(SamplingParams._fields)


def check_inputs(
    seed: int, device: torch.device, num_rows: int, page_size: int, fill: Callable[..., None], max_blocks: int = 5
) -> None:
    """Rows of random slots and lengths, the last of them padding of slot 0; what lies after them stays as it is."""
    rng = np.random.default_rng(seed)
    num_slots, num_padding = num_rows + 5, num_rows // 3
    slots = np.concatenate((1 + rng.permutation(num_slots - 1)[: num_rows - num_padding], np.zeros(num_padding, int)))
    lengths = rng.integers(1, max_blocks * page_size + 1, num_rows).astype(np.int32)
    lengths[num_rows - num_padding :] = 1
    tables = rng.integers(0, 2**31 - 1, (num_slots, max_blocks + 2), dtype=np.int32)
    last_tokens, params = rng.integers(0, 2**17, num_slots), rng.integers(0, 2**31, (num_slots, NUM_PARAMS))
    kv_indices = page_size + rng.permutation(9 * num_rows)[:num_rows]
    kv_indices[num_rows - num_padding :] = 0
    new_blocks = np.where(rng.random(num_rows) < 0.4, rng.integers(0, 2**31 - 1, num_rows), -1).astype(np.int32)
    new_blocks[num_rows - num_padding :] = -1
    noise_keys, positions = rng.integers(0, 2**32, (num_rows, 2)), lengths.astype(np.int64) - 1

    def sent(array: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.from_numpy(array).to(device, dtype)

    last = (lengths - 1) // page_size
    with_new = tables.copy()
    for slot, column, block in zip(slots, last, new_blocks, strict=True):
        if block >= 0:
            with_new[slot, column] = block
    own = [
        with_new[slot, : -(-length // page_size)].tolist()
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True)
    ]
    starts = [0, *itertools.accumulate(map(len, own))]
    last_lengths = [length - (len(ids) - 1) * page_size for length, ids in zip(lengths.tolist(), own, strict=True)]
    for has_lists in (False, True):
        largest = RecordedInputs.allocate(
            num_rows + 2, num_rows + 3, RecordedMemory.allocate(num_rows + 2, max_blocks, device), device
        )
        inputs = largest.cut(num_rows)
        lists = unfilled_lists(torch.tensor(starts, dtype=torch.int32), torch.from_numpy(lengths), device)
        tokens = torch.full((page_size + 9 * num_rows,), -1, dtype=torch.int32, device=device)
        state = SlotState(sent(last_tokens), tokens, sent(params, torch.int32), sent(tables.copy(), torch.int32))
        rows = StagedRows(
            sent(slots), sent(positions), sent(kv_indices), sent(noise_keys), sent(new_blocks, torch.int32)
        )
        fill(rows, state, page_size, inputs, lists_in(inputs.memory, lists) if has_lists else None)
        assert state.block_tables.tolist() == (with_new if has_lists else tables).tolist()
        assert inputs.slots.tolist() == slots.tolist()
        assert inputs.token_ids.tolist() == [last_tokens[slot] for slot in slots]
        assert inputs.positions.tolist() == positions.tolist()
        assert inputs.noise_keys.tolist() == noise_keys.tolist()
        assert inputs.device_params.tolist() == [params[slot].tolist() for slot in slots]
        assert inputs.memory.kv_indices.tolist() == kv_indices.tolist()
        stored = {int(index): int(last_tokens[slot]) for index, slot in zip(kv_indices, slots, strict=True)}
        assert {index: token for index, token in enumerate(tokens.tolist()) if token >= 0} == stored
        filled = inputs.memory.starts.tolist(), inputs.memory.last_lengths.tolist(), largest.memory.blocks.tolist()
        num_after = len(filled[2]) - starts[-1]
        expected = starts, last_lengths, [block for ids in own for block in ids] + [0] * num_after
        assert filled == (expected if has_lists else tuple([0] * len(values) for values in expected))
        for tensor in (largest.slots, largest.token_ids, largest.positions, largest.device_params):
            assert not tensor[num_rows:].any()
