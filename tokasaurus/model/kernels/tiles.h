// One tile of a product x [rows, in] by packed weights [out, in].
//
// Weights lie in panels of 32 outputs: [out / 32][in / kPair][32][kPair], kPair elements of one output side by side: two
// of bfloat16, which one dot-product instruction multiplies and adds, or one of float32. A panel is read from start to
// end, while the sums of up to kTileRows rows stay in registers.
#pragma once

#include "vectors.h"

constexpr int kPanel = 32;
#ifdef __AVX512F__
constexpr int kTileRows = 12;  // sums in 24 of 32 registers
#else
constexpr int kTileRows = 3;
#endif

template <typename Element>
constexpr int kPair = 1;
template <>
constexpr int kPair<bfloat16> = 2;

// One element of x, or a pair, for all outputs.
struct SpreadPair {
#ifdef __AVX512BF16__
  __m512bh both;
#else
  f32x16 first, second;
#endif
};

static inline f32x16 spread(const float* x) { return splat(*x); }

static inline SpreadPair spread(const bfloat16* x) {
#ifdef __AVX512BF16__
  int32_t both;
  std::memcpy(&both, x, sizeof both);
  return {(__m512bh)_mm512_set1_epi32(both)};
#else
  return {splat(to_float(x[0])), splat(to_float(x[1]))};
#endif
}

// total += x * weights, for sixteen outputs.
static inline void multiply_add(f32x16& total, f32x16 x, const float* weights) { total += x * load16(weights); }

static inline void multiply_add(f32x16& total, SpreadPair x, const bfloat16* weights) {
#ifdef __AVX512BF16__
  total = (f32x16)_mm512_dpbf16_ps((__m512)total, x.both, (__m512bh)_mm512_loadu_si512(weights));
#else
  u32x16 pairs;
  std::memcpy(&pairs, weights, sizeof pairs);
  total += x.first * (f32x16)(pairs << 16);
  total += x.second * (f32x16)(pairs & 0xFFFF0000u);
#endif
}

// sums [M][32] = x [M rows] * panel. The memory `ahead` bytes behind what is read is asked for meanwhile.
template <int M, typename Element>
void multiply_tile(const Element* x, int64_t x_stride, const Element* panel, int64_t in_size, int64_t ahead,
                   f32x16 (*sums)[2]) {
  constexpr int kStep = kPanel * kPair<Element>;
  constexpr int kReach = 3;  // rows that one pointer serves: x86 addresses add one register, or twice that
  constexpr int kPointers = (M + kReach - 1) / kReach;
  const Element* rows[kPointers];
  for (int i = 0; i < kPointers; ++i) rows[i] = x + i * kReach * x_stride;
  const Element* const end = panel + in_size * kPanel;
  f32x16 total[M][2] = {};
#pragma GCC unroll 1
  for (; panel < end; panel += kStep) {
    __builtin_prefetch((const char*)panel + ahead, 0, 2);
    __builtin_prefetch((const char*)(panel + kStep / 2) + ahead, 0, 2);
#pragma GCC unroll 12
    for (int i = 0; i < M; ++i) {
      const auto value = spread(rows[i / kReach] + i % kReach * x_stride);
      multiply_add(total[i][0], value, panel);
      multiply_add(total[i][1], value, panel + kStep / 2);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kPointers; ++i) rows[i] += kPair<Element>;
  }
  for (int i = 0; i < M; ++i)
    for (int half = 0; half < 2; ++half) sums[i][half] = total[i][half];
}

// The same for 1 to kTileRows rows.
template <typename Element>
void multiply_rows(int num_rows, const Element* x, int64_t x_stride, const Element* panel, int64_t in_size,
                   int64_t ahead, f32x16 (*sums)[2]) {
  switch (num_rows) {
    case 1: return multiply_tile<1>(x, x_stride, panel, in_size, ahead, sums);
    case 2: return multiply_tile<2>(x, x_stride, panel, in_size, ahead, sums);
    case 3: return multiply_tile<3>(x, x_stride, panel, in_size, ahead, sums);
#if __AVX512F__
    case 4: return multiply_tile<4>(x, x_stride, panel, in_size, ahead, sums);
    case 5: return multiply_tile<5>(x, x_stride, panel, in_size, ahead, sums);
    case 6: return multiply_tile<6>(x, x_stride, panel, in_size, ahead, sums);
    case 7: return multiply_tile<7>(x, x_stride, panel, in_size, ahead, sums);
    case 8: return multiply_tile<8>(x, x_stride, panel, in_size, ahead, sums);
    case 9: return multiply_tile<9>(x, x_stride, panel, in_size, ahead, sums);
    case 10: return multiply_tile<10>(x, x_stride, panel, in_size, ahead, sums);
    case 11: return multiply_tile<11>(x, x_stride, panel, in_size, ahead, sums);
    case 12: return multiply_tile<12>(x, x_stride, panel, in_size, ahead, sums);
#endif
  }
}
