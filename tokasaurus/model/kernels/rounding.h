// Sixteen floats to the element type and back, and RMS norms in it.
#pragma once

#include <cmath>

#include "vectors.h"

static inline void store_rounded(float* to, f32x16 x) { store16(to, x); }

static inline void store_rounded(bfloat16* to, f32x16 x) {
#ifdef __AVX512BF16__
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
  for (int lane = 0; lane < 16; ++lane) from_float(to + lane, x[lane]);
#endif
}

// x as if it had been stored as an Element and loaded again.
template <typename Element>
static inline f32x16 rounded(f32x16 x) {
  Element stored[16];
  store_rounded(stored, x);
  return load16(stored);
}

template <>
inline f32x16 rounded<float>(f32x16 x) {
  return x;
}

// to [size] = x scaled to unit mean square, times weight: in float32, rounded once. `to` may be x.
template <typename Element>
void rms_norm(const Element* x, const Element* weight, float eps, int64_t size, Element* to) {
  f32x16 squares = {};
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) squares += load16(x + i) * load16(x + i);
  float total = sum16(squares);
  for (; i < size; ++i) total += to_float(x[i]) * to_float(x[i]);
  const float scale = 1.0f / std::sqrt(total / float(size) + eps);
  for (i = 0; i + 16 <= size; i += 16) store_rounded(to + i, load16(x + i) * scale * load16(weight + i));
  for (; i < size; ++i) from_float(to + i, to_float(x[i]) * scale * to_float(weight[i]));
}
