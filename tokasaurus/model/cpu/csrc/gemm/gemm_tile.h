// The gemm microkernel: up to kTileRows rows of x [rows, in] times one panel of packed weights [out, in].
//
// Weights are packed in panels of kPanel outputs: [out / kPanel][in / kPair][kPanel][kPair]. kPair elements of one
// output are adjacent: 2 for bfloat16 where one instruction multiplies and adds pairs, otherwise 1. A panel is read
// from start to end, while the sums of all rows of the tile stay in registers.
#pragma once

#include "simd/multiply_add.h"

// kPanelVectors * kTileRows sums, the weights for one element of x, and that element fit into the registers.
#if defined(__AVX512F__)
constexpr int kPanelVectors = 2, kTileRows = 12;
#elif defined(__ARM_NEON)
constexpr int kPanelVectors = 4, kTileRows = 6;
#else
constexpr int kPanelVectors = 2, kTileRows = 6;
#endif
constexpr int kPanel = kPanelVectors * kLanes;

// Memory to prefetch while a tile is computed: `step` bytes for each element of x (or pair of elements), from `next`
// on. A step of 0: none.
struct Prefetches {
  const char* next;
  int64_t step;
};

// sums [M][kPanel] += M rows of x times the panel. Each sum adds in the order of x, so a row's result does not depend
// on the number of rows, nor on whether the panel comes in parts. kPrefetches: whether there is something to prefetch.
// Not inlined: beside the caller's variables, the compiler would run out of registers.
template <int M, bool kPrefetches, typename Weight>
TOKA_NOINLINE void multiply_tile(const Activation<Weight>* x, int64_t x_stride, const Weight* panel, int64_t in_size,
                                 Prefetches prefetches, float* sums) {
  constexpr int P = kPair<Weight>, kStep = kPanel * P;
  constexpr int kReach = 3;  // rows per pointer: an x86 address can add a register once or twice
  constexpr int kPointers = (M + kReach - 1) / kReach;
  const Activation<Weight>* rows[kPointers];
  repeat<kPointers>([&](auto i) TOKA_LAMBDA { rows[i] = x + i * kReach * x_stride; });
  const Weight* const end = panel + in_size * kPanel;
  Floats total[M][kPanelVectors];
  repeat<M>([&](auto i) TOKA_LAMBDA {
    repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA { total[i][v] = load(sums + i * kPanel + v * kLanes); });
  });
  // If GCC 12 unrolls this loop, the AVX2 tiles lose a third of their speed.
#pragma GCC unroll 1
  for (; panel < end; panel += kStep) {
    if constexpr (kPrefetches) {
      repeat<(kStep * sizeof(Weight) + kCacheLineBytes - 1) / kCacheLineBytes>(
          [&](auto line) TOKA_LAMBDA { __builtin_prefetch(prefetches.next + line * kCacheLineBytes, 0, 2); });
      prefetches.next += prefetches.step;
    }
    Operand<Weight> weights[kPanelVectors];
    repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA { weights[v] = load_operand(panel + v * kLanes * P); });
    repeat<M>([&](auto i) TOKA_LAMBDA {
      const auto value = broadcast_operand<Weight>(rows[i / kReach] + i % kReach * x_stride);
      repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA { total[i][v] = multiply_add(total[i][v], value, weights[v]); });
    });
    repeat<kPointers>([&](auto i) TOKA_LAMBDA { rows[i] += P; });
  }
  repeat<M>([&](auto i) TOKA_LAMBDA {
    repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA { store(sums + i * kPanel + v * kLanes, total[i][v]); });
  });
}

// multiply_tile for 1 to kTileRows rows, a number known at run time.
template <typename Weight, int M = kTileRows>
void multiply_rows(int num_rows, const Activation<Weight>* x, int64_t x_stride, const Weight* panel, int64_t in_size,
                   Prefetches prefetches, float* sums) {
  if (num_rows == M) {
    // Most tiles of a large gemm are full and prefetch nothing.
    if constexpr (M == kTileRows)
      if (prefetches.step == 0) return multiply_tile<M, false>(x, x_stride, panel, in_size, prefetches, sums);
    return multiply_tile<M, true>(x, x_stride, panel, in_size, prefetches, sums);
  }
  if constexpr (M > 1) multiply_rows<Weight, M - 1>(num_rows, x, x_stride, panel, in_size, prefetches, sums);
}
