// The gemm microkernel for activations of 8 bits: up to kInt8Rows rows times the codes of one panel (blocks.h).
//
// Activations are quantized in blocks of kInputBlock inputs, x = scale * code with codes from -127 to 127, so that a
// part of a sum is an integer: sum(w x) over inputs of one group and one block is
//   weight scale * x scale * sum((weight code - offset) * x code) + min * x scale * sum(x code).
// Source of the scheme: llama.cpp's Q8_0 and Q8_1 activations.
//
// With weights that have a single scale for all inputs (kI8), x has wider blocks, with fewer scales to multiply by.
//
// The same products give sums of numbers that are not rounded to 8 bits: in blocks of kInputBlock, x is scale times an
// integer of kPlanes bytes, x = scale * (2^16 first + 2^8 second + third), as exact as a float32 sum, and each byte is
// a row of codes of its own, called a plane. With few rows this takes less time than widening the weights.
#pragma once

#include "gemm/blocks.h"
#include "simd/dot_four.h"

constexpr int kInputBlock = 32, kInputSum = 16;

// Blocks of x for weights of kI8; a row's last block may be smaller. A few activations are much larger than the others,
// and make all others of their block coarse. Measured with the demo model: a single block costs 2.5 % of perplexity.
constexpr int64_t kWideBlock = 128;

// With 32 registers, the sums of integers and of floats fit into them, with the codes of four inputs and those of x;
// more rows were measured to be slower. With 16, sums of floats go to memory and back.
constexpr int kInt8Rows = kRegisters == 16 && !TOKA_INT8_DOT ? 4 : 6;

// Bytes of the integers that stand for numbers of x which are not rounded to one.
constexpr int kPlanes = 3;

// Rows of x in 8 bits, or in planes: `rows * planes` rows of codes, a row's planes next to each other. in_size is a
// multiple of kInputBlock.
struct Int8Rows {
  const int8_t* codes;       // [rows * planes][in_size]
  const int16_t* pairs;      // the same, each four codes in the order 0, 2, 1, 3; null where kHasPairs is false
  const float* scales;       // [rows][in_size / kInputBlock]
  const float* sums;         // [rows][in_size / kInputBlock]: scale * sum of the block's integers
  const int32_t* code_sums;  // [rows * planes][in_size / kInputBlock]: sum of the block's codes
  const int32_t* half_sums;  // [rows * planes][in_size / kInputSum], likewise
  int64_t in_size;
  bool has_planes;
};

template <int bits>
static TOKA_INLINE void prefetch_codes(const uint8_t* codes) {
  repeat<kBytesTogether<bits> / kCacheLineBytes>(
      [&](auto line) TOKA_LAMBDA { __builtin_prefetch(codes + kAheadBytes + line * kCacheLineBytes, 0, 2); });
}

#if TOKA_INT8_DOT || !defined(__AVX2__)

constexpr bool kHasPairs = false;

// total += the products of the inputs [first, first + count) of M rows from `row` on. codes: those of the panel, from
// `first` on.
template <int M, int bits>
static TOKA_INLINE void add_products(const Int8Rows& x, int64_t row, int64_t first, int64_t count, const uint8_t* codes,
                                     Ints (&total)[M][kPanelVectors]) {
  const int8_t* const own = x.codes + row * x.in_size;
  constexpr int kTogether = kCodesTogether<bits>;
  for (int64_t in = first; in < first + count; in += kTogether, codes += kBytesTogether<bits>) {
    if constexpr (M <= 4) prefetch_codes<bits>(codes);
    repeat<kTogether / 4>([&](auto quarter) TOKA_LAMBDA {
      Ints weights[kPanelVectors];
      repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA { weights[v] = four_codes<bits>(codes, v, quarter); });
      repeat<M>([&](auto i) TOKA_LAMBDA {
        const Ints four = broadcast_four(own + i * x.in_size + in + 4 * quarter);
        repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA { total[i][v] = dot_four(total[i][v], weights[v], four); });
      });
    });
  }
}

#else

// Without dot products of bytes, products are added in pairs: in 16 bits where they fit, else in 32.
constexpr bool kHasPairs = true;

typedef int16_t Shorts __attribute__((vector_size(4 * kLanes)));

// Unsigned bytes times signed ones, each two adjacent products added: at most 65535 / 2 in magnitude, or they saturate.
static TOKA_INLINE Shorts multiply_bytes(Ints codes, Ints x) {
#if defined(__AVX512F__)
  return (Shorts)_mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
#else
  return (Shorts)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
#endif
}

static TOKA_INLINE Ints multiply_shorts(Shorts first, Shorts second) {
#if defined(__AVX512F__)
  return (Ints)_mm512_madd_epi16((__m512i)first, (__m512i)second);
#else
  return (Ints)_mm256_madd_epi16((__m256i)first, (__m256i)second);
#endif
}

// As the other add_products. The products of 32 inputs and codes of 4 bits add up in 16 bits, since 16 * 15 * 127 is
// less than 32768 in each half of a lane; of 8 inputs and codes of 6 bits, likewise: 4 * 63 * 127.
template <int M, int bits>
static TOKA_INLINE void add_products(const Int8Rows& x, int64_t row, int64_t first, int64_t count, const uint8_t* codes,
                                     Ints (&total)[M][kPanelVectors]) {
  const int64_t in_size = x.in_size;
  const Shorts ones = Shorts{} + 1;
  constexpr int kTogether = kCodesTogether<bits>;
  if constexpr (bits == 4) {
    const int8_t* const own = x.codes + row * in_size;
    Shorts sums[M][kPanelVectors] = {};
    // Unrolled, GCC 12 would add products late, and keep all of them in memory until then.
#pragma GCC unroll 1
    for (int64_t in = first; in < first + count; in += kTogether, codes += kBytesTogether<bits>) {
      if constexpr (M <= 4) prefetch_codes<bits>(codes);
      repeat<kTogether / 4>([&](auto quarter) TOKA_LAMBDA {
        Ints weights[kPanelVectors];
        repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA { weights[v] = four_codes<bits>(codes, v, quarter); });
        repeat<M>([&](auto i) TOKA_LAMBDA {
          const Ints four = broadcast_four(own + i * in_size + in + 4 * quarter);
          repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA { sums[i][v] += multiply_bytes(weights[v], four); });
        });
      });
    }
    repeat<M>([&](auto i) TOKA_LAMBDA {
      repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA { total[i][v] += multiply_shorts(sums[i][v], ones); });
    });
  } else if constexpr (bits == 6) {
    const int8_t* const own = x.codes + row * in_size;
#pragma GCC unroll 1
    for (int64_t in = first; in < first + count; in += kTogether, codes += kBytesTogether<bits>) {
      if constexpr (M <= 4) prefetch_codes<bits>(codes);
      repeat<kTogether / 8>([&](auto half) TOKA_LAMBDA {
        repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA {
          const Ints low = four_codes<bits>(codes, v, 2 * half), high = four_codes<bits>(codes, v, 2 * half + 1);
          repeat<M>([&](auto i) TOKA_LAMBDA {
            const int8_t* const eight = own + i * in_size + in + 8 * half;
            const Shorts sums =
                multiply_bytes(low, broadcast_four(eight)) + multiply_bytes(high, broadcast_four(eight + 4));
            total[i][v] += multiply_shorts(sums, ones);
          });
        });
      });
    }
  } else {
    const int16_t* const own = x.pairs + row * in_size;
    for (int64_t in = first; in < first + count; in += kTogether, codes += kBytesTogether<bits>) {
      if constexpr (M <= 4) prefetch_codes<bits>(codes);
      repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA {
        const UInts all = (UInts)four_codes<bits>(codes, v, 0);
        const Shorts even = (Shorts)(all & 0x00FF00FF), odd = (Shorts)((all >> 8) & 0x00FF00FF);
        repeat<M>([&](auto i) TOKA_LAMBDA {
          const int16_t* const four = own + i * in_size + in;
          total[i][v] += multiply_shorts(even, (Shorts)broadcast_four(four));
          total[i][v] += multiply_shorts(odd, (Shorts)broadcast_four(four + 2));
        });
      });
    }
  }
}

#endif

// The sum of a row from those of its planes.
template <int planes>
static TOKA_INLINE Floats joined(const Ints (*totals)[kPanelVectors], int v) {
  if constexpr (planes == 1) return to_floats(totals[0][v]);
  return to_floats(totals[0][v]) * 65536.0f + to_floats(totals[1][v] * 256 + totals[2][v]);
}

// Rows [row, row + M) of x times a panel -> sums [M][kPanel]. part: inputs that have both one group and one block.
// code_sums [rows * planes][parts], as in Int8Rows.
template <int M, int planes, int bits, int part, bool has_min>
static TOKA_INLINE void multiply_parts(const Int8Rows& x, int64_t row, const uint8_t* codes, const Groups& groups,
                                       const int32_t* code_sums, float* sums) {
  const int64_t num_parts = x.in_size / part, num_blocks = x.in_size / kInputBlock;
  const int64_t group_parts = groups.inputs / part;
  const float *scales = groups.scales, *mins = groups.mins;
  const float *x_scales = x.scales + row * num_blocks, *x_sums = x.sums + row * num_blocks;
  code_sums += row * planes * num_parts;
  Floats sum[M][kPanelVectors] = {};
  for (int64_t first_part = 0; first_part < num_parts; first_part += group_parts, scales += kPanel, mins += kPanel)
    for (int64_t number = first_part; number < first_part + group_parts; ++number, codes += part * kPanel * bits / 8) {
      Ints total[M * planes][kPanelVectors];
      repeat<M * planes>([&](auto i) TOKA_LAMBDA {
        const Ints start = has_min ? Ints{} : Ints{} - groups.offset * code_sums[i * num_parts + number];
        repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA { total[i][v] = start; });
      });
      add_products<M * planes, bits>(x, row * planes, number * part, part, codes, total);
      const int64_t block = number * part / kInputBlock;
      repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA {
        const Floats scale = load(scales + v * kLanes), min = load(mins + v * kLanes);
        repeat<M>([&](auto i) TOKA_LAMBDA {
          if constexpr (has_min) sum[i][v] += min * broadcast(x_sums[i * num_blocks + block]);
          sum[i][v] += joined<planes>(total + i * planes, v) * (scale * broadcast(x_scales[i * num_blocks + block]));
        });
      });
    }
  repeat<M>([&](auto i) TOKA_LAMBDA {
    repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA { store(sums + i * kPanel + v * kLanes, sum[i][v]); });
  });
}

// As multiply_parts, of a panel whose single group has all inputs, and no min but the offset's.
template <int M, int bits>
static TOKA_INLINE void multiply_wide(const Int8Rows& x, int64_t row, const uint8_t* codes, const Groups& groups,
                                      float* sums) {
  const int64_t in_size = x.in_size, num_blocks = in_size / kInputBlock;
  const int32_t* const code_sums = x.code_sums + row * num_blocks;
  const float* const x_scales = x.scales + row * num_blocks;
  Floats sum[M][kPanelVectors] = {};
  for (int64_t first = 0; first < in_size; first += kWideBlock, codes += kWideBlock * kPanel) {
    const int64_t end = std::min(first + kWideBlock, in_size), block = first / kInputBlock;
    Ints total[M][kPanelVectors];
    repeat<M>([&](auto i) TOKA_LAMBDA {
      int32_t code_sum = 0;
      for (int64_t b = block; b < end / kInputBlock; ++b) code_sum += code_sums[i * num_blocks + b];
      repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA { total[i][v] = Ints{} - groups.offset * code_sum; });
    });
    add_products<M, bits>(x, row, first, end - first, codes, total);
    repeat<M>([&](auto i) TOKA_LAMBDA {
      const Floats scale = broadcast(x_scales[i * num_blocks + block]);
      repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA { sum[i][v] += to_floats(total[i][v]) * scale; });
    });
  }
  repeat<M>([&](auto i) TOKA_LAMBDA {
    repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA {
      store(sums + i * kPanel + v * kLanes, sum[i][v] * load(groups.scales + v * kLanes));
    });
  });
}

// Rows [row, row + M) of x times a panel -> sums [M][kPanel]. Each sum adds its parts in the order of x, so a row's
// result does not depend on the number of rows.
template <int M, int planes, int bits>
TOKA_NOINLINE void multiply_codes(const Int8Rows& x, int64_t row, const uint8_t* codes, const Groups& groups,
                                  float* sums) {
  if constexpr (bits == 8 && planes == 1)
    if (groups.has_all) return multiply_wide<M, bits>(x, row, codes, groups, sums);
  if constexpr (bits == 6)
    if (groups.inputs < kInputBlock)
      return multiply_parts<M, planes, bits, kInputSum, false>(x, row, codes, groups, x.half_sums, sums);
  if (groups.has_min)
    return multiply_parts<M, planes, bits, kInputBlock, true>(x, row, codes, groups, x.code_sums, sums);
  multiply_parts<M, planes, bits, kInputBlock, false>(x, row, codes, groups, x.code_sums, sums);
}

// How many rows of x are multiplied together.
template <int planes>
constexpr int kCodeRows = kInt8Rows / planes;

// multiply_codes for 1 to kCodeRows rows, a number known at run time.
template <int planes, int bits, int M = kCodeRows<planes>>
void multiply_code_rows(int num_rows, const Int8Rows& x, int64_t row, const uint8_t* codes, const Groups& groups,
                        float* sums) {
  if (num_rows == M) return multiply_codes<M, planes, bits>(x, row, codes, groups, sums);
  if constexpr (M > 1) multiply_code_rows<planes, bits, M - 1>(num_rows, x, row, codes, groups, sums);
}

// The largest magnitude of x [count]; NaN if a number is not finite.
template <typename Element>
float largest(const Element* x, int64_t count) {
  Floats most{};
  Ints finite = ~Ints{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats part = load(x + i);
    finite &= is_finite(part);
    most = max(part > 0.0f ? part : -part, most);
  }
  return -sum(finite) == kLanes ? max(most) : NAN;
}

// Rounds x [count], a multiple of kInputBlock, to codes; returns their scale. Numbers that are not finite make it NaN.
// code_sums: the sums of each kInputBlock codes, half_sums of each kInputSum.
template <typename Element>
float quantize(const Element* x, int64_t count, int8_t* codes, int32_t* code_sums, int32_t* half_sums) {
  const float most = largest(x, count), inverse = most > 1e-30f ? 127 / most : 0, scale = most / 127;
  for (int64_t i = 0; i < count; i += kInputSum) {
    Ints all{};
    repeat<kInputSum / kLanes>([&](auto v) TOKA_LAMBDA {
      const Floats scaled = load(x + i + v * kLanes) * inverse;
      // Adding and subtracting it rounds to the nearest integer, ties to even.
      constexpr float kRounding = 12582912;
      const Ints rounded = __builtin_convertvector(scaled + kRounding - kRounding, Ints);
      typedef int8_t Bytes __attribute__((vector_size(kLanes)));
      const Bytes narrow = __builtin_convertvector(rounded, Bytes);
      std::memcpy(codes + i + v * kLanes, &narrow, sizeof narrow);
      all += rounded;
    });
    half_sums[i / kInputSum] = int32_t(sum(all));
  }
  for (int64_t b = 0; b < count / kInputBlock; ++b) code_sums[b] = half_sums[2 * b] + half_sums[2 * b + 1];
  return scale;
}

// A block of x -> integers of kPlanes bytes, as Int8Rows has them. The scale is a power of two, so that numbers which
// are not much smaller than the largest one are exact. Numbers that are not finite make it NaN. codes, code_sums and
// half_sums: of the first plane, in rows of in_size inputs.
template <typename Element>
void split(const Element* x, int64_t in_size, int8_t* codes, float* scale, float* scaled_sum, int32_t* code_sums,
           int32_t* half_sums) {
  static_assert(kPlanes == 3);
  constexpr int kVectors = kInputBlock / kLanes, kBias = 127, kMantissaBits = 23;
  constexpr int32_t kMantissa = (1 << kMantissaBits) - 1, kInfinity = 0x7F800000;
  constexpr int32_t kTiny = (kBias - 100) << kMantissaBits;  // 2^-100; less is as good as zero
  // The largest integer: more would not fit, since the lower bytes have signs.
  constexpr int32_t kMost = 127 << 16 | 127 << 8 | 127;
  Floats numbers[kVectors];
  Ints magnitudes{};  // the bits of magnitudes have their order
  repeat<kVectors>([&](auto v) TOKA_LAMBDA {
    numbers[v] = load(x + v * kLanes);
    const Ints own = (Ints)numbers[v] & INT32_MAX;
    magnitudes = own > magnitudes ? own : magnitudes;
  });
  const int32_t most = max(magnitudes);
  const bool is_usable = most >= kTiny && most < kInfinity;
  // The largest integer has 23 bits, or 22 if it would exceed kMost.
  const int shift = 22 - (most >> kMantissaBits) + kBias - ((most & kMantissa) > 2 * kMost - kMantissa - 1);
  const float inverse = is_usable ? from_bits(uint32_t(kBias + shift) << kMantissaBits) : 0;
  *scale = is_usable ? from_bits(uint32_t(kBias - shift) << kMantissaBits) : most < kInfinity ? 0 : NAN;
  Ints sums[2][kPlanes] = {};
  repeat<kVectors>([&](auto v) TOKA_LAMBDA {
    const Floats scaled = numbers[v] * inverse;
    const Floats half = (Floats)(((Ints)scaled & INT32_MIN) | (Ints)broadcast(0.5f));
    // So that the lower bytes have no signs.
    const Ints shifted = __builtin_convertvector(scaled + half, Ints) + 0x8080;
    const Ints planes[kPlanes] = {shifted >> 16, (shifted >> 8 & 255) - 128, (shifted & 255) - 128};
    repeat<kPlanes>([&](auto plane) TOKA_LAMBDA {
      typedef int8_t Bytes __attribute__((vector_size(kLanes)));
      const Bytes narrow = __builtin_convertvector(planes[plane], Bytes);
      std::memcpy(codes + plane * in_size + v * kLanes, &narrow, sizeof narrow);
      sums[v * kLanes / kInputSum][plane] += planes[plane];
    });
  });
  int64_t total = 0;
  for (int plane = 0; plane < kPlanes; ++plane) {
    const int32_t first = int32_t(sum(sums[0][plane])), second = int32_t(sum(sums[1][plane]));
    int32_t* const halves = half_sums + plane * in_size / kInputSum;
    halves[0] = first, halves[1] = second;
    code_sums[plane * in_size / kInputBlock] = first + second;
    total = total * 256 + first + second;
  }
  *scaled_sum = *scale * float(total);
}
