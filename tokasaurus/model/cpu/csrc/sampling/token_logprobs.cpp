// Prompt logprobs: the logprobs and ranks of given tokens, one row of logits each, and the row's top-k logprobs. Two
// passes over the row, and one for the top-k.

#include <cmath>
#include <vector>

#include "sampling/logit_rows.h"
#include "simd/element_type.h"
#include "simd/phases.h"
#include "simd/simd.h"
#include "simd/threads.h"

namespace {

struct RowMax {
  float largest;  // NaN if a logit is NaN or positive infinity
  int64_t num_larger;
};

// The largest logit of the row, and how many are larger than `value`.
template <typename Element>
RowMax find_row_max(const Element* row, int64_t vocab_size, float value) {
  Floats largest = broadcast(-INFINITY);
  Ints num_larger = {}, below_infinity = ~Ints{};
  for (int64_t first = 0; first < vocab_size; first += kLanes) {
    const Floats here = load_row(row, first, vocab_size);
    largest = max(largest, here);
    num_larger -= here > value;  // true is -1
    below_infinity &= here < INFINITY;
  }
  return {-sum(below_infinity) == kLanes ? max(largest) : NAN, sum(num_larger)};
}

template <typename Element>
void prompt_logprobs(const Element* logits, int64_t num_rows, int64_t vocab_size, const int32_t* target_ids,
                     float* logprobs, int32_t* ranks, int64_t num_top, int32_t* top_ids, float* top_logprobs) {
  Team::get().parallel_for(num_rows, 1, [&](int64_t index) {
    const Element* row = logits + index * vocab_size;
    const float target = to_float(row[target_ids[index]]);
    const RowMax row_max = find_row_max(row, vocab_size, target);
    const float log_sum = std::log(sum_exp(row, vocab_size, 1, row_max.largest, nullptr));
    logprobs[index] = target - row_max.largest - log_sum;
    ranks[index] = int32_t(row_max.num_larger + 1);
    if (num_top == 0) return;
    float* values = top_logprobs + index * num_top;
    find_top_k(row, vocab_size, num_top, top_ids + index * num_top, values);
    for (int64_t i = 0; i < num_top; ++i) values[i] = values[i] - row_max.largest - log_sum;
  });
}

}  // namespace

// logits [num_rows, vocab_size], target_ids [num_rows] -> logprobs and ranks of the targets, [num_rows], and ids and
// logprobs of the num_top most probable tokens, in descending order, [num_rows, num_top].
TOKA_EXPORT void toka_token_logprobs(int64_t logits_type, const void* logits, int64_t num_rows, int64_t vocab_size,
                                     const int32_t* target_ids, float* logprobs, int32_t* ranks, int64_t num_top,
                                     int32_t* top_ids, float* top_logprobs) {
  const PhaseTimer timer(kSampling);
  dispatch_activation_type(logits_type, [&](auto tag) {
    prompt_logprobs((const TypeOf<decltype(tag)>*)logits, num_rows, vocab_size, target_ids, logprobs, ranks, num_top,
                    top_ids, top_logprobs);
  });
}
