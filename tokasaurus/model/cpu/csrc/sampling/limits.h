// Excludes tokens of a row of logits from sampling, all but the most probable ones. messages/sampling.py defines the
// limits.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
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

// Of the values that are at least a bound: their number, and their sum.
struct Above {
  int64_t count = 0;
  double sum = 0;
};

constexpr int kBounds = 4;

// above[i]: of the values that are at least bounds[i]. num_values: a multiple of kLanes.
static inline void find_above(const float* values, int64_t num_values, const float* bounds, Above* above) {
  for (int i = 0; i < kBounds; ++i) above[i] = {};
  for (int64_t first = 0; first < num_values; first += kSummed) {
    const int64_t end = std::min(first + kSummed, num_values);
    Floats sums[kBounds] = {};
    Ints counts[kBounds] = {};
    for (int64_t value = first; value < end; value += kLanes) {
      const Floats x = load(values + value);
      repeat<kBounds>([&](auto i) TOKA_LAMBDA {
        const Ints inside = x >= bounds[i];
        sums[i] += (Floats)((Ints)x & inside);
        counts[i] -= inside;
      });
    }
    repeat<kBounds>([&](auto i) TOKA_LAMBDA {
      above[i].sum += sum(sums[i]);
      above[i].count += sum(counts[i]);
    });
  }
}

// Where a threshold is: not below `lower`, and below `upper`, above which are the values of `above`.
struct Bracket {
  float lower, upper = 1.001f;  // the largest value is 1
  Above above;
};

// Narrows the bracket, by a few passes over the values, until few are inside, or as many as are almost equal.
// is_enough: whether the values that are at least a bound reach what the threshold is for; true for `lower`.
template <typename IsEnough>
void narrow(const std::vector<float>& values, const IsEnough& is_enough, Bracket* bracket) {
  constexpr int64_t kFew = 1024;
  while (bracket->upper > bracket->lower * 1.0001f) {
    const float step = std::pow(bracket->upper / bracket->lower, 1.0f / (kBounds + 1));
    float bounds[kBounds];  // falling
    for (int i = 0; i < kBounds; ++i) bounds[i] = (i == 0 ? bracket->upper : bounds[i - 1]) / step;
    Above above[kBounds];
    find_above(values.data(), int64_t(values.size()), bounds, above);
    int num_short = 0;
    while (num_short < kBounds && !is_enough(above[num_short])) ++num_short;
    if (num_short > 0) {
      bracket->upper = bounds[num_short - 1];
      bracket->above = above[num_short - 1];
    }
    if (num_short == kBounds) continue;
    bracket->lower = bounds[num_short];
    if (above[num_short].count - bracket->above.count <= kFew) return;
  }
}

// candidates = the values inside the bracket.
static inline void find_inside(const std::vector<float>& values, const Bracket& bracket,
                               std::vector<float>& candidates) {
  size_t num = 0;
  const float below = std::nextafter(bracket.lower, 0.0f);
  for (size_t first = 0; first < values.size(); first += kLanes) {
    const Floats x = load(values.data() + first);
    if (!any_greater(x < bracket.upper ? x : Floats{}, below)) continue;
    candidates.resize(num + kLanes);
    for (size_t i = first; i < first + kLanes; ++i) {
      candidates[num] = values[i];
      num += values[i] >= bracket.lower && values[i] < bracket.upper;
    }
  }
  candidates.resize(num);
}

// The k-th largest of the values; 0 if fewer are above 0.
static inline float top_k_threshold(const std::vector<float>& values, int64_t k, std::vector<float>& candidates) {
  Bracket bracket{std::numeric_limits<float>::min()};
  narrow(values, [=](const Above& above) { return above.count >= k; }, &bracket);
  find_inside(values, bracket, candidates);
  const int64_t place = k - bracket.above.count;
  if (place > int64_t(candidates.size())) return 0;
  std::nth_element(candidates.begin(), candidates.begin() + (place - 1), candidates.end(), std::greater<float>());
  return candidates[place - 1];
}

// The largest of `values` such that all values not below it sum to at least `target`, or the smallest. A quickselect,
// which reorders them. sum_before: of values that are larger than these.
static inline float top_p_threshold(std::vector<float>& values, double sum_before, double target) {
  auto begin = values.begin(), end = values.end();
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

// masked [vocab_size] = logit * scale, or -inf for tokens that the limits exclude: by min_p, then by top_k, then by
// top_p of the remaining tokens. largest: the largest logit * scale of the row. Precondition: none is NaN or positive
// infinity. Sources: arXiv 2407.01082 (min_p), 1904.09751 (top_p).
template <typename Element>
void apply_limits(const Element* row, int64_t vocab_size, float scale, float largest, const Limits& limits,
                  std::vector<float>& masked) {
  static thread_local std::vector<float> candidates;
  masked.resize((vocab_size + kLanes - 1) / kLanes * kLanes);
  double total = sum_exp(row, vocab_size, scale, largest, masked.data());
  float smallest = limits.min_p;
  if (limits.top_k > 0) smallest = max(smallest, top_k_threshold(masked, limits.top_k, candidates));
  if (limits.top_p < 1) {
    constexpr int kFew = 4096;
    Bracket bracket{smallest};
    if (limits.top_k == 0 || limits.top_k > kFew) {
      if (smallest > 0) {
        const float bounds[kBounds] = {smallest, smallest, smallest, smallest};
        Above above[kBounds];
        find_above(masked.data(), int64_t(masked.size()), bounds, above);
        total = above[0].sum;
      }
      // Tokens below this cannot sum to the probability that top_p excludes, even if all were below it.
      bracket.lower = max(smallest, float((1 - limits.top_p) * total / double(vocab_size)));
      narrow(masked, [=](const Above& above) { return above.sum >= limits.top_p * total; }, &bracket);
      find_inside(masked, bracket, candidates);
    } else {
      find_inside(masked, bracket, candidates);
      total = std::accumulate(candidates.begin(), candidates.end(), 0.0);
    }
    // None are inside if the sums of two passes were rounded apart.
    smallest =
        candidates.empty() ? bracket.upper : top_p_threshold(candidates, bracket.above.sum, limits.top_p * total);
  }
  for (int64_t token = 0; token < vocab_size; token += kLanes) {
    const Floats inside = load_row(row, token, vocab_size) * scale;
    store(masked.data() + token, load(masked.data() + token) < smallest ? broadcast(-INFINITY) : inside);
  }
}
