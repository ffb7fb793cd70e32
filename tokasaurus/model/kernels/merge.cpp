// Merges two parts of the same rows (as attention/shared_prefix.py does in torch).

#include "merge.h"

namespace {

template <typename Element>
void merge(const float* first, const float* first_lse, const float* second, const float* second_lse, Element* output,
           int64_t count, int64_t head_dim) {
  constexpr int64_t kFewest = 2048;  // below, a second thread costs more than it saves
#pragma omp parallel for if (count >= kFewest)
  for (int64_t index = 0; index < count; ++index) {
    const int64_t place = index * head_dim;
    merge_parts(first + place, first_lse[index], second + place, second_lse[index], output + place, head_dim);
  }
}

}  // namespace

extern "C" {

// first, second [count, head_dim] and their lse [count] -> output [count, head_dim]; count is rows times query heads,
// head_dim a multiple of 16.
void toka_merge(int64_t is_bfloat16, const float* first, const float* first_lse, const float* second,
                const float* second_lse, void* output, int64_t count, int64_t head_dim) {
  if (is_bfloat16)
    merge(first, first_lse, second, second_lse, (bfloat16*)output, count, head_dim);
  else
    merge(first, first_lse, second, second_lse, (float*)output, count, head_dim);
}
}
