"""FlashInfer's decode attention in memory that stays where it is, so that its launches can be recorded."""

from typing import Any

import torch
from torch import Tensor

from tokasaurus.model.attention.backend import PagedPart

# S rows of a recording


class FixedMemory:
    """What recorded launches read: each plan of a wrapper, and each forward's kv indices, are copied here.

    A wrapper is for one number of rows. All of them use the same memory, since one at a time is planned and run.
    """

    def __init__(self, new_wrapper: Any, workspace: Tensor, max_rows: int, max_blocks: int) -> None:
        """new_wrapper: makes a decode wrapper with these options. workspace: of all wrappers, as FlashInfer wants it.
        max_blocks: of the longest sequence."""
        self._new_wrapper = new_wrapper
        self._workspace = workspace
        device = workspace.device
        self.kv_indices = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._starts = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self._blocks = torch.zeros(max_rows * max_blocks, dtype=torch.int32, device=device)
        self._last_lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._plans = torch.zeros(plan_bytes(max_rows), dtype=torch.uint8, device=device)
        self._wrappers: dict[int, Any] = {}
        self.copied: dict[int, torch.cuda.Event] = {}
        """By number of rows: after the copies of a wrapper's last plan, which read its host memory."""
        self.planned: set[int] = set()
        """Numbers of rows whose wrapper has been planned."""

    def fill_lists(self, part: PagedPart) -> None:
        """Copy the part's lists to where its wrapper reads them. The wrapper's first plan does so itself."""
        assert part.lists is not None
        self._starts[: part.num_rows + 1].copy_(part.lists.starts)
        self._blocks[: len(part.lists.blocks)].copy_(part.lists.blocks)
        self._last_lengths[: part.num_rows].copy_(part.lists.last_lengths)

    def wrapper(self, num_rows: int) -> Any:
        """The wrapper for this number of rows S; made at its first use, which must not be recorded."""
        if num_rows not in self._wrappers:
            wrapper = self._new_wrapper(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=self._starts[: num_rows + 1],
                paged_kv_indices_buffer=self._blocks,
                paged_kv_last_page_len_buffer=self._last_lengths[:num_rows],
            )
            wrapper.reset_workspace_buffer(self._workspace, self._plans)  # instead of one of its own for its plans
            self._wrappers[num_rows] = wrapper
        return self._wrappers[num_rows]


def plan_bytes(max_rows: int) -> int:
    """Bytes of a plan, on the device and in pinned memory: at least 1 MiB, 8 in FlashInfer.

    max_rows: of a recorded step, or of a part of another forward.

    A plan has three int32 and a bool for each tile, two int32 for each row, and a few more. There are at most as many
    tiles as for a group of 64 heads in tiles of 16, or 2 for each of 512 multiprocessors. Without a recording there are
    fewer, at most 2 for each row, since a tile's size is chosen by the mean of the segments.
    """
    num_tiles = max(5 * max_rows, 1024)
    needed = 13 * num_tiles + 8 * max_rows + 1024
    return -(-needed // (1 << 20)) << 20
