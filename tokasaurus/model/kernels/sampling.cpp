// One pass over each row of logits: temperature, hashed Gumbel noise, argmax; another for log-probabilities; three before
// them for top-p.
// The noise is that of sampling_noise.gumbel_noise, which documents it.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "phases.h"
#include "threads.h"
#include "vectors.h"

namespace {

constexpr float kLargestNoise = 22.88f;  // -log(2^-33)

static inline u32x16 mix32(u32x16 x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

static inline f32x16 uniform(u32x16 token_ids, uint32_t first_key, uint32_t second_key) {
  const u32x16 hashed = mix32(mix32(token_ids * 0x9E3779B1u + first_key) ^ second_key);
  return (__builtin_convertvector(hashed, f32x16) + 0.5f) * 0x1p-32f;
}

static inline f32x16 gumbel(u32x16 token_ids, uint32_t first_key, uint32_t second_key) {
  const f32x16 u = uniform(token_ids, first_key, second_key);
  // log1p(-u) from the log of the rounded 1 - u, corrected for that rounding (Kahan).
  f32x16 rest = 1.0f - u;
  f32x16 taken = 1.0f - rest;
  const f32x16 smallest = splat(0x1p-126f);
  f32x16 exponential = -log_positive(greater(rest, smallest)) * u / greater(taken, smallest);
  exponential = taken > 0.0f ? exponential : u;
  return -log_positive(exponential);
}

template <typename Element>
static inline f32x16 load_row(const Element* row, int64_t token, int64_t vocab_size) {
  if (token + 16 <= vocab_size) return load16(row + token);
  f32x16 x = splat(-INFINITY);
  for (int64_t lane = 0; token + lane < vocab_size; ++lane) x[lane] = to_float(row[token + lane]);
  return x;
}

// At least the noise of each token, from the bits of its uniform u: the noise is at most -log(u), and what the bits say as
// an integer falls short of log2(u).
static inline f32x16 at_least_gumbel(u32x16 token_ids, uint32_t first_key, uint32_t second_key) {
  const i32x16 bits = (i32x16)uniform(token_ids, first_key, second_key);
  const float log_two = 0.693147180559945309f;
  return (127 * log_two + 1e-3f) - __builtin_convertvector(bits, f32x16) * (log_two * 0x1p-23f);
}

struct Drawn {
  int64_t token;
  float largest;  // of logit * scale
};

// The token of the largest logit * scale + noise, the lowest id among equals. noise_keys: null for no noise.
template <typename Element>
Drawn draw(const Element* row, int64_t vocab_size, float scale, const int64_t* noise_keys) {
  constexpr int kVectors = 4;
  const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const uint32_t first_key = noise_keys == nullptr ? 0 : uint32_t(noise_keys[0]);
  const uint32_t second_key = noise_keys == nullptr ? 0 : uint32_t(noise_keys[1]);
  f32x16 best = splat(-INFINITY), largest = best;
  i32x16 best_token = {};
  float bar = -INFINITY;
  for (int64_t first = 0; first < vocab_size; first += 16 * kVectors) {
    f32x16 scores[kVectors];
    i32x16 tokens[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      tokens[i] = lanes + int32_t(first + 16 * i);
      scores[i] = load_row(row, first + 16 * i, vocab_size) * scale;
    }
    const f32x16 here = greater(greater(scores[0], scores[1]), greater(scores[2], scores[3]));
    largest = greater(largest, here);
    if (noise_keys != nullptr) {
      // Few tokens could be lifted above the best so far: where the model is sure, not even by the largest noise;
      // elsewhere, hardly ever by their own.
      if (max16(here) + kLargestNoise < bar) continue;
      f32x16 most = splat(-INFINITY);
      for (int i = 0; i < kVectors; ++i)
        most = greater(most, scores[i] + at_least_gumbel((u32x16)tokens[i], first_key, second_key));
      if (max16(most) < bar) continue;
      for (int i = 0; i < kVectors; ++i) scores[i] += gumbel((u32x16)tokens[i], first_key, second_key);
    }
    for (int i = 0; i < kVectors; ++i) {
      const i32x16 wins = scores[i] > best;
      best_token = (tokens[i] & wins) | (best_token & ~wins);
      best = greater(scores[i], best);
    }
    bar = max16(best);
  }
  int winner = 0;
  for (int lane = 1; lane < 16; ++lane)
    if (best[lane] > best[winner] || (best[lane] == best[winner] && best_token[lane] < best_token[winner]))
      winner = lane;
  return {best_token[winner], max16(largest)};
}

// The sum of e^(logit * scale - largest), whose terms go to `terms` where that is not null, padded to whole sixteens.
template <typename Element>
float sum_exp(const Element* row, int64_t vocab_size, float scale, float largest, float* terms) {
  f32x16 total = {};
  for (int64_t token = 0; token < vocab_size; token += 16) {
    const f32x16 term = exp_nonpositive(load_row(row, token, vocab_size) * scale - largest);
    total += term;
    if (terms != nullptr) store16(terms + token, term);
  }
  return sum16(total);
}

// The largest of `values` such that those no smaller reach `target` in sum: by quickselect, which reorders them.
float smallest_inside(std::vector<float>& values, double target) {
  auto begin = values.begin(), end = values.end();
  double outside = 0;  // sum of those before `begin`: all larger than what follows
  for (;;) {
    const float pivot = begin[(end - begin) / 2];
    const auto above = std::partition(begin, end, [=](float value) { return value > pivot; });
    const double sum_above = std::accumulate(begin, above, outside);
    if (above != begin && sum_above >= target) {
      end = above;
      continue;
    }
    const auto below = std::partition(above, end, [=](float value) { return value == pivot; });
    outside = std::accumulate(above, below, sum_above);
    if (outside >= target || below == end) return pivot;
    begin = below;
  }
}

// masked [vocab_size] = logit * scale, or -inf where top_p excludes the token. Source: arXiv 1904.09751.
template <typename Element>
void mask_unlikely(const Element* row, int64_t vocab_size, float scale, float top_p, std::vector<float>& masked) {
  static thread_local std::vector<float> likely;
  masked.resize((vocab_size + 15) / 16 * 16);
  likely.resize(masked.size());
  const float largest = draw(row, vocab_size, scale, nullptr).largest;
  const double total = sum_exp(row, vocab_size, scale, largest, masked.data());
  // Those below this do not make up what top_p leaves out, even if they were all of the vocabulary.
  const float unlikely = float((1 - top_p) * total / double(vocab_size));
  size_t num_likely = 0;
  for (int64_t first = 0; first < vocab_size; first += 16) {
    if (max16(load16(masked.data() + first)) < unlikely) continue;
    for (int64_t token = first; token < first + 16; ++token) {
      likely[num_likely] = masked[token];
      num_likely += masked[token] >= unlikely;
    }
  }
  likely.resize(num_likely);
  const float smallest = likely.empty() ? 0 : smallest_inside(likely, top_p * total);  // empty: NaN
  for (int64_t token = 0; token < vocab_size; token += 16) {
    const f32x16 inside = load_row(row, token, vocab_size) * scale;
    store16(masked.data() + token, load16(masked.data() + token) < smallest ? splat(-INFINITY) : inside);
  }
}

template <typename Element>
void sample(const Element* logits, int64_t num_rows, int64_t vocab_size, const float* temperatures,
            const float* top_ps, const int64_t* noise_keys, int64_t* tokens, float* logprobs) {
  Team::get().share(num_rows, 1, [&](int64_t index) {
    static thread_local std::vector<float> masked;
    const Element* row = logits + index * vocab_size;
    const int64_t* keys = noise_keys + 2 * index;
    const float temperature = temperatures[index], scale = temperature > 0 ? 1 / temperature : 1;
    Drawn drawn;
    if (temperature > 0 && top_ps[index] < 1) {
      mask_unlikely(row, vocab_size, scale, top_ps[index], masked);
      drawn = draw(masked.data(), vocab_size, 1, keys);
    } else {
      drawn = draw(row, vocab_size, scale, temperature > 0 ? keys : nullptr);
    }
    tokens[index] = drawn.token;
    if (logprobs != nullptr) {
      const float largest = drawn.largest / scale;
      const float chosen = to_float(row[drawn.token]);
      logprobs[index] = chosen - largest - std::log(sum_exp(row, vocab_size, 1, largest, nullptr));
    }
  });
}

}  // namespace

extern "C" {

// logits [num_rows, vocab_size]; temperatures, 0 for greedy, and top_ps [num_rows]; noise_keys [num_rows, 2]
// -> tokens and, where not null, their log-probabilities at temperature 1 without top-p [num_rows].
void toka_sample(int64_t is_bfloat16, const void* logits, int64_t num_rows, int64_t vocab_size,
                 const float* temperatures, const float* top_ps, const int64_t* noise_keys, int64_t* tokens,
                 float* logprobs) {
  const PhaseTimer timer(kSampling);
  if (is_bfloat16)
    sample((const bfloat16*)logits, num_rows, vocab_size, temperatures, top_ps, noise_keys, tokens, logprobs);
  else
    sample((const float*)logits, num_rows, vocab_size, temperatures, top_ps, noise_keys, tokens, logprobs);
}
}
