// What the model says of given tokens, a row of logits for each: two passes over the row, and one for the likeliest.

#include <cmath>
#include <vector>

#include "simd/element_type.h"
#include "sampling/logit_rows.h"
#include "simd/phases.h"
#include "simd/threads.h"
#include "simd/simd.h"

namespace {

struct Reached {
  float largest;
  int64_t num_larger;
};

// The largest of the row, and how many are larger than `value`.
template <typename Element>
Reached reach(const Element* row, int64_t vocab_size, float value) {
  Floats largest = splat(-INFINITY);
  Ints num_larger = {};
  for (int64_t first = 0; first < vocab_size; first += kLanes) {
    const Floats here = load_row(row, first, vocab_size);
    largest = max(largest, here);
    num_larger -= here > value;  // true is -1
  }
  return {max(largest), sum(num_larger)};
}

template <typename Element>
void score(const Element* logits, int64_t num_rows, int64_t vocab_size, const int32_t* target_ids, float* logprobs,
           int32_t* ranks, int64_t num_top, int32_t* top_ids, float* top_logprobs) {
  Team::get().share(num_rows, 1, [&](int64_t index) {
    const Element* row = logits + index * vocab_size;
    const float target = to_float(row[target_ids[index]]);
    const Reached reached = reach(row, vocab_size, target);
    const float log_sum = std::log(sum_exp(row, vocab_size, 1, reached.largest, nullptr));
    logprobs[index] = target - reached.largest - log_sum;
    ranks[index] = int32_t(reached.num_larger + 1);
    if (num_top == 0) return;
    float* values = top_logprobs + index * num_top;
    find_largest(row, vocab_size, num_top, top_ids + index * num_top, values);
    for (int64_t place = 0; place < num_top; ++place) values[place] = values[place] - reached.largest - log_sum;
  });
}

}  // namespace

// logits [num_rows, vocab_size], target_ids [num_rows] -> log-probabilities and ranks of these, [num_rows], and of the
// likeliest tokens, falling, [num_rows, num_top].
TOKA_EXPORT void toka_score(int64_t logits_type, const void* logits, int64_t num_rows, int64_t vocab_size,
                            const int32_t* target_ids, float* logprobs, int32_t* ranks, int64_t num_top,
                            int32_t* top_ids, float* top_logprobs) {
  const PhaseTimer timer(kSampling);
  with_activation_type(logits_type, [&](auto* element) {
    score((const Pointee<decltype(element)>*)logits, num_rows, vocab_size, target_ids, logprobs, ranks, num_top, top_ids,
          top_logprobs);
  });
}
