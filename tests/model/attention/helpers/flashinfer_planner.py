"""FlashInfer's planners, of prefill and tensor-core decode and of CUDA-core decode, compiled on the host from the
headers of its package.

Its functions are taken from the text of the headers, whose includes need CUDA's compiler; the few calls of the CUDA
runtime that remain are stubs. The pretended device is an H100: compute capability 9.0, 132 multiprocessors. How many
blocks of the CUDA-core kernel run on each is given.
"""

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NUM_PROCESSORS = 132
OCCUPANCY = 9
"""Blocks of the CUDA-core kernel on each multiprocessor, which its planner asks the device for: ptxas gives it 56
registers for 2 and 3 query heads a KV head (72 for one: then 7) in blocks of 128 threads, of an H100's 65,536."""

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
static int occupancy = 0;
template <typename Kernel>
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* value, Kernel, int, size_t) { *value = occupancy; return 0; }
namespace flashinfer {
inline std::pair<int, int> GetCudaComputeCapability() { return {9, 0}; }
inline uint32_t max(uint32_t first, uint32_t second) { return std::max(first, second); }
enum class PosEncodingMode { kNone };
struct Variant {};
struct Params { using DTypeKV = uint16_t; using IdType = int32_t; };
template <PosEncodingMode, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, typename, typename Params>
void BatchDecodeWithPagedKVCacheKernel(Params) {}
"""

_CALL = """
}
template <uint32_t GROUP, uint32_t HEAD_DIM, typename... Args>
int plan_cuda_cores(Args&&... args) {
  constexpr auto none = flashinfer::PosEncodingMode::kNone;
  return flashinfer::DecodePlanImpl<true, HEAD_DIM, none, flashinfer::Variant, flashinfer::Params>(
      std::forward<Args>(args)..., nullptr, flashinfer::BatchDecodeWithPagedKVCacheWorkEstimationDispatched<
          GROUP, HEAD_DIM, none, flashinfer::Variant, flashinfer::Params>);
}
template <uint32_t HEAD_DIM, typename... Args>
int plan_cuda_cores_of(int group, Args&&... args) {
  switch (group) {
    case 1: return plan_cuda_cores<1, HEAD_DIM>(std::forward<Args>(args)...);
    case 2: return plan_cuda_cores<2, HEAD_DIM>(std::forward<Args>(args)...);
    case 3: return plan_cuda_cores<3, HEAD_DIM>(std::forward<Args>(args)...);
    default: throw std::runtime_error("not a group of CUDA cores");
  }
}
template <typename Info, typename Plan>
const char* report(int64_t* vector, int64_t* sizes, Plan plan) {
  static std::string message;
  try {
    Info info;
    size_t float_size = 0, int_size = 0;
    if (plan(info, float_size, int_size)) throw std::runtime_error("a CUDA call failed");
    sizes[0] = float_size; sizes[1] = int_size;
    auto planned = info.ToVector();
    std::copy(planned.begin(), planned.end(), vector);
    return nullptr;
  } catch (std::exception& error) { message = error.what(); return message.c_str(); }
}
extern "C" const char* plan(
    int64_t* vector, int64_t* sizes, void* floats, size_t num_floats, void* ints, void* pinned, size_t num_ints,
    int32_t* qo_starts, int32_t* kv_starts, int rows, int segments, int heads, int kv_heads, int head_dim,
    int page_size, int graph, int window) {
  return report<flashinfer::PrefillPlanInfo>(vector, sizes, [&](auto& info, size_t& float_size, size_t& int_size) {
    return flashinfer::PrefillPlanImpl<true, int32_t>(float_size, int_size, floats, num_floats, ints, pinned, num_ints,
        info, qo_starts, kv_starts, rows, segments, heads, kv_heads, head_dim, head_dim, page_size, graph, 2, window,
        -1, false, 0, 0, nullptr, 2);
  });
}
extern "C" const char* plan_decode(
    int64_t* vector, int64_t* sizes, void* floats, size_t num_floats, void* ints, void* pinned, size_t num_ints,
    int32_t* kv_starts, int segments, int heads, int kv_heads, int head_dim, int page_size, int graph,
    int blocks_per_processor) {
  occupancy = blocks_per_processor;
  return report<flashinfer::DecodePlanInfo>(vector, sizes, [&](auto& info, size_t& float_size, size_t& int_size) {
    auto run = [&](auto size) {
      return plan_cuda_cores_of<decltype(size)::value>(heads / kv_heads, float_size, int_size, floats, num_floats, ints,
          pinned, num_ints, info, kv_starts, segments, heads, page_size, graph != 0);
    };
    return head_dim == 64 ? run(std::integral_constant<uint32_t, 64>{}) : run(std::integral_constant<uint32_t, 128>{});
  });
}
"""

_FROM_UTILS = ("inline uint32_t FA2DetermineCtaTileQ(", "constexpr T1 ceil_div(")
_FROM_SCHEDULER = (
    *("inline auto PrefillBinarySearchKVChunkSize(", "inline auto PrefillSplitQOKVIndptr("),
    *("struct PrefillPlanInfo {", "inline cudaError_t PrefillPlanImpl("),
    "inline auto PartitionPagedKVCacheBinarySearchMinNumPagePerBatch(",
    "inline cudaError_t BatchDecodeWithPagedKVCacheWorkEstimationDispatched(",
    *("inline auto DecodeSplitKVIndptr(", "struct DecodePlanInfo {", "inline cudaError_t DecodePlanImpl("),
)
_MACRO = "DISPATCH_COMPUTE_CAP_DECODE_NUM_STAGES_SMEM"


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
        (macro,) = re.findall(rf"^#define {_MACRO}\(.*?[^\\]\n", texts[0][0].read_text(), re.MULTILINE | re.DOTALL)
        source, library = directory / "planner.cpp", directory / "planner.so"
        source.write_text(macro + _STUB % NUM_PROCESSORS + "".join(blocks) + _CALL)
        command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{include}", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(library))
        self._plan, self._plan_decode = loaded.plan, loaded.plan_decode
        self._plan.restype = self._plan_decode.restype = ctypes.c_char_p
        self.sizes = [0, 0]
        """Bytes that the last plan took of the float workspace, and of the int workspace."""
        self.blocks_per_processor = OCCUPANCY
        self.noted: Callable[..., list[int]] = self.plan
        """What the modules call in place of `plan`."""

    def plan(
        self, floats: Tensor, ints: Tensor, pinned: Tensor, qo_starts: Tensor, kv_starts: Tensor, _lengths: Tensor,
        rows: int, segments: int, heads: int, kv_heads: int, page_size: int, graph: bool, head_dim: int,
        _values_dim: int, _causal: bool, window: int, *_others: object,
    ) -> list[int]:  # fmt: skip
        """As `plan` of FlashInfer's compiled module. Raises RuntimeError with its message."""
        numbers = (rows, segments, heads, kv_heads, head_dim, page_size, graph, window)
        return self._run(self._plan, floats, ints, pinned, (qo_starts, kv_starts), numbers)

    def plan_decode(
        self, floats: Tensor, ints: Tensor, pinned: Tensor, kv_starts: Tensor, segments: int, heads: int, kv_heads: int,
        page_size: int, graph: bool, _window: int, _cap: float, head_dim: int, *_others: object,
    ) -> list[int]:  # fmt: skip
        """As `plan` of FlashInfer's compiled module of CUDA-core decode. Raises RuntimeError with its message."""
        assert head_dim in (64, 128)
        numbers = (segments, heads, kv_heads, head_dim, page_size, graph, self.blocks_per_processor)
        return self._run(self._plan_decode, floats, ints, pinned, (kv_starts,), numbers)[:10]

    def _run(
        self, plan: Any, floats: Tensor, ints: Tensor, pinned: Tensor, starts: tuple[Tensor, ...],
        numbers: tuple[int, ...],
    ) -> list[int]:  # fmt: skip
        vector, sizes = torch.zeros(15, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        assert all(x.dtype == torch.int32 for x in starts)
        error = plan(
            *(ctypes.c_void_p(x.data_ptr()) for x in (vector, sizes, floats)), ctypes.c_size_t(floats.numel()),
            *(ctypes.c_void_p(x.data_ptr()) for x in (ints, pinned)), ctypes.c_size_t(ints.numel()),
            *(ctypes.c_void_p(x.data_ptr()) for x in starts),
            *map(int, numbers),
        )  # fmt: skip
        if error is not None:
            raise RuntimeError(error.decode())
        self.sizes = sizes.tolist()
        return vector.tolist()
