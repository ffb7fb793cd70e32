// The gemm microkernel: up to kTileRows rows of x [rows, in] times one panel of packed weights [out, in].
//
// Weights are packed in panels of kPanel outputs: [out / kPanel][in / kPair][kPanel][kPair]. kPair elements of one
// output are adjacent: 2 for bfloat16 where one instruction multiplies and adds pairs, otherwise 1. A panel is read
// from start to end, while the sums of all rows of the tile stay in registers.
#pragma once

#include <algorithm>

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

// Pointers to M rows of x.
template <int M, typename Element>
struct RowPointers {
  static constexpr int kReach = 3;  // rows per pointer: an x86 address can add a register once or twice
  const Element* rows[(M + kReach - 1) / kReach];
  int64_t stride;

  TOKA_INLINE RowPointers(const Element* x, int64_t stride) : stride(stride) {
    repeat<(M + kReach - 1) / kReach>([&](auto i) TOKA_LAMBDA { rows[i] = x + i * kReach * stride; });
  }
  TOKA_INLINE const Element* row(int i) const { return rows[i / kReach] + i % kReach * stride; }
  TOKA_INLINE void advance(int count) {
    repeat<(M + kReach - 1) / kReach>([&](auto i) TOKA_LAMBDA { rows[i] += count; });
  }
};

// total += M rows of x times a part of the panel; both pointers, and the prefetches, go on to the next part.
template <int M, bool kPrefetches, int V, typename Weight>
static TOKA_INLINE void add_products(RowPointers<M, Activation<Weight>>& x, const Weight*& panel, int64_t in_size,
                                     Prefetches& prefetches, Floats (&total)[M][V]) {
  constexpr int P = kPair<Weight>, kStep = V * kLanes * P;
  const Weight* const end = panel + in_size * V * kLanes;
  // If GCC 12 unrolls this loop, the AVX2 tiles lose a third of their speed.
#pragma GCC unroll 1
  for (; panel < end; panel += kStep) {
    if constexpr (kPrefetches) {
      repeat<(kStep * sizeof(Weight) + kCacheLineBytes - 1) / kCacheLineBytes>(
          [&](auto line) TOKA_LAMBDA { __builtin_prefetch(prefetches.next + line * kCacheLineBytes, 0, 2); });
      prefetches.next += prefetches.step;
    }
    Operand<Weight> weights[V];
    repeat<V>([&](auto v) TOKA_LAMBDA { weights[v] = load_operand(panel + v * kLanes * P); });
    repeat<M>([&](auto i) TOKA_LAMBDA {
      const auto value = broadcast_operand<Weight>(x.row(i));
      repeat<V>([&](auto v) TOKA_LAMBDA { total[i][v] = multiply_add(total[i][v], value, weights[v]); });
    });
    x.advance(P);
  }
}

// sums [M][V * kLanes] += M rows of x times the panel, which has V vectors of outputs. Each sum adds in the order of x,
// so a row's result does not depend on the number of rows, nor on whether the panel comes in parts. kPrefetches:
// whether there is something to prefetch. Not inlined: beside the caller's variables, the compiler would run out of
// registers.
template <int M, bool kPrefetches, int V, typename Weight>
TOKA_NOINLINE void multiply_tile(const Activation<Weight>* x, int64_t x_stride, const Weight* panel, int64_t in_size,
                                 Prefetches prefetches, float* sums) {
  RowPointers<M, Activation<Weight>> rows(x, x_stride);
  Floats total[M][V];
  repeat<M>([&](auto i) TOKA_LAMBDA {
    repeat<V>([&](auto v) TOKA_LAMBDA { total[i][v] = load(sums + (i * V + v) * kLanes); });
  });
  add_products<M, kPrefetches>(rows, panel, in_size, prefetches, total);
  repeat<M>([&](auto i) TOKA_LAMBDA {
    repeat<V>([&](auto v) TOKA_LAMBDA { store(sums + (i * V + v) * kLanes, total[i][v]); });
  });
}

// The scales [kPanel] of each `inputs` inputs of a panel of codes; from one to the next: `step` floats.
struct Scales {
  const float* first;
  int64_t inputs, step;
};

// sums [M][kPanel] += M rows of x times a panel of codes times their scales. The sums of the products with the same
// scale are multiplied by it.
template <int M, typename Weight>
TOKA_NOINLINE void multiply_scaled_tile(const Activation<Weight>* x, int64_t x_stride, const Weight* codes,
                                        int64_t in_size, Scales scales, float* sums) {
  RowPointers<M, Activation<Weight>> rows(x, x_stride);
  Prefetches none{};
  for (int64_t in = 0; in < in_size; in += scales.inputs, scales.first += scales.step) {
    Floats total[M][kPanelVectors] = {};
    add_products<M, false>(rows, codes, std::min(scales.inputs, in_size - in), none, total);
    repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA {
      const Floats scale = load(scales.first + v * kLanes);
      repeat<M>([&](auto i) TOKA_LAMBDA {
        float* const sum = sums + i * kPanel + v * kLanes;
        store(sum, load(sum) + total[i][v] * scale);
      });
    });
  }
}

// multiply_tile for 1 to kTileRows rows, a number known at run time.
template <int V = kPanelVectors, int M = kTileRows, typename Weight>
void multiply_rows(int num_rows, const Activation<Weight>* x, int64_t x_stride, const Weight* panel, int64_t in_size,
                   Prefetches prefetches, float* sums) {
  if (num_rows == M) {
    // Most tiles of a large gemm are full and prefetch nothing.
    if constexpr (M == kTileRows)
      if (prefetches.step == 0) return multiply_tile<M, false, V>(x, x_stride, panel, in_size, prefetches, sums);
    return multiply_tile<M, true, V>(x, x_stride, panel, in_size, prefetches, sums);
  }
  if constexpr (M > 1) multiply_rows<V, M - 1>(num_rows, x, x_stride, panel, in_size, prefetches, sums);
}

// multiply_scaled_tile for 1 to kTileRows rows.
template <typename Weight, int M = kTileRows>
void multiply_scaled_rows(int num_rows, const Activation<Weight>* x, int64_t x_stride, const Weight* codes,
                          int64_t in_size, Scales scales, float* sums) {
  if (num_rows == M) return multiply_scaled_tile<M>(x, x_stride, codes, in_size, scales, sums);
  if constexpr (M > 1) multiply_scaled_rows<Weight, M - 1>(num_rows, x, x_stride, codes, in_size, scales, sums);
}
