// Operations on a row of logits, for sampling and for prompt logprobs.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "simd/simd_math.h"

// kLanes logits from `token` on; -inf past the row's end.
template <typename Element>
static inline Floats load_row(const Element* row, int64_t token, int64_t vocab_size) {
  if (token + kLanes <= vocab_size) return load(row + token);
  Floats x = broadcast(-INFINITY);
  for (int64_t lane = 0; token + lane < vocab_size; ++lane) x[lane] = to_float(row[token + lane]);
  return x;
}

constexpr int64_t kSummed = 256 * kLanes;  // numbers that are added up as floats; doubles add up these sums

// The sum of e^(logit * scale - largest). terms: receives the terms, padded to whole vectors, or null.
template <typename Element>
double sum_exp(const Element* row, int64_t vocab_size, float scale, float largest, float* terms) {
  double total = 0;
  for (int64_t first = 0; first < vocab_size; first += kSummed) {
    Floats part = {};
    for (int64_t token = first; token < std::min(first + kSummed, vocab_size); token += kLanes) {
      const Floats term = exp_nonpositive(load_row(row, token, vocab_size) * scale - largest);
      part += term;
      if (terms != nullptr) store(terms + token, term);
    }
    total += sum(part);
  }
  return total;
}

// A lower bound of the count-th largest of `values`, close to it; -inf if fewer than `count` are larger than -inf (NaN
// is not). By bisection, which takes a few passes. num_values: a multiple of kLanes.
static inline float approximate_kth_largest(const float* values, int64_t num_values, int64_t count) {
  const auto num_above = [=](float bound) {  // or equal to it
    Ints num = {};
    for (int64_t i = 0; i < num_values; i += kLanes) num -= load(values + i) >= bound;
    return sum(num);
  };
  float below = INFINITY, above = -INFINITY;  // bounds of the result
  for (int64_t i = 0; i < num_values; ++i) {
    above = max(values[i], above);
    if (values[i] > -INFINITY && values[i] < below) below = values[i];
  }
  if (num_above(below) < count) return -INFINITY;
  for (int step = 0; step < 40; ++step) {
    const float middle = below + (above - below) / 2;
    const int64_t num = num_above(middle);
    (num >= count ? below : above) = middle;
    if (num >= count && num <= count + count / 8) break;
  }
  return below;
}

// The tokens of the `count` largest logits of a row, and these logits, in descending order; the lowest ids among
// equals. If fewer are larger than -inf (NaN is not), the rest is token 0 with -inf.
//
// The row is viewed as lines of kColumns logits. A logit that is less than the count-th largest of the columns' maxima
// is not among the `count` largest. (Maxima over ranges of consecutive tokens would exclude far fewer logits, since the
// most probable tokens have low ids.)
template <typename Element>
void find_top_k(const Element* row, int64_t vocab_size, int64_t count, int32_t* ids, float* values) {
  constexpr int64_t kColumns = 768;
  using Candidate = std::pair<float, int32_t>;
  static thread_local std::vector<Candidate> candidates;
  float largest[kColumns];
  std::fill(largest, largest + kColumns, -INFINITY);
  for (int64_t line = 0; line < vocab_size; line += kColumns) {
    const int64_t end = std::min(kColumns, vocab_size - line);
    for (int64_t column = 0; column < end; column += kLanes)
      store(largest + column, max(load(largest + column), load_row(row, line + column, vocab_size)));
  }
  const float least = approximate_kth_largest(largest, kColumns, count);
  candidates.clear();
  for (int64_t column = 0; column < kColumns; ++column) {
    if (!(largest[column] >= least)) continue;
    for (int64_t token = column; token < vocab_size; token += kColumns) {
      const float value = to_float(row[token]);
      if (value >= least && value > -INFINITY) candidates.emplace_back(value, int32_t(token));
    }
  }
  candidates.resize(std::max(int64_t(candidates.size()), count), {-INFINITY, 0});
  std::partial_sort(candidates.begin(), candidates.begin() + count, candidates.end(),
                    [](const Candidate& one, const Candidate& other) {
                      return one.first > other.first || (one.first == other.first && one.second < other.second);
                    });
  for (int64_t i = 0; i < count; ++i) {
    values[i] = candidates[i].first;
    ids[i] = candidates[i].second;
  }
}
