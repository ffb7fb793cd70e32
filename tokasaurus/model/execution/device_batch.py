"""Build the tensors of one forward from its ForwardInput and the state of the slots."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.messages.forward import ForwardInput, PrefixGroups, PromptLogprobsInput
from tokasaurus.model.attention.backend import PagedLayout, PagedPart
from tokasaurus.model.execution.slot_table import SlotTable
from tokasaurus.model.sampling.noise import position_keys
from tokasaurus.model.sampling.params import params_to_device
from tokasaurus.model.sampling.prompt_logprobs import LOGPROBS_AT_ONCE, PromptLogprobTargets
from tokasaurus.model.sampling.sample import SamplingRows, TopRows

# T tokens, S rows of the batch (one per running slot), R rows that sample; T and R with padding, if any


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

    layout: PagedLayout
    sampling: SamplingRows
    """Sampling parameters of the N rows."""

    want_logprobs: NDArray[np.bool_]
    """bool [N], on the host."""

    token_slots: NDArray[np.int32]
    """int32 [T without padding], each token's slot; on the host."""

    token_positions: NDArray[np.int64]
    """int64 [T without padding], on the host."""

    token_blocks: NDArray[np.int32]
    """int32 [T without padding], the block of each token's position; on the host."""

    prompt_logprobs: PromptLogprobTargets | None = None
    """Prompt tokens whose logprobs are computed; None if there are none."""


def padded_count(count: int) -> int:
    """`count` rounded up to an allowed number of rows: all up to 16, then 16 per doubling, so at most 1/16 more.

    The CPU's matrix library generates and keeps code for each shape: without rounding, the worker grew by 2 MB with
    each new count.
    """
    step = max(1, 1 << ((count - 1).bit_length() - 5)) if count > 16 else 1
    return -(-count // step) * step


def build_batch(
    step: ForwardInput, slots: SlotTable, page_size: int, device: torch.device, is_padded: bool = True
) -> DeviceBatch:
    """The batch of `step`. Advances the slots' positions past the step.

    Precondition: the changes of `step` are already applied to `slots`.
    is_padded: pad tokens and logit rows to one of few counts.
    """

    def to_device(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

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

    decoded = slots.last_tokens[to_device(step.slots[: step.num_decode].astype(np.int64))]

    def pad(count: int) -> NDArray[np.int64]:
        return np.zeros(padded_count(count) - count if is_padded else 0, np.int64)

    padding = pad(int(starts[-1]))  # token 0 at position 0, its key and value in the padding block
    token_ids = torch.cat((decoded, to_device(np.concatenate((step.prompt_ids, padding)))))

    all_kv_indices = to_device(np.concatenate((kv_indices, padding)))
    slots.rules.tokens[all_kv_indices] = token_ids.int()

    # A decode row is past its prompt; a prefill row samples if its chunk ends the prompt.
    samples = kv_lengths >= slots.num_prompt_tokens[step.slots]
    sampled_slots = step.slots[samples]
    params = slots.sampling.take(sampled_slots)  # several times as fast as indexing a structured array
    want_logprobs = slots.want_logprobs[sampled_slots]
    any_logprobs = bool(want_logprobs.any())
    keys = position_keys(slots.noise_keys[sampled_slots], kv_lengths[samples])
    sampling = SamplingRows(
        params=params,
        device_params=params_to_device(params, device),
        noise_keys=to_device(keys.astype(np.int64)),
        any_logprobs=any_logprobs,
        rules=slots.rules.select(sampled_slots, kv_lengths[samples], slots.block_tables, page_size),
        top=_top_rows(slots.num_top_logprobs[sampled_slots]) if any_logprobs else None,
        masks=step.masks,
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
    parts, prefix = _parts(step, slots, starts, kv_lengths, page_size)
    return DeviceBatch(
        token_ids=token_ids,
        positions=to_device(np.concatenate((token_positions, padding))),
        logit_rows=to_device(np.concatenate((logit_rows, pad(len(logit_rows))))),
        num_sampled=len(logit_rows),
        sampled_slots=to_device(sampled_slots.astype(np.int64)),
        layout=PagedLayout(all_kv_indices, parts, prefix),
        sampling=sampling,
        want_logprobs=want_logprobs,
        token_slots=step.slots[token_rows],
        token_positions=token_positions,
        token_blocks=token_blocks,
        prompt_logprobs=prompt_logprobs,
    )


def _logprob_rows(prompt_logprobs: PromptLogprobsInput, starts: NDArray[np.int32]) -> NDArray[np.int64]:
    """Rows of the forward whose next prompt token's logprob is computed: int64 [Q]."""
    rows = np.arange(len(prompt_logprobs.target_ids))
    rows += np.repeat(
        starts[prompt_logprobs.rows] - (np.cumsum(prompt_logprobs.counts) - prompt_logprobs.counts),
        prompt_logprobs.counts,
    )
    return rows


def _top_rows(counts: NDArray[np.int32]) -> TopRows | None:
    """counts: int32 [R], number of top-k logprobs that each row asked for. None if no row asked."""
    rows = np.flatnonzero(counts)
    return TopRows(rows, int(counts.max())) if len(rows) else None


def _parts(
    step: ForwardInput,
    slots: SlotTable,
    starts: NDArray[np.int32],
    kv_lengths: NDArray[np.int32],
    page_size: int,
) -> tuple[tuple[PagedPart, ...], PagedPart | None]:
    """The parts of the layout, and the prefix part of the prefix groups.

    Parts, each omitted if empty: grouped decode rows over the tokens after their prefix; the other decode rows; the
    prefill rows.
    """
    num_grouped, prefix = 0, None
    skipped = np.zeros(len(step.slots), np.int32)  # blocks of each row that the prefix part covers
    if step.groups is not None:
        num_grouped = int(step.groups.sizes.sum())
        skipped[:num_grouped] = np.repeat(step.groups.num_blocks, step.groups.sizes)
        prefix = _prefix_part(step.slots, step.groups, slots.block_tables, page_size)
    parts = []
    for begin, end in ((0, num_grouped), (num_grouped, step.num_decode), (step.num_decode, len(step.slots))):
        if begin == end:
            continue
        is_partial = end == num_grouped
        own_lengths = kv_lengths[begin:end] - skipped[begin:end] * np.int32(page_size)
        longest = int(own_lengths.max())
        num_columns = -(-longest // page_size)
        if is_partial:
            columns = skipped[begin:end, None] + np.arange(num_columns)
            np.minimum(columns, slots.block_tables.shape[1] - 1, out=columns)
            tables = slots.block_tables[step.slots[begin:end, None], columns]
        else:
            tables = slots.block_tables[step.slots[begin:end], :num_columns]
        parts.append(
            PagedPart(
                first_row=int(starts[begin]),
                num_rows=int(starts[end] - starts[begin]),
                query_starts=torch.from_numpy(starts[begin : end + 1] - starts[begin]),
                block_table=torch.from_numpy(tables),
                kv_lengths=torch.from_numpy(own_lengths),
                causal=True,
                is_partial=is_partial,
            )
        )
    return tuple(parts), prefix


def _prefix_part(
    row_slots: NDArray[np.int32], groups: PrefixGroups, block_tables: NDArray[np.int32], page_size: int
) -> PagedPart:
    """One segment per group; its blocks are the first blocks in the table of the group's first row."""
    query_starts = np.zeros(len(groups.sizes) + 1, np.int32)
    np.cumsum(groups.sizes, out=query_starts[1:])
    lengths = groups.num_blocks * np.int32(page_size)
    tables = block_tables[row_slots[query_starts[:-1]], : int(groups.num_blocks.max())]
    return PagedPart(
        first_row=0,
        num_rows=int(query_starts[-1]),
        query_starts=torch.from_numpy(query_starts),
        block_table=torch.from_numpy(tables),
        kv_lengths=torch.from_numpy(lengths),
        causal=False,
        is_partial=True,
    )
