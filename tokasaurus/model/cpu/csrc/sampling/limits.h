// Excludes tokens of a row of logits from sampling, all but the most probable ones. messages/sampling.py defines the
// limits.
#pragma once

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "sampling/logit_rows.h"
#include "simd/simd.h"

// The limits of one row: fields of SamplingParams, in its order.
struct Limits {
  float top_p;
  int32_t top_k;
  float min_p;

  bool any() const { return top_p < 1 || top_k > 0 || min_p > 0; }
};

// The largest of `values` such that all values not below it sum to at least `target`. A quickselect, which reorders
// them.
static inline float top_p_threshold(std::vector<float>& values, double target) {
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

// A lower bound of the k-th largest of values: the k-th largest of the vectors' maxima.
static inline float kth_largest_lower_bound(const std::vector<float>& values, int64_t k) {
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
// top_p of the remaining tokens. largest: the largest logit * scale of the row. Precondition: none is NaN or positive
// infinity. Sources: arXiv 2407.01082 (min_p), 1904.09751 (top_p).
template <typename Element>
void apply_limits(const Element* row, int64_t vocab_size, float scale, float largest, const Limits& limits,
                  std::vector<float>& masked) {
  static thread_local std::vector<float> candidates;
  masked.resize((vocab_size + kLanes - 1) / kLanes * kLanes);
  candidates.resize(masked.size());
  double total = sum_exp(row, vocab_size, scale, largest, masked.data());
  const bool by_top_p_alone = limits.top_k <= 0 && limits.min_p <= 0;
  // With top_p alone, tokens below this cannot sum to the probability that top_p excludes, even if the whole vocabulary
  // were below it.
  float min_candidate = by_top_p_alone ? float((1 - limits.top_p) * total / double(vocab_size)) : limits.min_p;
  if (limits.top_k > 0) min_candidate = max(min_candidate, kth_largest_lower_bound(masked, limits.top_k));
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
  if (limits.top_k > 0 && num_candidates > size_t(limits.top_k)) {
    const auto kth = candidates.begin() + (limits.top_k - 1);
    std::nth_element(candidates.begin(), kth, candidates.end(), std::greater<float>());
    smallest = *kth;
    candidates.erase(std::partition(kth, candidates.end(), [=](float value) { return value == smallest; }),
                     candidates.end());
  }
  if (limits.top_p < 1) {
    if (!by_top_p_alone) total = std::accumulate(candidates.begin(), candidates.end(), 0.0);
    smallest = top_p_threshold(candidates, limits.top_p * total);
  }
  for (int64_t token = 0; token < vocab_size; token += kLanes) {
    const Floats inside = load_row(row, token, vocab_size) * scale;
    store(masked.data() + token, load(masked.data() + token) < smallest ? broadcast(-INFINITY) : inside);
  }
}
