"""Records CUDA graphs. Not yet run on a GPU."""

import gc
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from tokasaurus.model.execution.runner import ModelRunner

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size: NumPy, whose type names the interface below uses, has no bfloat16."""


class CudaRecorder:
    """Implements Recorder: all graphs take their memory from one pool.

    Collects garbage once, when it is made, and what exists then is never visited again: memory that is freed while
    launches are recorded could not be used by them, and a collection with a model in memory takes tenths of a second.
    """

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        gc.freeze()
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """The default stream cannot be recorded; libraries choose their memory by stream, so that the forward before
        the recording must be on the same one. Ends a recording that an exception has left open."""
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                graph, self._graph = self._graph, None
                if graph is not None:
                    with suppress(RuntimeError):  # it says again what the exception says
                        graph.capture_end()
        torch.cuda.synchronize(self._device)

    def begin(self) -> None:
        assert self._graph is None, "one recording at a time"
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's, may call CUDA meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> torch.cuda.CUDAGraph:
        assert self._graph is not None, "begin comes first"
        graph, self._graph = self._graph, None
        graph.capture_end()
        return graph

    def unowned(self, tensor: Tensor) -> Tensor:
        as_integers = tensor.view(_INTEGERS[tensor.itemsize])
        return torch.as_tensor(_Memory(as_integers), device=self._device).view(tensor.dtype)


class _Memory:
    """Device memory, as torch and other libraries describe it to each other."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
            "typestr": f"{'|u' if tensor.itemsize == 1 else '<i'}{tensor.itemsize}",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def graph_bytes(runner: ModelRunner, sizes: Sequence[int], device: torch.device) -> int:
    """Bytes that the graphs of these sizes, largest first, will take, estimated by recording the first and the last.

    The others need what the last does beyond the memory of the first. The graphs recorded here are dropped.
    """
    if not sizes:
        return 0
    free: list[int] = [_free_bytes(device)]

    def note(recorded: Iterable[int]) -> Iterator[int]:
        for index, size in enumerate(recorded):
            if index:
                free.append(_free_bytes(device))
            yield size
        free.append(_free_bytes(device))

    runner.record_graphs(CudaRecorder(device), sorted({sizes[0], sizes[-1]}), note)
    runner.drop_graphs()
    torch.cuda.empty_cache()
    first, *others = (before - after for before, after in itertools.pairwise(free))
    return max(0, first) + max(0, *others, 0) * (len(sizes) - 1)


def _free_bytes(device: torch.device) -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
