"""Build the tensors of one forward from its ForwardInput and the state of the slots.

Among them is the layout: which tokens rows attend to, and in which blocks these are.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.messages.forward import ForwardInput, PromptLogprobsInput
from tokasaurus.model.attention.backend import BlockLists, PagedLayout, PagedPart, RecordedMemory
from tokasaurus.model.attention.block_lists import fill_lists
from tokasaurus.model.buffer_sizes import LOGPROBS_AT_ONCE, padded_count
from tokasaurus.model.execution.recorded_inputs import RecordedInputs, SlotState, StagedRows, fill_inputs_by_torch
from tokasaurus.model.execution.slot_table import SlotTable
from tokasaurus.model.sampling.noise import position_keys
from tokasaurus.model.sampling.prompt_logprobs import PromptLogprobTargets
from tokasaurus.model.sampling.rules import (
    ChosenRows,
    DeviceMasks,
    RuledRows,
    choose_rows,
    limited_rows,
    stage_masks,
)
from tokasaurus.model.sampling.sample import SamplingRows, TopRows
from tokasaurus.model.staging.staging import Staging
from tokasaurus.model.triton_choice import uses_triton

# T tokens, S rows of the batch (one per running slot), R rows that sample; T and R with padding, if any; A rows of one
# part of the layout


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One forward on the device. Tokens, and rows that pass the LM head, may be padded to one of few counts.

    Below, N = num_sampled: only the first N of the R rows are sampled; the others are padding.
    """

    token_ids: Tensor
    """int64 [T]."""

    positions: Tensor
    """int64 [T]."""

    logit_rows: Tensor
    """int64 [R], indices into T of the rows that pass the LM head to be sampled."""

    num_sampled: int
    sampled_slots: Tensor
    """int64 [N], slots whose last token becomes the sampled one."""

    host_sampled_slots: NDArray[np.int32]
    """int32 [N], the same, on the host."""

    layout: PagedLayout
    sampling: SamplingRows
    """Sampling parameters of the N rows."""

    want_logprobs: NDArray[np.bool_]
    """bool [N], on the host."""

    sampled_tokens: NDArray[np.int64]
    """int64 [N], the first N of logit_rows, on the host."""

    token_slots: NDArray[np.int32]
    """int32 [T without padding], each token's slot; on the host."""

    token_positions: NDArray[np.int64]
    """int64 [T without padding], on the host."""

    token_blocks: NDArray[np.int32]
    """int32 [T without padding], the block of each token's position; on the host."""

    prompt_logprobs: PromptLogprobTargets | None = None
    """Prompt tokens whose logprobs are computed; None if there are none."""


def build_batch(
    step: ForwardInput,
    slots: SlotTable,
    page_size: int,
    staging: Staging,
    is_padded: bool = True,
    token_multiple: int = 1,
    inputs: RecordedInputs | None = None,
    prefixes: RecordedMemory | None = None,
) -> DeviceBatch:
    """The batch of `step`, whose device tensors are filled once `staging` has sent them. Advances the slots' positions
    past the step.

    Precondition: the changes of `step` are already applied to `slots`.
    is_padded: pad tokens and logit rows to one of few counts; the number of tokens becomes a multiple of
    token_multiple. inputs: memory of a recorded size, to which the tokens are padded instead. If `step` only decodes,
    in as many rows as it has, which all sample, what is read of the rows is there too. prefixes: memory of a recording
    with prefix groups, for as many as it has; `step` has no more, and the layout is for that recording.
    """
    to_device = staging.to_device
    first_positions = slots.positions[step.slots]
    kv_lengths = first_positions + step.num_tokens
    slots.positions[step.slots] = kv_lengths
    starts = np.zeros(len(step.slots) + 1, np.int32)
    np.cumsum(step.num_tokens, out=starts[1:])

    token_rows = np.repeat(np.arange(len(step.slots)), step.num_tokens)
    token_positions = np.arange(starts[-1]) - starts[token_rows] + first_positions[token_rows]
    token_blocks = slots.block_tables[step.slots[token_rows], token_positions // page_size]
    blocks = token_blocks.copy()
    # Recomputed KV goes to the padding block: other slots may be reading the blocks that contain it already.
    blocks[token_positions < slots.first_writes[step.slots][token_rows]] = 0
    kv_indices = blocks.astype(np.int64) * page_size + token_positions % page_size

    def pad(count: int, multiple: int = 1) -> NDArray[np.int64]:
        return np.zeros(padded_count(count, multiple) - count if is_padded else 0, np.int64)

    # Token 0 at position 0, its key and value in the padding block.
    own_tokens = int(starts[-1])
    padding = pad(own_tokens, token_multiple)
    if inputs is not None:
        padding = np.zeros(len(inputs.token_ids) - own_tokens, np.int64)
    all_kv_indices = to_device(np.concatenate((kv_indices, padding)))
    positions = to_device(np.concatenate((token_positions, padding)))
    # A step with prompts, or with more rows than these, has only its tokens there.
    are_rows_inside = inputs is not None and step.num_decode == len(step.slots) == len(inputs.slots)
    if inputs is None:
        token_ids = torch.empty(len(all_kv_indices), dtype=torch.int64, device=all_kv_indices.device)
    else:
        token_ids = inputs.token_ids
    if not are_rows_inside:
        decode_slots = to_device(step.slots[: step.num_decode].astype(np.int64))
        prompt_ids = to_device(np.concatenate((step.prompt_ids, padding)))

        def fill_token_ids() -> None:
            torch.cat((slots.last_tokens[decode_slots], prompt_ids), out=token_ids)
            slots.rules.tokens[all_kv_indices] = token_ids.int()

        staging.then(fill_token_ids)
    if inputs is not None and not are_rows_inside:
        staging.then(partial(inputs.positions.copy_, positions))
        staging.then(partial(inputs.memory.kv_indices.copy_, all_kv_indices))

    # A decode row is past its prompt; a prefill row samples if its chunk ends the prompt.
    samples = kv_lengths >= slots.num_prompt_tokens[step.slots]
    sampled_slots = step.slots[samples]
    device_slots = to_device(sampled_slots.astype(np.int64))
    params = slots.sampling.take(sampled_slots)  # several times as fast as indexing a structured array
    want_logprobs = slots.want_logprobs[sampled_slots]
    any_logprobs = bool(want_logprobs.any())
    noise_keys = to_device(position_keys(slots.noise_keys[sampled_slots], kv_lengths[samples]).astype(np.int64))
    first_blocks = partial(slots.first_blocks, staging=staging)
    rules = slots.rules.select(sampled_slots, kv_lengths[samples], first_blocks, page_size, staging)
    masks = None if step.masks is None else stage_masks(step.masks, staging)
    memory = inputs.memory if inputs is not None and are_rows_inside else None
    builder = _LayoutBuilder(step, slots, starts, kv_lengths, page_size, staging, memory, prefixes)
    if inputs is None or not are_rows_inside:
        layout, device_params = builder.build(all_kv_indices), slots.device_params(params, device_slots, staging)
    else:
        assert len(sampled_slots) == len(inputs.slots), "each decode row samples"
        layout = builder.build(inputs.memory.kv_indices)
        lists = layout.parts[0].lists if builder.is_in_memory else None
        new_blocks = np.full(len(step.slots), -1, np.int32)
        if lists is not None and rules is None and slots.on_device is not None:  # rules read the tables before
            new_blocks = slots.on_device.take_appended(step.slots, (kv_lengths - 1) // np.int32(page_size))
        staged = StagedRows(device_slots, positions, all_kv_indices, noise_keys, to_device(new_blocks))
        staging.then(partial(fill_inputs, staged, slots.state(), page_size, inputs, lists))
        device_slots, positions = inputs.slots, inputs.positions
        noise_keys, device_params = inputs.noise_keys, inputs.device_params
    sampling = SamplingRows(
        params=params,
        device_params=device_params,
        noise_keys=noise_keys,
        any_logprobs=any_logprobs,
        limited=limited_rows(slots.is_limited[sampled_slots], staging),
        rules=rules,
        top=_top_rows(slots.num_top_logprobs[sampled_slots], staging) if any_logprobs else None,
        masks=masks,
        as_sampled=_rows_as_sampled(sampled_slots, slots, want_logprobs, rules, masks, staging)
        if any_logprobs
        else None,
    )
    logit_rows = starts[1:][samples].astype(np.int64) - 1
    prompt_logprobs = None
    if step.prompt_logprobs is not None:
        rows = _logprob_rows(step.prompt_logprobs, starts)
        # Pad only the last group of LOGPROBS_AT_ONCE rows that pass the LM head together: full groups need no padding.
        rows = np.concatenate((rows, pad(len(rows) % LOGPROBS_AT_ONCE)))
        prompt_logprobs = PromptLogprobTargets(
            to_device(rows), to_device(step.prompt_logprobs.target_ids), step.prompt_logprobs.num_top
        )
    return DeviceBatch(
        token_ids=token_ids,
        positions=positions,
        logit_rows=to_device(np.concatenate((logit_rows, pad(len(logit_rows))))),
        num_sampled=len(logit_rows),
        sampled_slots=device_slots,
        host_sampled_slots=sampled_slots,
        layout=layout,
        sampling=sampling,
        want_logprobs=want_logprobs,
        sampled_tokens=logit_rows,
        token_slots=step.slots[token_rows],
        token_positions=token_positions,
        token_blocks=token_blocks,
        prompt_logprobs=prompt_logprobs,
    )


def fill_inputs(
    staged: StagedRows, slots: SlotState, page_size: int, inputs: RecordedInputs, lists: BlockLists | None
) -> None:
    """`fill_inputs_by_torch`, in one launch where Triton is installed."""
    if uses_triton(inputs.slots.device, "steps"):
        from tokasaurus.model.execution import triton_inputs

        triton_inputs.fill_inputs(staged, slots, page_size, inputs, lists)
    else:
        fill_inputs_by_torch(staged, slots, page_size, inputs, lists)


def _logprob_rows(prompt_logprobs: PromptLogprobsInput, starts: NDArray[np.int32]) -> NDArray[np.int64]:
    """Rows of the forward whose next prompt token's logprob is computed: int64 [Q]."""
    rows = np.arange(len(prompt_logprobs.target_ids))
    rows += np.repeat(
        starts[prompt_logprobs.rows] - (np.cumsum(prompt_logprobs.counts) - prompt_logprobs.counts),
        prompt_logprobs.counts,
    )
    return rows


def _top_rows(counts: NDArray[np.int32], staging: Staging) -> TopRows | None:
    """counts: int32 [R], number of top-k logprobs that each row asked for. None if no row asked."""
    rows = np.flatnonzero(counts)
    return TopRows(choose_rows(rows, staging), int(counts.max())) if len(rows) else None


def _rows_as_sampled(
    sampled_slots: NDArray[np.int32],
    slots: SlotTable,
    want_logprobs: NDArray[np.bool_],
    rules: RuledRows | None,
    masks: DeviceMasks | None,
    staging: Staging,
) -> ChosenRows | None:
    """The rows with logprobs of the distribution that their tokens are drawn from, where this is not the model's own;
    None if there are none. sampled_slots: int32 [R]. want_logprobs: bool [R]."""
    asked = slots.logprobs_as_sampled[sampled_slots] & want_logprobs
    if not asked.any():
        return None
    temperatures = slots.sampling["temperature"][sampled_slots]
    is_changed = slots.is_limited[sampled_slots] | ((temperatures != 0) & (temperatures != 1))
    for part in (rules, masks):
        if part is not None:
            is_changed[part.rows.on_host] = True
    rows = np.flatnonzero(asked & is_changed)
    return choose_rows(rows, staging) if len(rows) else None


class _LayoutBuilder:
    """Builds the parts of one forward.

    starts: int32 [S + 1], the first token of each row among the forward's tokens, and the end of the last.
    kv_lengths: int32 [S], tokens of each row's context, including the forward's. memory: of a recorded step's rows.
    prefixes: as in build_batch.
    """

    def __init__(
        self,
        step: ForwardInput,
        slots: SlotTable,
        starts: NDArray[np.int32],
        kv_lengths: NDArray[np.int32],
        page_size: int,
        staging: Staging,
        memory: RecordedMemory | None,
        prefixes: RecordedMemory | None,
    ) -> None:
        self._step = step
        self._slots = slots
        self._starts = starts
        self._kv_lengths = kv_lengths
        self._page_size = page_size
        self._staging = staging
        self._memory = memory
        self._prefixes = prefixes
        self.is_in_memory = (
            memory is not None and slots.on_device is not None and step.groups is None and len(memory.blocks) > 0
        )
        """Whether the only part's lists are in `memory`, which the caller fills."""

    def build(self, kv_indices: Tensor) -> PagedLayout:
        """Parts, each omitted if empty: grouped decode rows over the tokens after their prefix; the other decode rows;
        the prefill rows. For a recording with prefix groups the first has all rows; those in no group have no prefix.
        kv_indices: as in PagedLayout."""
        step, starts = self._step, self._starts
        num_grouped, prefix = 0, None
        skipped = np.zeros(len(step.slots), np.int32)  # blocks of each row that the prefix part covers
        if step.groups is not None:
            num_grouped = int(step.groups.sizes.sum())
            skipped[:num_grouped] = np.repeat(step.groups.num_blocks, step.groups.sizes)
            prefix = self._prefix_part()
        if self._prefixes is not None:
            num_grouped = len(step.slots)
        parts = []
        for begin, end in ((0, num_grouped), (num_grouped, step.num_decode), (step.num_decode, len(step.slots))):
            if begin == end:
                continue
            is_partial = end == num_grouped
            parts.append(
                self._part(
                    first_row=int(starts[begin]),
                    row_slots=step.slots[begin:end],
                    first_blocks=skipped[begin:end] if is_partial else None,
                    query_starts=starts[begin : end + 1] - starts[begin],
                    kv_lengths=self._kv_lengths[begin:end] - skipped[begin:end] * np.int32(self._page_size),
                    causal=True,
                    is_partial=is_partial,
                    memory=None if self._prefixes is None else self._memory,
                )
            )
        return PagedLayout(kv_indices, tuple(parts), prefix, self._staging)

    def _prefix_part(self) -> PagedPart:
        """One segment per group; its blocks are the first blocks in the table of the group's first row. In a recording,
        segments without rows and tokens follow."""
        groups, memory = self._step.groups, self._prefixes
        assert groups is not None
        sizes, num_blocks = groups.sizes, groups.num_blocks
        if memory is not None:
            padding = np.zeros(len(memory.last_lengths) - len(sizes), np.int32)
            sizes, num_blocks = (np.concatenate((of_groups, padding)) for of_groups in (sizes, num_blocks))
        query_starts = np.zeros(len(sizes) + 1, np.int32)
        np.cumsum(sizes, out=query_starts[1:])
        return self._part(
            first_row=0,
            row_slots=self._step.slots[np.minimum(query_starts[:-1], len(self._step.slots) - 1)],
            first_blocks=None,
            query_starts=query_starts,
            kv_lengths=num_blocks * np.int32(self._page_size),
            causal=False,
            is_partial=True,
            memory=memory,
        )

    def _part(
        self,
        first_row: int,
        row_slots: NDArray[np.int32],
        first_blocks: NDArray[np.int32] | None,
        query_starts: NDArray[np.int32],
        kv_lengths: NDArray[np.int32],
        causal: bool,
        is_partial: bool,
        memory: RecordedMemory | None,
    ) -> PagedPart:
        """row_slots, first_blocks and kv_lengths: int32 [A]; the segments' blocks begin at first_blocks of the slots'
        tables, or at 0 if this is None. query_starts: int32 [A + 1]. memory: for the lists; None: new memory, or where
        the caller fills them."""
        on_device = self._slots.on_device is not None
        return PagedPart(
            first_row=first_row,
            num_rows=int(query_starts[-1]),
            query_starts=torch.from_numpy(query_starts),
            block_table=None if on_device else self._host_table(row_slots, first_blocks, int(kv_lengths.max())),
            kv_lengths=torch.from_numpy(kv_lengths),
            causal=causal,
            is_partial=is_partial,
            lists=self._block_lists(row_slots, first_blocks, query_starts, kv_lengths, memory) if on_device else None,
        )

    def _host_table(self, row_slots: NDArray[np.int32], first_blocks: NDArray[np.int32] | None, longest: int) -> Tensor:
        """int32 [A, blocks of the longest context]."""
        tables = self._slots.block_tables
        num_columns = -(-longest // self._page_size)
        if first_blocks is None:
            return torch.from_numpy(tables[row_slots, :num_columns])
        columns = first_blocks[:, None] + np.arange(num_columns)
        np.minimum(columns, tables.shape[1] - 1, out=columns)
        return torch.from_numpy(tables[row_slots[:, None], columns])

    def _block_lists(
        self,
        row_slots: NDArray[np.int32],
        first_blocks: NDArray[np.int32] | None,
        query_starts: NDArray[np.int32],
        kv_lengths: NDArray[np.int32],
        memory: RecordedMemory | None,
    ) -> BlockLists:
        assert self._slots.on_device is not None
        tables, to_device = self._slots.on_device.block_tables, self._staging.to_device
        counts = -(-kv_lengths // np.int32(self._page_size))
        starts = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        num_blocks = int(starts[-1])
        memory = self._memory if self.is_in_memory else memory
        if memory is not None:
            _, own_starts, own_blocks, last_lengths = memory
            own_blocks = own_blocks[:num_blocks]
        else:
            sizes = len(starts), num_blocks, len(counts)
            own_starts, own_blocks, last_lengths = (
                torch.empty(size, dtype=torch.int32, device=tables.device) for size in sizes
            )
        lists = BlockLists(
            host_starts=torch.from_numpy(starts),
            starts=own_starts,
            blocks=own_blocks,
            last_lengths=last_lengths,
            query_starts=to_device(query_starts),
            kv_lengths=to_device(kv_lengths),
        )
        if self.is_in_memory:
            return lists
        first_entries = row_slots.astype(np.int64) * tables.shape[1]
        if first_blocks is not None:
            first_entries += first_blocks
        self._staging.then(partial(fill_lists, tables, to_device(first_entries), self._page_size, lists))
        return lists
