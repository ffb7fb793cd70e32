// RMS norm. Source: arXiv 1910.07467.
#pragma once

#include "simd/simd.h"

// to [size] = x scaled to a mean square of 1, times weight; computed in float32 and rounded once. `to` may alias x.
template <typename Element>
void rms_norm(const Element* x, const float* weight, float eps, int64_t size, Element* to) {
  Floats squares = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) squares += load(x + i) * load(x + i);
  float total = sum(squares);
  for (; i < size; ++i) total += to_float(x[i]) * to_float(x[i]);
  const float scale = 1.0f / std::sqrt(total / float(size) + eps);
  for (i = 0; i + kLanes <= size; i += kLanes) store(to + i, load(x + i) * scale * load(weight + i));
  for (; i < size; ++i) from_float(to + i, to_float(x[i]) * scale * weight[i]);
}
