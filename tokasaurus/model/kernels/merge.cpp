// Merges two parts of the same rows (as attention/shared_prefix.py does in torch).

#include "merge.h"

#include "element_type.h"
#include "threads.h"

// first, second [count, head_dim] and their lse [count] -> output [count, head_dim] of output_type; count is rows times
// query heads, head_dim a multiple of 16.
TOKA_EXPORT void toka_merge(int64_t output_type, const float* first, const float* first_lse, const float* second,
                            const float* second_lse, void* output, int64_t count, int64_t head_dim) {
  constexpr int64_t kFewest = 2048;  // below, a second thread costs more than it saves
  with_activation_type(output_type, [&](auto* element) {
    typedef Pointee<decltype(element)> Element;
    Team::get().share(count, kFewest, [&](int64_t index) {
      const int64_t at = index * head_dim;
      merge_parts(first + at, first_lse[index], second + at, second_lse[index], (Element*)output + at, head_dim);
    });
  });
}
