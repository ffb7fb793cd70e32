// Exponentials, logarithms, hyperbolic tangents and error functions of vectors.
#pragma once

#include "simd/simd.h"

constexpr float kLn2 = 0.693147180559945309f, kLog2E = 1.44269504088896341f;

static TOKA_INLINE Floats round_to_int(Floats x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  return (x + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: floats of this size are whole numbers
#endif
}

// e^x for x <= 0 to a relative error of 2e-7; 0 below -87. x = n ln 2 + r, |r| <= ln 2 / 2, Taylor polynomial in r.
static TOKA_INLINE Floats exp_nonpositive(Floats x) {
  const Floats clamped = max(x, broadcast(-87.0f));
  const Floats n = round_to_int(clamped * kLog2E);
  // ln 2 in two parts; n times the first is exact.
  Floats r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Floats p = broadcast(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Ints exponent = __builtin_convertvector(n, Ints) << 23;
  const Floats value = (Floats)((Ints)p + exponent);
  return x < broadcast(-87.0f) ? Floats{} : value;
}

// 1 / (1 + e^-x).
static TOKA_INLINE Floats sigmoid(Floats x) {
  const Floats power = exp_nonpositive(x < Floats{} ? x : -x), part = 1.0f / (1.0f + power);
  return x < Floats{} ? power * part : part;
}

// tanh x to a relative error of 4e-7. Below 1, where 1 - e^-2|x| would lose digits, by a convergent of its continued
// fraction x / (1 + x^2 / (3 + x^2 / (5 + ...))).
static TOKA_INLINE Floats tanh(Floats x) {
  const Floats size = max(x, -x), square = x * x, power = exp_nonpositive(size * -2.0f);
  const Floats small_above = ((square + 1260.0f / 21) * square * 21.0f + 10395.0f) * size;
  const Floats small_below = ((square + 210.0f) * square + 4725.0f) * square + 10395.0f;
  const auto is_small = size < broadcast(1.0f);
  const Floats above = is_small ? small_above : 1.0f - power, below = is_small ? small_below : 1.0f + power;
  const Floats value = above / below;
  return x < Floats{} ? -value : value;
}

// erf x to an absolute error of 2e-7. Source: Abramowitz and Stegun, 7.1.26.
static TOKA_INLINE Floats erf(Floats x) {
  const Floats size = max(x, -x), t = 1.0f / (1.0f + 0.3275911f * size);
  Floats p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const Floats value = 1.0f - p * t * exp_nonpositive(-size * size);
  return x < Floats{} ? -value : value;
}

// 2^x for x below 128 to a relative error of 2e-7; if 2^x is below the normal numbers, so is the result.
static TOKA_INLINE Floats exp2(Floats x) {
#if !defined(__AVX512F__)
  x = max(x, broadcast(-127.0f));
#endif
  const Floats n = round_to_int(x);
  // The polynomial with the smallest relative error from 2^f for |f| <= 1/2.
  const Floats f = x - n;
  Floats p = f * 1.32647272e-3f + 9.67151264e-3f;
  p = p * f + 5.55073374e-2f;
  p = p * f + 2.40222421e-1f;
  p = p * f + 6.93146978e-1f;
  p = p * f + 1.0f;
#if defined(__AVX512F__)
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const Ints exponent = __builtin_convertvector(n, Ints);
  const Ints value = (Ints)p + (exponent << 23);
  return (Floats)(value & (exponent > -127));
#endif
}

// exp2 to a relative error of 3e-6, for results that are rounded to bfloat16.
static TOKA_INLINE Floats exp2_to_bfloat16(Floats x) {
#if defined(__AVX512DQ__)
  // The polynomial with the smallest relative error from 2^f for 0 <= f < 1; what is multiplied is 2^(x - f).
  const Floats f = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Floats p = f * 1.353417e-2f + 5.201146e-2f;
  p = p * f + 2.4144275e-1f;
  p = p * f + 6.9300383e-1f;
  p = p * f + 1.0000026f;
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
  return exp2(x);
#endif
}

// Natural logarithm of positive normal numbers to a relative error of 3e-7.
// x = 2^n m, sqrt(1/2) <= m < sqrt(2); log m = 2 atanh(s), s = (m - 1) / (m + 1), by its odd series.
static TOKA_INLINE Floats log_positive(Floats x) {
  const UInts half_sqrt_bits = UInts{} + 0x3F3504F3u;
  const UInts bits = (UInts)x - half_sqrt_bits;
  const Floats n = __builtin_convertvector((Ints)bits >> 23, Floats);
  const Floats m = (Floats)((bits & 0x007FFFFFu) + half_sqrt_bits);
  const Floats s = (m - 1.0f) / (m + 1.0f);
  const Floats square = s * s;
  Floats p = broadcast(2.0f / 9);
  p = p * square + 2.0f / 7;
  p = p * square + 2.0f / 5;
  p = p * square + 2.0f / 3;
  p = p * square + 2.0f;
  return n * kLn2 + p * s;
}
