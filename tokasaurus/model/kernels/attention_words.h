// What a multiply-add of the attention kernels takes: a word of the cache holds one float, or two bfloat16 numbers
// whose products are added up by one instruction where the processor has it. Everything is summed in float32.
#pragma once

#include <cmath>

#include "rounding.h"
#include "vectors.h"

template <typename Element>
struct Words;

template <>
struct Words<float> {
  typedef float Word;
  typedef f32x16 Vector;
  static constexpr int kElements = 1;
};

template <>
struct Words<bfloat16> {
  typedef uint32_t Word;
  typedef u32x16 Vector;
  static constexpr int kElements = 2;
};

static inline u32x16 load16(const uint32_t* from) {
  u32x16 x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

// sum + the products of one word with each of sixteen.
static inline f32x16 add_products(f32x16 sum, f32x16 sixteen, float one) { return sum + sixteen * one; }

static inline f32x16 add_products(f32x16 sum, u32x16 sixteen, uint32_t one) {
#ifdef __AVX512BF16__
  return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)sixteen, (__m512bh)_mm512_set1_epi32(int(one)));
#else
  const u32x16 both = u32x16{} + one;
  sum += (f32x16)(sixteen << 16) * (f32x16)(both << 16);
  return sum + (f32x16)(sixteen & 0xFFFF0000u) * (f32x16)(both & 0xFFFF0000u);
#endif
}

// 2^x to a relative error of 2e-7 for x below 128; where that is less than a normal number, something no larger.
static inline f32x16 exp2_16(f32x16 x) {
#ifdef __AVX512F__
  const f32x16 n = (f32x16)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const f32x16 magic = splat(12582912.0f);  // adding 1.5 * 2^23 rounds to an integer
  x = greater(x, splat(-127.0f));
  const f32x16 n = (x + magic) - magic;
#endif
  // The polynomial with the smallest relative error from 2^f for |f| <= 1/2.
  const f32x16 f = x - n;
  f32x16 p = splat(1.32647272e-3f);
  p = p * f + 9.67151264e-3f;
  p = p * f + 5.55073374e-2f;
  p = p * f + 2.40222421e-1f;
  p = p * f + 6.93146978e-1f;
  p = p * f + 1.0f;
#ifdef __AVX512F__
  return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const i32x16 exponent = __builtin_convertvector(n, i32x16);
  const f32x16 value = (f32x16)((i32x16)p + (exponent << 23));
  return exponent > -127 ? value : f32x16{};
#endif
}

static inline bool any_greater(f32x16 x, float limit) {
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#else
  return max16(x) > limit;
#endif
}
