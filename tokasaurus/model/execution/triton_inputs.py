"""What recorded decode steps read, filled by one Triton kernel: `recorded_inputs.fill_inputs_by_torch` is its readable
reference."""

import triton
import triton.language as tl

from tokasaurus.model.attention.backend import BlockLists
from tokasaurus.model.attention.triton_kernels import LIST_BLOCK, list_segment
from tokasaurus.model.execution.recorded_inputs import RecordedInputs, SlotState, StagedRows

# S rows of the step


def fill_inputs(
    staged: StagedRows, slots: SlotState, page_size: int, inputs: RecordedInputs, lists: BlockLists | None
) -> None:
    """As recorded_inputs.fill_inputs_by_torch."""
    num_rows, num_params = inputs.device_params.shape
    _, starts, blocks, last_lengths = inputs.memory
    kv_lengths = inputs.memory.last_lengths if lists is None else lists.kv_lengths
    _fill_row[(num_rows if lists is None else num_rows + 1,)](
        *(*staged, kv_lengths, *slots, slots.block_tables.stride(0)),
        *(inputs.slots, inputs.token_ids, inputs.positions, inputs.memory.kv_indices, inputs.noise_keys),
        *(inputs.device_params, starts, blocks, last_lengths, num_rows),
        HAS_LISTS=lists is not None,
        NUM_PARAMS=num_params,
        PARAMS=triton.next_power_of_2(num_params),
        PAGE_SIZE=page_size,
        BLOCK=LIST_BLOCK,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _fill_row(
    slots, positions, kv_indices, noise_keys, new_blocks, kv_lengths, last_tokens, tokens, row_params, tables,
    table_stride, own_slots, own_token_ids, own_positions, own_kv_indices, own_noise_keys, own_params, starts, blocks,
    last_lengths, num_rows, HAS_LISTS: tl.constexpr, NUM_PARAMS: tl.constexpr, PARAMS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row, and with lists one for the end of the last."""
    row = tl.program_id(0)
    table = tables
    new_block = -1
    if row < num_rows:
        slot = tl.load(slots + row)
        table += slot * table_stride
        token = tl.load(last_tokens + slot)
        kv_index = tl.load(kv_indices + row)
        tl.store(tokens + kv_index, token.to(tl.int32))
        tl.store(own_slots + row, slot)
        tl.store(own_token_ids + row, token)
        tl.store(own_positions + row, tl.load(positions + row))
        tl.store(own_kv_indices + row, kv_index)
        pair = 2 * row + tl.arange(0, 2)
        tl.store(own_noise_keys + pair, tl.load(noise_keys + pair))
        fields = tl.arange(0, PARAMS)
        own_fields = tl.load(row_params + slot * NUM_PARAMS + fields, mask=fields < NUM_PARAMS)
        tl.store(own_params + row * NUM_PARAMS + fields, own_fields, mask=fields < NUM_PARAMS)
        if HAS_LISTS:
            new_block = tl.load(new_blocks + row)
            tl.store(table + (tl.load(kv_lengths + row) - 1) // PAGE_SIZE, new_block, mask=new_block >= 0)
    if HAS_LISTS:
        list_segment(row, num_rows, table, new_block, kv_lengths, starts, blocks, last_lengths, PAGE_SIZE, BLOCK)
