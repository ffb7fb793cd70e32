// Masks of the tokens that may be drawn from rows of logits. See TokenMasks in messages/forward.py.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "sampling/logit_rows.h"
#include "simd/simd.h"

// bits: [rows with a mask, num_words]. index_of_row: a row's index in bits, or -1 for rows that may draw any token.
// Filled by Python: bindings.TokenMasksStruct.
struct TokenMasks {
  const int32_t* index_of_row;
  const uint32_t* bits;
  int64_t num_words;

  // The row's mask; null if it may draw any token.
  const uint32_t* of_row(int64_t row) const {
    return index_of_row[row] < 0 ? nullptr : bits + index_of_row[row] * num_words;
  }
};

static inline bool allows(const uint32_t* mask, int64_t token) { return mask[token / 32] >> token % 32 & 1; }

// The lowest allowed token id. Precondition: at least one token is allowed.
static inline int64_t first_allowed(const uint32_t* mask) {
  int64_t token = 0;
  while (mask[token / 32] == 0) token += 32;
  while (!allows(mask, token)) ++token;
  return token;
}

// allowed = the row's logits, -inf for tokens that the mask excludes, padded to whole vectors.
template <typename Element>
void mask_logits(const uint32_t* mask, const Element* row, int64_t vocab_size, std::vector<float>& allowed) {
  UInts bit_of_lane;
  for (int lane = 0; lane < kLanes; ++lane) bit_of_lane[lane] = 1u << lane;
  allowed.resize((vocab_size + kLanes - 1) / kLanes * kLanes);
  for (int64_t first = 0; first < vocab_size; first += kLanes) {
    const uint32_t bits = mask[first / 32] >> first % 32 & ((1u << kLanes) - 1);
    Floats logits = broadcast(-INFINITY);
    if (bits != 0) logits = ((bit_of_lane & bits) != 0) ? load_row(row, first, vocab_size) : logits;
    store(allowed.data() + first, logits);
  }
}
