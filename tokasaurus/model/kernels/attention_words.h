// What a multiply-add of the attention kernels takes: a word of the cache holds one float, or two bfloat16 numbers. The
// other factor, of queries and of weights, is bfloat16 where one instruction multiplies and adds pairs of them, and
// otherwise float. Everything is summed in float32.
//
// Vectors are as long as the processor's registers: GCC 12 keeps longer ones in memory.
#pragma once

#include <cmath>

#include "rounding.h"
#include "vectors.h"

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Pairs __attribute__((vector_size(4 * kLanes)));

template <typename Element>
struct Words;

template <>
struct Words<float> {
  typedef float Word;
  typedef Floats Vector;
  typedef float Factor;
  static constexpr int kElements = 1;
};

template <>
struct Words<bfloat16> {
  typedef uint32_t Word;
  typedef Pairs Vector;
#ifdef __AVX512BF16__
  typedef bfloat16 Factor;
#else
  typedef float Factor;
#endif
  static constexpr int kElements = 2;
};

template <typename Vector = Floats, typename Word>
static inline Vector load(const Word* from) {
  Vector x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

static inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

// sum + words * factors, one word or pair of factors for all words.
static inline Floats add_products(Floats sum, Floats words, const float* factor) { return sum + words * *factor; }

static inline Floats add_products(Floats sum, Pairs words, const float* factors) {
  sum += (Floats)(words << 16) * factors[0];
  return sum + (Floats)(words & 0xFFFF0000u) * factors[1];
}

#ifdef __AVX512BF16__
static inline Floats add_products(Floats sum, Pairs words, const bfloat16* factors) {
  int32_t both;
  std::memcpy(&both, factors, sizeof both);
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)words, (__m512bh)_mm512_set1_epi32(both));
}

static inline void store_factors(bfloat16* to, Floats x) { store_rounded(to, x); }
#endif

static inline void store_factors(float* to, Floats x) { store(to, x); }

static inline void to_factor(float* to, bfloat16 x) { *to = to_float(x); }

template <typename Element>
static inline void to_factor(Element* to, Element x) {
  *to = x;
}

static inline Floats larger_of(Floats a, Floats b) { return a > b ? a : b; }

#ifdef __AVX512F__
static inline float largest_of(Floats x) { return max16(x); }

static inline float sum_of(Floats x) { return sum16(x); }
#else
static inline float largest_of(Floats x) {
  float largest = x[0];
  for (int lane = 1; lane < kLanes; ++lane) largest = larger(largest, x[lane]);
  return largest;
}

static inline float sum_of(Floats x) {
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += x[lane];
  return sum;
}
#endif

static inline bool any_greater(Floats x, float limit) {
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#else
  return largest_of(x) > limit;
#endif
}

// 2^x to a relative error of 2e-7 for x below 128; where that is less than a normal number, something no larger.
static inline Floats exp2_of(Floats x) {
#ifdef __AVX512F__
  const Floats n = (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  x = larger_of(x, x - x - 127.0f);
  const Floats n = (x + 12582912.0f) - 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
#endif
  // The polynomial with the smallest relative error from 2^f for |f| <= 1/2.
  const Floats f = x - n;
  Floats p = f * 1.32647272e-3f + 9.67151264e-3f;
  p = p * f + 5.55073374e-2f;
  p = p * f + 2.40222421e-1f;
  p = p * f + 6.93146978e-1f;
  p = p * f + 1.0f;
#ifdef __AVX512F__
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const Integers exponent = __builtin_convertvector(n, Integers);
  const Integers value = (Integers)p + (exponent << 23);
  return (Floats)(value & (exponent > -127));
#endif
}
