// Samples from rows of logits. One pass over each row: temperature, hashed Gumbel noise, argmax; a second one for
// logprobs and a third for top-k logprobs, of the logits as they are or as tokens are drawn from them. Before them,
// three for top-p, top-k or min-p, and one for biases, penalties and masks. gumbel_noise in sampling/noise.py defines
// the noise.

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "sampling/logit_rows.h"
#include "sampling/logit_rules.h"
#include "sampling/token_masks.h"
#include "simd/element_type.h"
#include "simd/phases.h"
#include "simd/simd.h"
#include "simd/threads.h"

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
  const Floats one_minus_u = 1.0f - u, rounded_u = 1.0f - one_minus_u;
  const Floats smallest = broadcast(0x1p-126f);
  Floats exponential = -log_positive(max(one_minus_u, smallest)) * u / max(rounded_u, smallest);
  exponential = rounded_u > 0.0f ? exponential : u;
  return -log_positive(exponential);
}

// An upper bound of each token's noise, from the bits of its uniform u: the noise is at most -log(u), and the bits read
// as an integer give a lower bound of log2(u).
static inline Floats gumbel_upper_bound(UInts token_ids, uint32_t first_key, uint32_t second_key) {
  const Ints bits = (Ints)uniform(token_ids, first_key, second_key);
  return (127 * kLn2 + 1e-3f) - __builtin_convertvector(bits, Floats) * (kLn2 * 0x1p-23f);
}

struct SampledToken {
  int64_t token;  // -1 if a logit is NaN or positive infinity
  float largest;  // largest logit * scale of the row
};

// The token with the largest logit * scale + noise, the lowest id among equals. noise_keys: two keys, or null for no
// noise.
template <typename Element>
SampledToken draw(const Element* row, int64_t vocab_size, float scale, const int64_t* noise_keys) {
  constexpr int kVectors = 4;
  Ints lanes;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
  const uint32_t first_key = noise_keys == nullptr ? 0 : uint32_t(noise_keys[0]);
  const uint32_t second_key = noise_keys == nullptr ? 0 : uint32_t(noise_keys[1]);
  Floats best = broadcast(-INFINITY), largest = best;
  Ints best_token = {};
  float best_so_far = -INFINITY;
  Ints below_infinity = ~Ints{};  // false for NaN
  for (int64_t first = 0; first < vocab_size; first += kLanes * kVectors) {
    Floats values[kVectors];
    Ints tokens[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      tokens[i] = lanes + int32_t(first + kLanes * i);
      values[i] = load_row(row, first + kLanes * i, vocab_size) * scale;
      below_infinity &= values[i] < INFINITY;
    }
    const Floats chunk_max = max(max(values[0], values[1]), max(values[2], values[3]));
    largest = max(largest, chunk_max);
    if (noise_keys != nullptr) {
      // Few tokens can exceed the best so far, so first compare upper bounds, which take less time than the noise: the
      // largest possible noise excludes most tokens if the distribution is peaked, and an upper bound of each token's
      // own noise excludes most of the others.
      const float largest_value = max(chunk_max);
      if (largest_value + kLargestNoise < best_so_far || largest_value == -INFINITY) continue;
      Floats bound = broadcast(-INFINITY);
      for (int i = 0; i < kVectors; ++i)
        bound = max(bound, values[i] + gumbel_upper_bound((UInts)tokens[i], first_key, second_key));
      if (max(bound) < best_so_far) continue;
      for (int i = 0; i < kVectors; ++i) values[i] += gumbel((UInts)tokens[i], first_key, second_key);
    }
    for (int i = 0; i < kVectors; ++i) {
      const Ints wins = values[i] > best;
      best_token = (tokens[i] & wins) | (best_token & ~wins);
      best = max(values[i], best);
    }
    best_so_far = max(best);
  }
  int winner = 0;
  for (int lane = 1; lane < kLanes; ++lane)
    if (best[lane] > best[winner] || (best[lane] == best[winner] && best_token[lane] < best_token[winner]))
      winner = lane;
  const bool is_numerical = -sum(below_infinity) == kLanes;
  return {is_numerical ? best_token[winner] : -1, max(largest)};
}

// The largest of `values` such that all values not below it sum to at least `target`. A quickselect, which reorders
// them.
float top_p_threshold(std::vector<float>& values, double target) {
  auto begin = values.begin(), end = values.end();
  double sum_before = 0;  // of the values before `begin`, all larger than the rest
  for (;;) {
    const float pivot = begin[(end - begin) / 2];
    const auto above = std::partition(begin, end, [=](float value) { return value > pivot; });
    const double sum_above = std::accumulate(begin, above, sum_before);
    if (above != begin && sum_above >= target) {
      end = above;
      continue;
    }
    const auto below = std::partition(above, end, [=](float value) { return value == pivot; });
    sum_before = std::accumulate(above, below, sum_above);
    if (sum_before >= target || below == end) return pivot;
    begin = below;
  }
}

// How one row is sampled: the fields of SamplingParams in messages/generation.py, in its order. temperature: 0 for
// greedy. top_p, top_k and min_p limit the tokens that may be drawn from a row that is not greedy.
struct SamplingParams {
  float temperature;
  float top_p;
  int32_t top_k;
  float min_p;
  Penalties penalties;
};

// A lower bound of the k-th largest of values: the k-th largest of the vectors' maxima.
float kth_largest_lower_bound(const std::vector<float>& values, int64_t k) {
  static thread_local std::vector<float> largest;
  largest.clear();
  for (size_t first = 0; first < values.size(); first += kLanes) {
    const float here = max(load(values.data() + first));
    if (here >= 0) largest.push_back(here);  // false if all are NaN
  }
  if (int64_t(largest.size()) < k) return 0;
  std::nth_element(largest.begin(), largest.begin() + (k - 1), largest.end(), std::greater<float>());
  return largest[k - 1];
}

// masked [vocab_size] = logit * scale, or -inf for tokens that the limits exclude: by min_p, then by top_k, then by
// top_p of the remaining tokens. Returns the most probable token. Sources: arXiv 2407.01082 (min_p), 1904.09751
// (top_p).
template <typename Element>
SampledToken apply_limits(const Element* row, int64_t vocab_size, float scale, const SamplingParams& params,
                          std::vector<float>& masked) {
  static thread_local std::vector<float> candidates;
  masked.resize((vocab_size + kLanes - 1) / kLanes * kLanes);
  candidates.resize(masked.size());
  const SampledToken best = draw(row, vocab_size, scale, nullptr);
  if (best.token < 0) return best;
  double total = sum_exp(row, vocab_size, scale, best.largest, masked.data());
  const bool by_top_p_alone = params.top_k <= 0 && params.min_p <= 0;
  // With top_p alone, tokens below this cannot sum to the probability that top_p excludes, even if the whole vocabulary
  // were below it.
  float min_candidate = by_top_p_alone ? float((1 - params.top_p) * total / double(vocab_size)) : params.min_p;
  if (params.top_k > 0) min_candidate = max(min_candidate, kth_largest_lower_bound(masked, params.top_k));
  size_t num_candidates = 0;
  for (int64_t first = 0; first < vocab_size; first += kLanes) {
    if (max(load(masked.data() + first)) < min_candidate) continue;
    for (int64_t token = first; token < first + kLanes; ++token) {
      candidates[num_candidates] = masked[token];
      num_candidates += masked[token] >= min_candidate;
    }
  }
  candidates.resize(num_candidates);
  float smallest = min_candidate;
  if (params.top_k > 0 && num_candidates > size_t(params.top_k)) {
    const auto kth = candidates.begin() + (params.top_k - 1);
    std::nth_element(candidates.begin(), kth, candidates.end(), std::greater<float>());
    smallest = *kth;
    candidates.erase(std::partition(kth, candidates.end(), [=](float value) { return value == smallest; }),
                     candidates.end());
  }
  if (params.top_p < 1) {
    if (!by_top_p_alone) total = std::accumulate(candidates.begin(), candidates.end(), 0.0);
    smallest = top_p_threshold(candidates, params.top_p * total);
  }
  for (int64_t token = 0; token < vocab_size; token += kLanes) {
    const Floats inside = load_row(row, token, vocab_size) * scale;
    store(masked.data() + token, load(masked.data() + token) < smallest ? broadcast(-INFINITY) : inside);
  }
  return best;
}

// Top-k logprobs of some rows, in descending order: ids and logprobs [rows with top-k logprobs, count]. index_of_row: a
// row's index in these, or -1 for rows without. Filled by Python: structs.TopLogprobsStruct.
struct TopLogprobs {
  int64_t count;
  const int32_t* index_of_row;
  int32_t* ids;
  float* logprobs;
};

// Where the logprobs of one row go.
struct RowLogprobs {
  float* chosen;
  int64_t num_top;  // 0 for no top-k logprobs
  int32_t* top_ids;
  float* top_logprobs;

  RowLogprobs(float* logprobs, const TopLogprobs* top, int64_t index) : chosen(logprobs + index) {
    const int64_t top_index = top == nullptr ? -1 : top->index_of_row[index];
    num_top = top_index < 0 ? 0 : top->count;
    top_ids = num_top == 0 ? nullptr : top->ids + top_index * num_top;
    top_logprobs = num_top == 0 ? nullptr : top->logprobs + top_index * num_top;
  }

  // Writes the log-probabilities of logit * scale. sampled.largest is the largest logit * scale. Without a token, the
  // chosen one is NaN, and top is not written.
  template <typename Element>
  void write(const Element* row, int64_t vocab_size, float scale, const SampledToken& sampled) const {
    *chosen = NAN;
    if (sampled.token < 0) return;
    const float log_sum = std::log(sum_exp(row, vocab_size, scale, sampled.largest, nullptr));
    *chosen = to_float(row[sampled.token]) * scale - sampled.largest - log_sum;
    if (num_top > 0) find_top_k(row, vocab_size, num_top, top_ids, top_logprobs);
    for (int64_t i = 0; i < num_top; ++i) top_logprobs[i] = top_logprobs[i] * scale - sampled.largest - log_sum;
  }

  // Writes the log-probabilities of a token that is drawn whatever the noise: 0, and -infinity for all others.
  void write_certain(int64_t token) const {
    *chosen = 0;
    std::fill(top_ids, top_ids + num_top, 0);
    std::fill(top_logprobs, top_logprobs + num_top, -INFINITY);
    if (num_top > 0) top_ids[0] = int32_t(token), top_logprobs[0] = 0;
  }
};

// The result's `largest` is the largest of the row's logits, not scaled. drawn: where the logprobs of the distribution
// go that the token is drawn from, or null.
template <typename Element>
SampledToken sample_row(const Element* row, int64_t vocab_size, const SamplingParams& params, const int64_t* keys,
                        const RowLogprobs* drawn) {
  static thread_local std::vector<float> masked;
  const bool is_greedy = params.temperature <= 0;
  const float scale = is_greedy ? 1 : 1 / params.temperature;
  SampledToken sampled;
  if (!is_greedy && (params.top_p < 1 || params.top_k > 0 || params.min_p > 0)) {
    sampled = apply_limits(row, vocab_size, scale, params, masked);
    if (sampled.token >= 0) sampled.token = draw(masked.data(), vocab_size, 1, keys).token;
    if (drawn != nullptr) drawn->write(masked.data(), vocab_size, 1, sampled);
  } else {
    sampled = draw(row, vocab_size, scale, is_greedy ? nullptr : keys);
    if (drawn != nullptr) drawn->write(row, vocab_size, scale, sampled);
  }
  sampled.largest /= scale;
  return sampled;
}

// The inputs of toka_sample.
struct SamplingInputs {
  int64_t num_rows, vocab_size;
  const SamplingParams* params;
  const int64_t* noise_keys;
  const LogitRules* rules;
  const TokenMasks* masks;
  const uint8_t* is_drawn;  // [num_rows], whether logprobs are those of the distribution that tokens are drawn from
};

template <typename Element>
void sample(const Element* logits, const SamplingInputs& inputs, int64_t* tokens, float* logprobs,
            const TopLogprobs* top) {
  Team::get().parallel_for(inputs.num_rows, 1, [&](int64_t index) {
    static thread_local std::vector<float> changed, allowed;
    const int64_t vocab_size = inputs.vocab_size;
    const Element* row = logits + index * vocab_size;
    const int64_t* keys = inputs.noise_keys + 2 * index;
    const SamplingParams& params = inputs.params[index];
    const int64_t rule = inputs.rules == nullptr ? -1 : inputs.rules->rule_of_row[index];
    const uint32_t* mask = inputs.masks == nullptr ? nullptr : inputs.masks->of_row(index);
    const bool is_drawn = inputs.is_drawn != nullptr && inputs.is_drawn[index];
    const RowLogprobs own(logprobs, top, logprobs == nullptr ? 0 : index);
    const RowLogprobs* drawn = is_drawn ? &own : nullptr;
    SampledToken sampled;
    if (rule < 0 && mask == nullptr) {
      sampled = sample_row(row, vocab_size, params, keys, drawn);
    } else {
      if (rule >= 0) apply_logit_rules(*inputs.rules, rule, params.penalties, row, vocab_size, changed);
      if (mask == nullptr) {
        sampled = sample_row(changed.data(), vocab_size, params, keys, drawn);
      } else {
        if (rule >= 0)
          mask_logits(mask, changed.data(), vocab_size, allowed);
        else
          mask_logits(mask, row, vocab_size, allowed);
        sampled = sample_row(allowed.data(), vocab_size, params, keys, drawn);
        if (sampled.token >= 0 && !allows(mask, sampled.token)) sampled.token = first_allowed(mask);
        // Other rules exclude all that the mask allows.
        if (drawn != nullptr && sampled.token >= 0 && sampled.largest == -INFINITY) drawn->write_certain(sampled.token);
      }
      if (logprobs != nullptr && !is_drawn) sampled.largest = draw(row, vocab_size, 1, nullptr).largest;
    }
    tokens[index] = sampled.token;
    if (logprobs != nullptr && !is_drawn) own.write(row, vocab_size, 1, sampled);
  });
}

}  // namespace

TOKA_STRUCT_SIZE(SamplingParams)
TOKA_STRUCT_SIZE(LogitRules)
TOKA_STRUCT_SIZE(TokenMasks)
TOKA_STRUCT_SIZE(TopLogprobs)

// logits [num_rows, vocab_size]; params [num_rows]; noise_keys [num_rows, 2]; rules and masks, or null -> tokens
// [num_rows] and, if not null, logprobs [num_rows] and top, both before rules, masks, temperature and limits, or after
// all of these in the rows of is_drawn [num_rows], unless it is null. top and is_drawn need logprobs. Rows with a logit
// that is NaN or positive infinity get token -1 and logprob NaN; their top is not written.
TOKA_EXPORT void toka_sample(int64_t logits_type, const void* logits, int64_t num_rows, int64_t vocab_size,
                             const SamplingParams* params, const int64_t* noise_keys, const LogitRules* rules,
                             const TokenMasks* masks, const uint8_t* is_drawn, int64_t* tokens, float* logprobs,
                             const TopLogprobs* top) {
  const PhaseTimer timer(kSampling);
  const SamplingInputs inputs = {num_rows, vocab_size, params, noise_keys, rules, masks, is_drawn};
  dispatch_activation_type(
      logits_type, [&](auto tag) { sample((const TypeOf<decltype(tag)>*)logits, inputs, tokens, logprobs, top); });
}
