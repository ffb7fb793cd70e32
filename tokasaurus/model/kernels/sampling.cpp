// One pass over each row of logits: temperature, hashed Gumbel noise, argmax; another for log-probabilities.
// The noise is that of sampling_noise.gumbel_noise, which documents it.

#include <cmath>

#include "vectors.h"

namespace {

constexpr float kLargestNoise = 22.88f;  // -log(2^-33)

static inline u32x16 mix32(u32x16 x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

static inline f32x16 gumbel(u32x16 token_ids, uint32_t first_key, uint32_t second_key) {
  u32x16 hashed = mix32(mix32(token_ids * 0x9E3779B1u + first_key) ^ second_key);
  f32x16 uniform = (__builtin_convertvector(hashed, f32x16) + 0.5f) * 0x1p-32f;
  // log1p(-u) from the log of the rounded 1 - u, corrected for that rounding (Kahan).
  f32x16 rest = 1.0f - uniform;
  f32x16 taken = 1.0f - rest;
  const f32x16 smallest = splat(0x1p-126f);
  f32x16 exponential = -log_positive(greater(rest, smallest)) * uniform / greater(taken, smallest);
  exponential = taken > 0.0f ? exponential : uniform;
  return -log_positive(exponential);
}

template <typename Element>
static inline f32x16 load_row(const Element* row, int64_t token, int64_t vocab_size) {
  if (token + 16 <= vocab_size) return load16(row + token);
  f32x16 x = splat(-INFINITY);
  for (int64_t lane = 0; token + lane < vocab_size; ++lane) x[lane] = to_float(row[token + lane]);
  return x;
}

// The winner, the lowest token id among equals.
template <typename Element>
int64_t draw(const Element* row, int64_t vocab_size, float inverse_temperature, const uint32_t* keys) {
  const bool greedy = inverse_temperature == 0;
  const f32x16 scale = splat(greedy ? 1.0f : inverse_temperature);
  f32x16 best = splat(-INFINITY);
  i32x16 best_token = {};
  const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  float bar = -INFINITY;
  for (int64_t first = 0; first < vocab_size; first += 64) {
    f32x16 scores[4];
    for (int i = 0; i < 4; ++i) scores[i] = load_row(row, first + 16 * i, vocab_size) * scale;
    if (!greedy) {
      // Where the model is sure, few tokens could be lifted above the best so far even by the largest noise.
      const f32x16 largest = greater(greater(scores[0], scores[1]), greater(scores[2], scores[3]));
      if (max16(largest) + kLargestNoise < bar) continue;
    }
    for (int i = 0; i < 4; ++i) {
      const i32x16 tokens = lanes + int32_t(first + 16 * i);
      if (!greedy) scores[i] += gumbel((u32x16)tokens, keys[0], keys[1]);
      const i32x16 wins = scores[i] > best;
      best_token = (tokens & wins) | (best_token & ~wins);
      best = greater(scores[i], best);
    }
    bar = max16(best);
  }
  int winner = 0;
  for (int lane = 1; lane < 16; ++lane)
    if (best[lane] > best[winner] || (best[lane] == best[winner] && best_token[lane] < best_token[winner]))
      winner = lane;
  return best_token[winner];
}

template <typename Element>
float log_sum_exp(const Element* row, int64_t vocab_size) {
  f32x16 largest = splat(-INFINITY);
  for (int64_t token = 0; token < vocab_size; token += 16) largest = greater(largest, load_row(row, token, vocab_size));
  const float maximum = max16(largest);
  f32x16 total = {};
  for (int64_t token = 0; token < vocab_size; token += 16)
    total += exp_nonpositive(load_row(row, token, vocab_size) - maximum);
  return maximum + std::log(sum16(total));
}

template <typename Element>
void draw_rows(const Element* logits, int64_t num_rows, int64_t vocab_size, const float* inverse_temperatures,
               const uint32_t* keys, int64_t* tokens) {
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t index = 0; index < num_rows; ++index)
    tokens[index] = draw(logits + index * vocab_size, vocab_size, inverse_temperatures[index], keys + 2 * index);
}

template <typename Element>
void chosen_logprobs(const Element* logits, int64_t num_rows, int64_t vocab_size, const int64_t* tokens,
                     float* logprobs) {
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t index = 0; index < num_rows; ++index) {
    const Element* row = logits + index * vocab_size;
    logprobs[index] = to_float(row[tokens[index]]) - log_sum_exp(row, vocab_size);
  }
}

}  // namespace

extern "C" {

// logits [num_rows, vocab_size]; inverse_temperatures [num_rows], 0 is greedy; keys [num_rows, 2]; tokens [num_rows].
void toka_draw(int64_t is_bfloat16, const void* logits, int64_t num_rows, int64_t vocab_size,
               const float* inverse_temperatures, const uint32_t* keys, int64_t* tokens) {
  if (is_bfloat16)
    draw_rows((const bfloat16*)logits, num_rows, vocab_size, inverse_temperatures, keys, tokens);
  else
    draw_rows((const float*)logits, num_rows, vocab_size, inverse_temperatures, keys, tokens);
}

void toka_chosen_logprobs(int64_t is_bfloat16, const void* logits, int64_t num_rows, int64_t vocab_size,
                          const int64_t* tokens, float* logprobs) {
  if (is_bfloat16)
    chosen_logprobs((const bfloat16*)logits, num_rows, vocab_size, tokens, logprobs);
  else
    chosen_logprobs((const float*)logits, num_rows, vocab_size, tokens, logprobs);
}
}
