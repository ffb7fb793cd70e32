// Norms of rows. Sources: arXiv 1910.07467 (RMS), 1607.06450 (layer).
#pragma once

#include "simd/simd.h"

enum NormKind : int64_t { kNoNorm, kRmsNorm, kLayerNorm };  // NORM_KINDS in bindings.py

// Filled by Python: bindings.NormStruct.
struct Norm {
  int64_t kind;                // a NormKind
  const float *weight, *bias;  // [size], or null
  double eps;
};

constexpr Norm kUnnormed{kNoNorm, nullptr, nullptr, 0};

// to [size] = x less its mean (of a layer norm), scaled to a mean square of 1, times weight, plus bias; computed in
// float32 and rounded once. `to` may alias x. Precondition: there is a norm.
template <typename Element>
void normalize(const Norm& norm, const Element* x, int64_t size, Element* to) {
  const int64_t whole = size / kLanes * kLanes;
  float mean = 0;
  if (norm.kind == kLayerNorm) {
    Floats numbers = {};
    for (int64_t i = 0; i < whole; i += kLanes) numbers += load(x + i);
    mean = sum(numbers);
    for (int64_t i = whole; i < size; ++i) mean += to_float(x[i]);
    mean /= float(size);
  }
  Floats squares = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Floats number = load(x + i) - mean;
    squares += number * number;
  }
  float total = sum(squares);
  for (int64_t i = whole; i < size; ++i) total += (to_float(x[i]) - mean) * (to_float(x[i]) - mean);
  const float scale = 1.0f / std::sqrt(total / float(size) + float(norm.eps));
  for (int64_t i = 0; i < whole; i += kLanes) {
    Floats number = (load(x + i) - mean) * scale;
    if (norm.weight != nullptr) number *= load(norm.weight + i);
    if (norm.bias != nullptr) number += load(norm.bias + i);
    store(to + i, number);
  }
  for (int64_t i = whole; i < size; ++i) {
    float number = (to_float(x[i]) - mean) * scale;
    if (norm.weight != nullptr) number *= norm.weight[i];
    if (norm.bias != nullptr) number += norm.bias[i];
    from_float(to + i, number);
  }
}
