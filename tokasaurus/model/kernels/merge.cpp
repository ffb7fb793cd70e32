// Merges what the same rows attended to in two parts, by log-sum-exp (as attention/shared_prefix.py does in torch).

#include <cmath>

#include "vectors.h"

namespace {

// A query head of a row: [D] floats of each part.
template <typename Element>
void merge_one(const float* first, float first_lse, const float* second, float second_lse, Element* output,
               int64_t head_dim) {
  const float largest = larger(first_lse, second_lse);
  // Neither part is seen: any finite number in place of -inf makes both weights 0.
  const float from = largest == -INFINITY ? 0.0f : largest;
  const float first_weight = std::exp(first_lse - from), second_weight = std::exp(second_lse - from);
  const float total = first_weight + second_weight;
  const float inverse = total == 0 ? 0.0f : 1.0f / total;
  for (int64_t d = 0; d < head_dim; ++d)
    from_float(output + d, first[d] * (first_weight * inverse) + second[d] * (second_weight * inverse));
}

template <typename Element>
void merge(const float* first, const float* first_lse, const float* second, const float* second_lse, Element* output,
           int64_t count, int64_t head_dim) {
  constexpr int64_t kFewest = 512;  // below, a second thread costs more than it saves
#pragma omp parallel for if (count >= kFewest)
  for (int64_t index = 0; index < count; ++index) {
    const int64_t place = index * head_dim;
    merge_one(first + place, first_lse[index], second + place, second_lse[index], output + place, head_dim);
  }
}

}  // namespace

extern "C" {

// first, second [count, head_dim] and their lse [count] -> output [count, head_dim]; count is rows times query heads.
void toka_merge(int64_t is_bfloat16, const float* first, const float* first_lse, const float* second,
                const float* second_lse, void* output, int64_t count, int64_t head_dim) {
  if (is_bfloat16)
    merge(first, first_lse, second, second_lse, (bfloat16*)output, count, head_dim);
  else
    merge(first, first_lse, second, second_lse, (float*)output, count, head_dim);
}
}
