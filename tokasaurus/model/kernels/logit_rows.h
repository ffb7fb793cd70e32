// What is asked of a row of logits, whether a token is drawn from it or scored.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "vectors.h"

// -inf behind the row's end.
template <typename Element>
static inline f32x16 load_row(const Element* row, int64_t token, int64_t vocab_size) {
  if (token + 16 <= vocab_size) return load16(row + token);
  f32x16 x = splat(-INFINITY);
  for (int64_t lane = 0; token + lane < vocab_size; ++lane) x[lane] = to_float(row[token + lane]);
  return x;
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

// The tokens of the `count` largest of row, and their values, in falling order; the lowest ids among equals. Where fewer
// are larger than -inf (or numbers at all), the rest is token 0 with -inf. A heap holds those found so far, the least of
// them on top, and most sixteens have none that is larger.
template <typename Element>
void find_largest(const Element* row, int64_t vocab_size, int64_t count, int32_t* ids, float* values) {
  using Found = std::pair<float, int32_t>;
  static thread_local std::vector<Found> found;
  const auto precedes = [](const Found& one, const Found& other) {
    return one.first > other.first || (one.first == other.first && one.second < other.second);
  };
  found.assign(count, {-INFINITY, 0});
  for (int64_t first = 0; first < vocab_size; first += 16) {
    const f32x16 here = load_row(row, first, vocab_size);
    if (!(max16(here) > found.front().first)) continue;
    for (int lane = 0; lane < 16; ++lane) {
      if (!(here[lane] > found.front().first)) continue;
      std::pop_heap(found.begin(), found.end(), precedes);
      found.back() = {here[lane], int32_t(first + lane)};
      std::push_heap(found.begin(), found.end(), precedes);
    }
  }
  std::sort_heap(found.begin(), found.end(), precedes);
  for (int64_t place = 0; place < count; ++place) {
    values[place] = found[place].first;
    ids[place] = found[place].second;
  }
}
