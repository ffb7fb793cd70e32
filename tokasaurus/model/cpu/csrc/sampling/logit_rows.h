// What is asked of a row of logits, whether a token is drawn from it or scored.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "simd/simd_math.h"

// -inf behind the row's end.
template <typename Element>
static inline Floats load_row(const Element* row, int64_t token, int64_t vocab_size) {
  if (token + kLanes <= vocab_size) return load(row + token);
  Floats x = splat(-INFINITY);
  for (int64_t lane = 0; token + lane < vocab_size; ++lane) x[lane] = to_float(row[token + lane]);
  return x;
}

// The sum of e^(logit * scale - largest), whose terms go to `terms` where that is not null, padded to whole vectors.
template <typename Element>
float sum_exp(const Element* row, int64_t vocab_size, float scale, float largest, float* terms) {
  Floats total = {};
  for (int64_t token = 0; token < vocab_size; token += kLanes) {
    const Floats term = exp_nonpositive(load_row(row, token, vocab_size) * scale - largest);
    total += term;
    if (terms != nullptr) store(terms + token, term);
  }
  return sum(total);
}

// No more than the count-th largest of `values`, and hardly less; -inf where fewer are larger than -inf, or numbers at all.
// By bisection, which takes a few passes; num_values: whole vectors.
static inline float nearly_kth(const float* values, int64_t num_values, int64_t count) {
  const auto num_above = [=](float bar) {  // or at it
    Ints num = {};
    for (int64_t i = 0; i < num_values; i += kLanes) num -= load(values + i) >= bar;
    return sum(num);
  };
  float below = INFINITY, above = -INFINITY;  // of what is sought
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

// The tokens of the `count` largest of row, and their values, in falling order; the lowest ids among equals. Where fewer
// are larger than -inf (or numbers at all), the rest is token 0 with -inf. The row is looked at in columns, as lines of a
// page: what is less than the count-th largest of their largest is none of them. (In pieces of consecutive tokens these
// would be far less, since the likeliest tokens have low ids.)
template <typename Element>
void find_largest(const Element* row, int64_t vocab_size, int64_t count, int32_t* ids, float* values) {
  constexpr int64_t kColumns = 768;
  using Found = std::pair<float, int32_t>;
  static thread_local std::vector<Found> found;
  float largest[kColumns];
  std::fill(largest, largest + kColumns, -INFINITY);
  for (int64_t line = 0; line < vocab_size; line += kColumns) {
    const int64_t end = std::min(kColumns, vocab_size - line);
    for (int64_t column = 0; column < end; column += kLanes)
      store(largest + column, max(load(largest + column), load_row(row, line + column, vocab_size)));
  }
  const float least = nearly_kth(largest, kColumns, count);
  found.clear();
  for (int64_t column = 0; column < kColumns; ++column) {
    if (!(largest[column] >= least)) continue;
    for (int64_t token = column; token < vocab_size; token += kColumns) {
      const float value = to_float(row[token]);
      if (value >= least && value > -INFINITY) found.emplace_back(value, int32_t(token));
    }
  }
  found.resize(std::max(int64_t(found.size()), count), {-INFINITY, 0});
  std::partial_sort(found.begin(), found.begin() + count, found.end(), [](const Found& one, const Found& other) {
    return one.first > other.first || (one.first == other.first && one.second < other.second);
  });
  for (int64_t place = 0; place < count; ++place) {
    values[place] = found[place].first;
    ids[place] = found[place].second;
  }
}
