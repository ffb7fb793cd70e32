// Sixteen floats at a time, in the compiler's portable vector types: one AVX-512 register, two of AVX2, four of NEON.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

struct bfloat16 {
  uint16_t bits;
};

static inline f32x16 splat(float x) { return x - f32x16{}; }

static inline f32x16 load16(const float* from) {
  f32x16 x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

static inline f32x16 load16(const bfloat16* from) {
#ifdef __AVX512F__
  // GCC 12 widens the portable form in two halves.
  return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#else
  u16x16 half;
  std::memcpy(&half, from, sizeof half);
  return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
#endif
}

static inline void store16(float* to, f32x16 x) { std::memcpy(to, &x, sizeof x); }

static inline float to_float(float x) { return x; }

static inline float to_float(bfloat16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline void from_float(float* to, float x) { *to = x; }

// Rounds to the nearest, ties to even. NaN stays NaN.
static inline void from_float(bfloat16* to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x)
    to->bits = uint16_t((bits >> 16) | 0x40);
  else
    to->bits = uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// Halving keeps the chain of dependent operations short.
static inline float sum16(f32x16 x) {
  f32x8 half[2];
  std::memcpy(half, &x, sizeof x);
  f32x8 eight = half[0] + half[1];
  f32x4 quarter[2];
  std::memcpy(quarter, &eight, sizeof eight);
  f32x4 four = quarter[0] + quarter[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

static inline float larger(float a, float b) { return a > b ? a : b; }

static inline float max16(f32x16 x) {
  f32x8 half[2];
  std::memcpy(half, &x, sizeof x);
  f32x8 eight = half[0] > half[1] ? half[0] : half[1];
  f32x4 quarter[2];
  std::memcpy(quarter, &eight, sizeof eight);
  f32x4 four = quarter[0] > quarter[1] ? quarter[0] : quarter[1];
  return larger(larger(four[0], four[2]), larger(four[1], four[3]));
}

static inline f32x16 greater(f32x16 a, f32x16 b) { return a > b ? a : b; }

// e^x for x <= 0 to a relative error of 2e-7; 0 below -87. x = n ln 2 + r, |r| <= ln 2 / 2, Taylor polynomial in r.
static inline f32x16 exp_nonpositive(f32x16 x) {
  const f32x16 magic = splat(12582912.0f);  // adding 1.5 * 2^23 rounds to an integer
  f32x16 clamped = greater(x, splat(-87.0f));
  f32x16 shifted = clamped * 1.44269504088896341f + magic;
  f32x16 n = shifted - magic;
  f32x16 r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  f32x16 p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  i32x16 exponent = __builtin_convertvector(n, i32x16) << 23;
  f32x16 value = (f32x16)((i32x16)p + exponent);
  return x < splat(-87.0f) ? f32x16{} : value;
}

// Natural logarithm of positive normal numbers to a relative error of 3e-7.
// x = 2^n m, sqrt(1/2) <= m < sqrt(2); log m = 2 atanh(s), s = (m - 1) / (m + 1), by its odd series.
static inline f32x16 log_positive(f32x16 x) {
  const u32x16 half_sqrt_bits = u32x16{} + 0x3F3504F3u;
  u32x16 bits = (u32x16)x - half_sqrt_bits;
  f32x16 n = __builtin_convertvector((i32x16)bits >> 23, f32x16);
  f32x16 m = (f32x16)((bits & 0x007FFFFFu) + half_sqrt_bits);
  f32x16 s = (m - 1.0f) / (m + 1.0f);
  f32x16 square = s * s;
  f32x16 p = splat(2.0f / 9);
  p = p * square + 2.0f / 7;
  p = p * square + 2.0f / 5;
  p = p * square + 2.0f / 3;
  p = p * square + 2.0f;
  return n * 0.693147180559945309f + p * s;
}
