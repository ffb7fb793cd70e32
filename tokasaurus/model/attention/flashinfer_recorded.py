"""FlashInfer's decode attention in memory that stays where it is, so that its launches can be recorded."""

from typing import Any

import torch
from torch import Tensor

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
        self._plans = torch.zeros(PLAN_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[int, Any] = {}
        self.copied: dict[int, torch.cuda.Event] = {}
        """By number of rows: after the copies of a wrapper's last plan, which read its host memory."""

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


PLAN_BYTES = 8 << 20
"""As large as FlashInfer makes it."""
