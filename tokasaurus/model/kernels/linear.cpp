// Single products, and token embedding from packed weights.

#include "products.h"

namespace {

template <typename Element>
void embed(const PackedWeights& weights, const int64_t* token_ids, int64_t num_tokens, Element* out) {
  constexpr int64_t kTokens = 16;  // of one thread at a time
  const int64_t in_size = weights.in_size, pair = kPair<Element>;
  Team::get().share(num_tokens, kTokens, [&](int64_t index) {
    const int64_t token = token_ids[index];
    const Element* from =
        (const Element*)weights.panels + token / kPanel * in_size * kPanel + token % kPanel * pair;
    Element* to = out + index * in_size;
    for (int64_t i = 0; i < in_size; i += pair, from += kPanel * pair)
      for (int64_t j = 0; j < pair; ++j) to[i + j] = from[j];
  });
}

}  // namespace

extern "C" {

// out = x, normed first where norm_weight is not null, times weights, plus bias; gated where the weights are.
void toka_multiply(const PackedWeights* weights, const void* x, int64_t x_stride, int64_t num_rows,
                   const void* norm_weight, double eps, void* out) {
  if (weights->is_bfloat16)
    multiply<bfloat16>({*weights, (const bfloat16*)x, x_stride, num_rows, nullptr, (bfloat16*)out}, norm_weight, eps);
  else
    multiply<float>({*weights, (const float*)x, x_stride, num_rows, nullptr, (float*)out}, norm_weight, eps);
}

// The rows `token_ids` of the weights that were packed -> out [num_tokens, in_size].
void toka_embed(const PackedWeights* weights, const int64_t* token_ids, int64_t num_tokens, void* out) {
  if (weights->is_bfloat16)
    embed(*weights, token_ids, num_tokens, (bfloat16*)out);
  else
    embed(*weights, token_ids, num_tokens, (float*)out);
}

// Threads of all kernels from now on; 0: as many as torch has.
void toka_set_num_threads(int64_t num_threads) { Team::set_size(int(num_threads)); }

// Seconds by phase (phases.h) -> out [kNumPhases].
void toka_phase_seconds(double* out) { std::copy(phase_seconds, phase_seconds + kNumPhases, out); }
void toka_reset_phases() { std::fill(phase_seconds, phase_seconds + kNumPhases, 0.0); }
}
