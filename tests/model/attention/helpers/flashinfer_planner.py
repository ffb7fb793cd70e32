"""FlashInfer's planner of prefill and tensor-core decode, compiled on the host from the headers of its package.

Its functions are taken from the text of the headers, whose includes need CUDA's compiler; the few calls of the CUDA
runtime that remain are stubs. The pretended device is an H100: compute capability 9.0, 132 multiprocessors.
"""

import ctypes
import subprocess
from pathlib import Path

import torch
from torch import Tensor

NUM_PROCESSORS = 132

_STUB = """
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <sstream>
#include <tuple>
#include <vector>
#include "flashinfer/allocator.h"
using cudaError_t = int; using cudaStream_t = void*;
enum { cudaSuccess, cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin, cudaMemcpyHostToDevice };
inline int cudaGetDevice(int* id) { *id = 0; return 0; }
inline int cudaDeviceGetAttribute(int* value, int what, int) {
  *value = what == cudaDevAttrMultiProcessorCount ? %d : 227 * 1024; return 0;
}
inline int cudaMemcpyAsync(void* to, const void* from, size_t n, int, void*) { std::memcpy(to, from, n); return 0; }
#define FLASHINFER_CUDA_CALL(call) if (call) return 1;
#define __forceinline__ inline
#define __device__
#define __host__
namespace flashinfer {
inline std::pair<int, int> GetCudaComputeCapability() { return {9, 0}; }
"""

_CALL = """
}
extern "C" const char* plan(
    int64_t* vector, int64_t* sizes, void* floats, size_t num_floats, void* ints, void* pinned, size_t num_ints,
    int32_t* qo_starts, int32_t* kv_starts, int rows, int segments, int heads, int kv_heads, int head_dim,
    int page_size, int graph) {
  static std::string message;
  try {
    flashinfer::PrefillPlanInfo info;
    size_t float_size = 0, int_size = 0;
    flashinfer::PrefillPlanImpl<true, int32_t>(float_size, int_size, floats, num_floats, ints, pinned, num_ints, info,
        qo_starts, kv_starts, rows, segments, heads, kv_heads, head_dim, head_dim, page_size, graph, 2, -1, -1, false,
        0, 0, nullptr, 2);
    sizes[0] = float_size; sizes[1] = int_size;
    auto planned = info.ToVector();
    std::copy(planned.begin(), planned.end(), vector);
    return nullptr;
  } catch (std::exception& error) { message = error.what(); return message.c_str(); }
}
"""

_FROM_UTILS = ("inline uint32_t FA2DetermineCtaTileQ(", "constexpr T1 ceil_div(")
_FROM_SCHEDULER = (
    *("inline auto PrefillBinarySearchKVChunkSize(", "inline auto PrefillSplitQOKVIndptr("),
    *("struct PrefillPlanInfo {", "inline cudaError_t PrefillPlanImpl("),
)


def _block(text: str, start: str) -> str:
    """The definition that contains `start`, with the template line before it."""
    at = text.index(start)
    return text[text.rindex("\n\n", 0, at) : text.index("\n}", at)] + "\n};\n"


class HostPlanner:
    """The planner of one version."""

    def __init__(self, package: Path, directory: Path) -> None:
        """package: contains `flashinfer`. directory: for what is compiled."""
        include = package / "flashinfer/data/include"
        texts = (
            (include / "flashinfer/utils.cuh", _FROM_UTILS),
            (include / "flashinfer/attention/scheduler.cuh", _FROM_SCHEDULER),
        )
        blocks = [_block(path.read_text(), start) for path, starts in texts for start in starts]
        source, library = directory / "planner.cpp", directory / "planner.so"
        source.write_text(_STUB % NUM_PROCESSORS + "".join(blocks) + _CALL)
        command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{include}", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        self._plan = ctypes.CDLL(str(library)).plan
        self._plan.restype = ctypes.c_char_p
        self.sizes = [0, 0]
        """Bytes that the last plan took of the float workspace, and of the int workspace."""

    def plan(
        self, floats: Tensor, ints: Tensor, pinned: Tensor, qo_starts: Tensor, kv_starts: Tensor, _lengths: Tensor,
        rows: int, segments: int, heads: int, kv_heads: int, page_size: int, graph: bool, head_dim: int,
        *_others: object,
    ) -> list[int]:  # fmt: skip
        """As `plan` of FlashInfer's compiled module. Raises RuntimeError with its message."""
        vector, sizes = torch.zeros(15, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        for starts in (qo_starts, kv_starts):
            assert starts.dtype == torch.int32
        error = self._plan(
            *(ctypes.c_void_p(x.data_ptr()) for x in (vector, sizes, floats)), ctypes.c_size_t(floats.numel()),
            *(ctypes.c_void_p(x.data_ptr()) for x in (ints, pinned)), ctypes.c_size_t(ints.numel()),
            *(ctypes.c_void_p(x.data_ptr()) for x in (qo_starts, kv_starts)),
            *map(int, (rows, segments, heads, kv_heads, head_dim, page_size, graph)),
        )  # fmt: skip
        if error is not None:
            raise RuntimeError(error.decode())
        self.sizes = sizes.tolist()
        return vector.tolist()
