"""Attention calls for the decode rows of one step in given prefix groups."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.kernels.attention_cases import DTYPE, HEAD_DIM, NUM_HEADS, Calls, make_filled
from tokasaurus.manager.planning.prefix_groups import Grouping
from tokasaurus.model.attention.backend import PagedLayout, PagedPart
from tokasaurus.model.attention.row_split import attend_rows

# R rows, B blocks of each row


def calls(
    backend_name: str,
    num_layers: int,
    tables: NDArray[np.int32],
    num_tokens: int,
    page_size: int,
    groupings: Sequence[Grouping],
) -> list[Calls]:
    """For each grouping one call per layer. tables: int32 [R, B]; every row attends to num_tokens tokens. In each
    grouping all rows are in groups, or none."""
    query = torch.randn(len(tables), NUM_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0)).to(DTYPE)
    found: list[Calls] = []
    for grouping in groupings:
        backend = make_filled(backend_name, num_layers, int(tables.max()) + 1)
        layout = make_layout(tables, num_tokens, page_size, grouping)
        backend.plan(layout)
        found.append([partial(attend_rows, backend, query, layer, layout) for layer in range(num_layers)])
    return found


def make_layout(tables: NDArray[np.int32], num_tokens: int, page_size: int, grouping: Grouping) -> PagedLayout:
    """The rows in their order, which has the members of a group next to each other."""
    numbers = grouping.group_of_sequence
    skipped = grouping.num_blocks[numbers]
    num_columns = tables.shape[1] - int(skipped.min())
    columns = np.minimum(skipped[:, None] + np.arange(num_columns), tables.shape[1] - 1)
    own = _part(
        np.take_along_axis(tables, columns, axis=1),
        np.arange(len(tables) + 1),
        num_tokens - skipped * page_size,
        is_prefix=False,
        is_partial=bool(numbers.any()),
    )
    prefix = None
    if numbers.any():
        assert (numbers > 0).all(), "some rows are in no group"
        firsts = np.flatnonzero(np.diff(numbers, prepend=0))
        assert len(firsts) == len(grouping.num_blocks) - 1, "the members of a group are apart"
        num_blocks = grouping.num_blocks[numbers[firsts]]
        prefix = _part(
            tables[firsts, : num_blocks.max()],
            np.append(firsts, len(tables)),
            num_blocks * page_size,
            is_prefix=True,
            is_partial=True,
        )
    return PagedLayout(torch.zeros(0, dtype=torch.int64), (own,), prefix)


def _part(
    tables: NDArray[np.int32], starts: NDArray[np.int64], lengths: NDArray[np.int64], is_prefix: bool, is_partial: bool
) -> PagedPart:
    return PagedPart(
        first_row=0,
        num_rows=int(starts[-1]),
        query_starts=torch.from_numpy(starts.astype(np.int32)),
        block_table=torch.from_numpy(np.ascontiguousarray(tables)),
        kv_lengths=torch.from_numpy(lengths.astype(np.int32)),
        causal=not is_prefix,
        is_partial=is_partial,
    )
