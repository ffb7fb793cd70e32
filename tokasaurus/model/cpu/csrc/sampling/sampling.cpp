// One pass over each row of logits: temperature, hashed Gumbel noise, argmax; another for log-probabilities and a
// third for the likeliest tokens; before them, three for top-p, top-k or min-p, and one for biases,
// penalties and masks.
// The noise is that of sampling_noise.gumbel_noise, which documents it.

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "simd/element_type.h"
#include "sampling/logit_rows.h"
#include "sampling/logit_rules.h"
#include "simd/phases.h"
#include "simd/threads.h"
#include "sampling/token_masks.h"
#include "simd/simd.h"

namespace {

constexpr float kLargestNoise = 22.88f;  // -log(2^-33)

static inline UInts mix32(UInts x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

static inline Floats uniform(UInts token_ids, uint32_t first_key, uint32_t second_key) {
  const UInts hashed = mix32(mix32(token_ids * 0x9E3779B1u + first_key) ^ second_key);
  return (__builtin_convertvector(hashed, Floats) + 0.5f) * 0x1p-32f;
}

static inline Floats gumbel(UInts token_ids, uint32_t first_key, uint32_t second_key) {
  const Floats u = uniform(token_ids, first_key, second_key);
  // log1p(-u) from the log of the rounded 1 - u, corrected for that rounding (Kahan).
  Floats rest = 1.0f - u;
  Floats taken = 1.0f - rest;
  const Floats smallest = splat(0x1p-126f);
  Floats exponential = -log_positive(max(rest, smallest)) * u / max(taken, smallest);
  exponential = taken > 0.0f ? exponential : u;
  return -log_positive(exponential);
}

// At least the noise of each token, from the bits of its uniform u: the noise is at most -log(u), and what the bits say as
// an integer falls short of log2(u).
static inline Floats at_least_gumbel(UInts token_ids, uint32_t first_key, uint32_t second_key) {
  const Ints bits = (Ints)uniform(token_ids, first_key, second_key);
  const float log_two = 0.693147180559945309f;
  return (127 * log_two + 1e-3f) - __builtin_convertvector(bits, Floats) * (log_two * 0x1p-23f);
}

struct Drawn {
  int64_t token;
  float largest;  // of logit * scale
};

// The token of the largest logit * scale + noise, the lowest id among equals. noise_keys: null for no noise.
template <typename Element>
Drawn draw(const Element* row, int64_t vocab_size, float scale, const int64_t* noise_keys) {
  constexpr int kVectors = 4;
  Ints lanes;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
  const uint32_t first_key = noise_keys == nullptr ? 0 : uint32_t(noise_keys[0]);
  const uint32_t second_key = noise_keys == nullptr ? 0 : uint32_t(noise_keys[1]);
  Floats best = splat(-INFINITY), largest = best;
  Ints best_token = {};
  float bar = -INFINITY;
  for (int64_t first = 0; first < vocab_size; first += kLanes * kVectors) {
    Floats scores[kVectors];
    Ints tokens[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      tokens[i] = lanes + int32_t(first + kLanes * i);
      scores[i] = load_row(row, first + kLanes * i, vocab_size) * scale;
    }
    const Floats here = max(max(scores[0], scores[1]), max(scores[2], scores[3]));
    largest = max(largest, here);
    if (noise_keys != nullptr) {
      // Few tokens could be lifted above the best so far: where the model is sure, not even by the largest noise;
      // elsewhere, hardly ever by their own.
      const float most_here = max(here);
      if (most_here + kLargestNoise < bar || most_here == -INFINITY) continue;
      Floats most = splat(-INFINITY);
      for (int i = 0; i < kVectors; ++i)
        most = max(most, scores[i] + at_least_gumbel((UInts)tokens[i], first_key, second_key));
      if (max(most) < bar) continue;
      for (int i = 0; i < kVectors; ++i) scores[i] += gumbel((UInts)tokens[i], first_key, second_key);
    }
    for (int i = 0; i < kVectors; ++i) {
      const Ints wins = scores[i] > best;
      best_token = (tokens[i] & wins) | (best_token & ~wins);
      best = max(scores[i], best);
    }
    bar = max(best);
  }
  int winner = 0;
  for (int lane = 1; lane < kLanes; ++lane)
    if (best[lane] > best[winner] || (best[lane] == best[winner] && best_token[lane] < best_token[winner]))
      winner = lane;
  return {best_token[winner], max(largest)};
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

// What may be drawn from a row that is not greedy. See messages/generation.py, SamplingParams.
struct Limits {
  float top_p, min_p;
  int32_t top_k;
};

// No more than the k-th largest of values: the k-th largest among the largest of each vector.
float at_most_kth(const std::vector<float>& values, int64_t k) {
  static thread_local std::vector<float> largest;
  largest.clear();
  for (size_t first = 0; first < values.size(); first += kLanes) {
    const float here = max(load(values.data() + first));
    if (here >= 0) largest.push_back(here);  // not of a vector of no numbers
  }
  if (int64_t(largest.size()) < k) return 0;
  std::nth_element(largest.begin(), largest.begin() + (k - 1), largest.end(), std::greater<float>());
  return largest[k - 1];
}

// masked [vocab_size] = logit * scale, or -inf where the limits exclude the token: by min_p, then by top_k, then by top_p
// of what is left. Gives the largest. Sources: arXiv 2407.01082 (min_p), 1904.09751 (top_p).
template <typename Element>
float mask_outside(const Element* row, int64_t vocab_size, float scale, const Limits& limits,
                   std::vector<float>& masked) {
  static thread_local std::vector<float> likely;
  masked.resize((vocab_size + kLanes - 1) / kLanes * kLanes);
  likely.resize(masked.size());
  const float largest = draw(row, vocab_size, scale, nullptr).largest;
  double total = sum_exp(row, vocab_size, scale, largest, masked.data());
  const bool by_top_p_alone = limits.top_k <= 0 && limits.min_p <= 0;
  // By top_p alone, those below this do not make up what it leaves out, even if they were all of the vocabulary.
  float unlikely = by_top_p_alone ? float((1 - limits.top_p) * total / double(vocab_size)) : limits.min_p;
  if (limits.top_k > 0) unlikely = max(unlikely, at_most_kth(masked, limits.top_k));
  size_t num_likely = 0;
  for (int64_t first = 0; first < vocab_size; first += kLanes) {
    if (max(load(masked.data() + first)) < unlikely) continue;
    for (int64_t token = first; token < first + kLanes; ++token) {
      likely[num_likely] = masked[token];
      num_likely += masked[token] >= unlikely;
    }
  }
  likely.resize(num_likely);
  float smallest = unlikely;
  if (limits.top_k > 0 && num_likely > size_t(limits.top_k)) {
    const auto kth = likely.begin() + (limits.top_k - 1);
    std::nth_element(likely.begin(), kth, likely.end(), std::greater<float>());
    smallest = *kth;
    likely.erase(std::partition(kth, likely.end(), [=](float value) { return value == smallest; }), likely.end());
  }
  if (limits.top_p < 1) {
    if (!by_top_p_alone) total = std::accumulate(likely.begin(), likely.end(), 0.0);
    smallest = likely.empty() ? 0 : smallest_inside(likely, limits.top_p * total);  // empty: NaN
  }
  for (int64_t token = 0; token < vocab_size; token += kLanes) {
    const Floats inside = load_row(row, token, vocab_size) * scale;
    store(masked.data() + token, load(masked.data() + token) < smallest ? splat(-INFINITY) : inside);
  }
  return largest;
}

// temperature: 0 for greedy. drawn.largest is of the row's logits.
template <typename Element>
Drawn choose(const Element* row, int64_t vocab_size, float temperature, const Limits& limits, const int64_t* keys) {
  static thread_local std::vector<float> masked;
  if (temperature <= 0) return draw(row, vocab_size, 1, nullptr);
  const float scale = 1 / temperature;
  Drawn drawn;
  if (limits.top_p < 1 || limits.top_k > 0 || limits.min_p > 0) {
    drawn.largest = mask_outside(row, vocab_size, scale, limits, masked);
    drawn.token = draw(masked.data(), vocab_size, 1, keys).token;
  } else {
    drawn = draw(row, vocab_size, scale, keys);
  }
  drawn.largest /= scale;
  return drawn;
}

// Where the `count` likeliest tokens of some rows go, the likeliest first: to [places, count]. index_of_row: -1 for rows
// that do not want them.
struct TopLogprobs {
  int64_t count;
  const int32_t* index_of_row;
  int32_t* ids;
  float* logprobs;
};

// What toka_sample is given.
struct Rows {
  int64_t num_rows, vocab_size;
  const float *temperatures, *top_ps;
  const int32_t* top_ks;
  const float* min_ps;
  const int64_t* noise_keys;
  const LogitRules* rules;
  const TokenMasks* masks;
};

template <typename Element>
void sample(const Element* logits, const Rows& rows, int64_t* tokens, float* logprobs, const TopLogprobs* top) {
  Team::get().share(rows.num_rows, 1, [&](int64_t index) {
    static thread_local std::vector<float> changed, allowed;
    const int64_t vocab_size = rows.vocab_size;
    const Element* row = logits + index * vocab_size;
    const int64_t* keys = rows.noise_keys + 2 * index;
    const Limits limits = {rows.top_ps[index], rows.min_ps[index], rows.top_ks[index]};
    const int64_t rule = rows.rules == nullptr ? -1 : rows.rules->rule_of_row[index];
    const uint32_t* mask = rows.masks == nullptr ? nullptr : rows.masks->of_row(index);
    const float temperature = rows.temperatures[index];
    Drawn drawn;
    if (rule < 0 && mask == nullptr) {
      drawn = choose(row, vocab_size, temperature, limits, keys);
    } else {
      if (rule >= 0) change_logits(*rows.rules, rule, row, vocab_size, changed);
      if (mask == nullptr) {
        drawn = choose(changed.data(), vocab_size, temperature, limits, keys);
      } else {
        if (rule >= 0)
          mask_logits(mask, changed.data(), vocab_size, allowed);
        else
          mask_logits(mask, row, vocab_size, allowed);
        drawn = choose(allowed.data(), vocab_size, temperature, limits, keys);
        if (!allows(mask, drawn.token)) drawn.token = first_allowed(mask);
      }
      if (logprobs != nullptr) drawn.largest = draw(row, vocab_size, 1, nullptr).largest;
    }
    tokens[index] = drawn.token;
    if (logprobs != nullptr) {
      const float log_sum = std::log(sum_exp(row, vocab_size, 1, drawn.largest, nullptr));
      logprobs[index] = to_float(row[drawn.token]) - drawn.largest - log_sum;
      const int64_t top_index = top == nullptr ? -1 : top->index_of_row[index];
      if (top_index >= 0) {
        float* values = top->logprobs + top_index * top->count;
        find_largest(row, vocab_size, top->count, top->ids + top_index * top->count, values);
        for (int64_t place = 0; place < top->count; ++place) values[place] = values[place] - drawn.largest - log_sum;
      }
    }
  });
}

}  // namespace

// logits [num_rows, vocab_size]; temperatures, 0 for greedy, top_ps, top_ks, 0 for none, and min_ps [num_rows];
// noise_keys [num_rows, 2]; rules and masks, or null
// -> tokens and, where not null, their log-probabilities before rules, masks, temperature and limits [num_rows], and with
// these those of the likeliest tokens.
TOKA_EXPORT void toka_sample(int64_t logits_type, const void* logits, int64_t num_rows, int64_t vocab_size,
                             const float* temperatures, const float* top_ps, const int32_t* top_ks, const float* min_ps,
                             const int64_t* noise_keys, const LogitRules* rules, const TokenMasks* masks,
                             int64_t* tokens, float* logprobs, const TopLogprobs* top) {
  const PhaseTimer timer(kSampling);
  const Rows rows = {num_rows, vocab_size, temperatures, top_ps, top_ks, min_ps, noise_keys, rules, masks};
  with_activation_type(logits_type, [&](auto* element) {
    sample((const Pointee<decltype(element)>*)logits, rows, tokens, logprobs, top);
  });
}
