// Samples from rows of logits. One pass over each row: temperature, hashed Gumbel noise, argmax; a second one for
// logprobs and a third for top-k logprobs, of the logits as they are or as tokens are drawn from them. Before them,
// three for top-p, top-k or min-p, and one for biases, penalties and masks. RULES in sampling/rules.py is the list of
// what is applied to a row, in order: `sample` begins with logit_rules and masks, sample_row goes on with temperature
// and limits.

#include "sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "sampling/logit_rows.h"
#include "sampling/noise.h"
#include "simd/element_type.h"
#include "simd/phases.h"
#include "simd/simd.h"
#include "simd/threads.h"

namespace {

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

// The result's `largest` is the largest of the row's logits, not scaled. as_sampled: where the logprobs of the
// distribution go that the token is drawn from, or null.
template <typename Element>
SampledToken sample_row(const Element* row, int64_t vocab_size, const SamplingParams& params, const int64_t* keys,
                        const RowLogprobs* as_sampled) {
  static thread_local std::vector<float> masked;
  const bool is_greedy = params.temperature <= 0;
  const float scale = is_greedy ? 1 : 1 / params.temperature;
  SampledToken sampled;
  if (!is_greedy && params.limits.any()) {
    sampled = draw(row, vocab_size, scale, nullptr);
    if (sampled.token >= 0) {
      apply_limits(row, vocab_size, scale, sampled.largest, params.limits, masked);
      sampled.token = draw(masked.data(), vocab_size, 1, keys).token;
    }
    if (as_sampled != nullptr) as_sampled->write(masked.data(), vocab_size, 1, sampled);
  } else {
    sampled = draw(row, vocab_size, scale, is_greedy ? nullptr : keys);
    if (as_sampled != nullptr) as_sampled->write(row, vocab_size, scale, sampled);
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
  const uint8_t* as_sampled;  // [num_rows], whether logprobs are those of the distribution that tokens are drawn from
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
    const bool is_as_sampled = inputs.as_sampled != nullptr && inputs.as_sampled[index];
    const RowLogprobs own(logprobs, top, logprobs == nullptr ? 0 : index);
    const RowLogprobs* as_sampled = is_as_sampled ? &own : nullptr;
    SampledToken sampled;
    if (rule < 0 && mask == nullptr) {
      sampled = sample_row(row, vocab_size, params, keys, as_sampled);
    } else {
      if (rule >= 0) apply_logit_rules(*inputs.rules, rule, params.penalties, row, vocab_size, changed);
      if (mask == nullptr) {
        sampled = sample_row(changed.data(), vocab_size, params, keys, as_sampled);
      } else {
        if (rule >= 0)
          mask_logits(mask, changed.data(), vocab_size, allowed);
        else
          mask_logits(mask, row, vocab_size, allowed);
        sampled = sample_row(allowed.data(), vocab_size, params, keys, as_sampled);
        if (sampled.token >= 0 && !allows(mask, sampled.token)) sampled.token = first_allowed(mask);
        // Other rules exclude all that the mask allows.
        if (as_sampled != nullptr && sampled.token >= 0 && sampled.largest == -INFINITY)
          as_sampled->write_certain(sampled.token);
      }
      if (logprobs != nullptr && !is_as_sampled) sampled.largest = draw(row, vocab_size, 1, nullptr).largest;
    }
    tokens[index] = sampled.token;
    if (logprobs != nullptr && !is_as_sampled) own.write(row, vocab_size, 1, sampled);
  });
}

}  // namespace

TOKA_STRUCT_SIZE(SamplingParams)
TOKA_STRUCT_SIZE(LogitRules)
TOKA_STRUCT_SIZE(TokenMasks)
TOKA_STRUCT_SIZE(TopLogprobs)

TOKA_EXPORT void toka_sample(int64_t logits_type, const void* logits, int64_t num_rows, int64_t vocab_size,
                             const SamplingParams* params, const int64_t* noise_keys, const LogitRules* rules,
                             const TokenMasks* masks, const uint8_t* as_sampled, int64_t* tokens, float* logprobs,
                             const TopLogprobs* top) {
  const PhaseTimer timer(kSampling);
  const SamplingInputs inputs = {num_rows, vocab_size, params, noise_keys, rules, masks, as_sampled};
  dispatch_activation_type(
      logits_type, [&](auto tag) { sample((const TypeOf<decltype(tag)>*)logits, inputs, tokens, logprobs, top); });
}
