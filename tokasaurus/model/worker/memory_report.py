"""The memory plan of `toka plan`, beside what a worker's start has measured."""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.kv_memory import show_size
from tokasaurus.model.worker.memory_plan import CONTEXT_BYTES, MemoryFlags, plan_worker, sizes_of
from tokasaurus.model.worker.sibling_memory import own_bytes


class MemoryReport:
    """Measures parts of a worker's memory while it starts. Made before anything is allocated on the device.

    On a CUDA device all parts of the plan are measured but the context. On a CPU the plan has the same weights, rotary
    table and KV cache; all other parts differ, and are not shown.
    """

    def __init__(
        self,
        flags: MemoryFlags,
        info: ModelInfo,
        mesh: Mesh,
        device: torch.device,
        *dtypes: torch.dtype,
    ) -> None:
        """dtypes: of the weights and of the KV cache."""
        self._device = device
        self._is_cuda = device.type == "cuda"
        # Asking for the free memory makes the context, which the plan counts too.
        free_bytes = torch.cuda.mem_get_info(device)[0] + CONTEXT_BYTES if self._is_cuda else 0
        self._plan = plan_worker(info, mesh, sizes_of(flags, info, free_bytes, *dtypes))
        self._page_size = flags.page_size
        self._lines: list[str] = []

    @contextmanager
    def part(self, *names: str, on_cpu: bool = False, outside_torch: bool = False) -> Iterator[None]:
        """Measure what the body allocates: these parts of the plan. on_cpu: there as well. outside_torch: torch's
        allocator does not count it."""
        if not (self._is_cuda or on_cpu):
            yield
            return
        used_bytes = self._taken_bytes if outside_torch else self._used_bytes
        before = used_bytes()
        yield
        self.note(used_bytes() - before, *names)

    def note(self, measured_bytes: int, *names: str) -> None:
        """What was measured of these parts of the plan, which may lack them."""
        planned = sum(part.num_bytes for part in self._plan.parts if part.name in names)
        self._add(" and ".join(names), show_size(planned), show_size(measured_bytes))

    @contextmanager
    def kv_cache(self, num_blocks: int) -> Iterator[None]:
        """Measure the allocation of the KV cache, with its padding block: num_blocks usable ones."""
        before = self._reserved_bytes()
        yield
        measured = (self._reserved_bytes() - before) / ((num_blocks + 1) * self._page_size)
        self._add("KV cache per token", f"{self._plan.kv_bytes_per_token:,} B", f"{measured:,.0f} B")
        if self._is_cuda:
            planned = max(0, self._plan.num_kv_blocks) * self._page_size
            self._add("KV cache", f"{planned:,} tokens", f"{num_blocks * self._page_size:,}")

    def lines(self) -> list[str]:
        """For the user: each part, planned and measured."""
        return self._lines

    def _add(self, what: str, planned: str, measured: str) -> None:
        self._lines.append(f"{what} {planned} planned, {measured} measured")

    def _used_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._is_cuda else own_bytes()

    def _taken_bytes(self) -> int:
        """From the device, by whomever."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def _reserved_bytes(self) -> int:
        """On a CPU, the system provides a cache's memory at first use: until then it has addresses only."""
        return torch.cuda.memory_allocated(self._device) if self._is_cuda else int(psutil.Process().memory_info().vms)
