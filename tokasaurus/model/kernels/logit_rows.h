// What is asked of a row of logits, whether a token is drawn from it or scored.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
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
// are larger than -inf (or numbers at all), the rest is token 0 with -inf. Only what is no smaller than the count-th
// largest of the largest of each sixty-four can be among them.
template <typename Element>
void find_largest(const Element* row, int64_t vocab_size, int64_t count, int32_t* ids, float* values) {
  constexpr int64_t kPiece = 64;
  using Found = std::pair<float, int32_t>;
  static thread_local std::vector<float> largest, ordered;
  static thread_local std::vector<Found> found;
  largest.clear();
  for (int64_t first = 0; first < vocab_size; first += kPiece) {
    f32x16 here = splat(-INFINITY);
    for (int64_t token = first; token < first + kPiece; token += 16)
      here = greater(here, load_row(row, token, vocab_size));
    largest.push_back(max16(here));
  }
  ordered.clear();
  for (const float value : largest)
    if (value > -INFINITY) ordered.push_back(value);  // nor what is no number
  float least = -INFINITY;
  if (int64_t(ordered.size()) >= count) {
    std::nth_element(ordered.begin(), ordered.begin() + (count - 1), ordered.end(), std::greater<float>());
    least = ordered[count - 1];
  }
  found.clear();
  for (size_t piece = 0; piece < largest.size(); ++piece) {
    if (!(largest[piece] >= least)) continue;
    const int64_t end = std::min(int64_t(piece + 1) * kPiece, vocab_size);
    for (int64_t token = piece * kPiece; token < end; ++token) {
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
