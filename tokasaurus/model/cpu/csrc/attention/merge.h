// Merges one query's attention over two parts by log-sum-exp.
#pragma once

#include <cmath>

#include "simd/simd.h"

// output [head_dim]: attention over both parts, given the output [head_dim] and the lse of each. An lse of -inf: the
// query attends to no token of that part. Returns the lse over both. output may alias an input.
template <typename Element>
static inline float merge_parts(const float* first, float first_lse, const float* second, float second_lse,
                                Element* output, int64_t head_dim) {
  const float largest = max(first_lse, second_lse);
  // If both are -inf, any finite reference makes both weights 0.
  const float reference = largest == -INFINITY ? 0.0f : largest;
  const float first_weight = std::exp(first_lse - reference), second_weight = std::exp(second_lse - reference);
  const float total = first_weight + second_weight;
  const float inverse = total == 0 ? 0.0f : 1.0f / total;
  const float first_scale = first_weight * inverse, second_scale = second_weight * inverse;
  for (int64_t d = 0; d < head_dim; d += kLanes)
    store(output + d, load(first + d) * first_scale + load(second + d) * second_scale);
  return reference + std::log(total);
}
