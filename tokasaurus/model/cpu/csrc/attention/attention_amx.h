// The two gemms of attention by AMX tiles (simd/amx.h): up to 32 queries times the keys of a chunk, and their softmax
// weights times its values. Keys are stored as AMX wants its second factor; values are copied, so that the groups of a
// chunk lie next to each other: a product takes the values of 32 tokens.
#pragma once

#include "attention/attention_tile.h"
#include "simd/amx.h"

#if TOKA_AMX

constexpr int kAmxQueries = 2 * kAmxRows, kAmxDepth = kAmxRowBytes / sizeof(bfloat16);

// Numbers of a query's head, with zeros behind it: keys are multiplied kAmxDepth at a time, the last ones with what
// lies behind the keys.
static inline int64_t padded_head_dim(int64_t head_dim) { return (head_dim + kAmxDepth - 1) / kAmxDepth * kAmxDepth; }

// Tiles 0 to 3 += steps * kAmxDepth numbers of up to 32 rows `from`, row_size apart, times two second factors, whose
// rows are factor_row numbers apart and whose steps factor_step. before_step: called with the number of each.
template <bool kTwoRows, bool kTwoColumns, typename BeforeStep>
static TOKA_INLINE void add_tile_products(const bfloat16* from, int64_t row_size, int64_t steps, const bfloat16* first,
                                          const bfloat16* second, int64_t factor_row, int64_t factor_step,
                                          const BeforeStep& before_step) {
  const int64_t row_bytes = row_size * sizeof(bfloat16), factor_bytes = factor_row * sizeof(bfloat16);
  for (int64_t step = 0; step < steps; ++step) {
    before_step(step);
    _tile_loadd(6, first + step * factor_step, factor_bytes);
    _tile_loadd(4, from + step * kAmxDepth, row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTwoColumns) {
      _tile_loadd(7, second + step * factor_step, factor_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kTwoRows) {
      _tile_loadd(5, from + kAmxRows * row_size + step * kAmxDepth, row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kTwoColumns) _tile_dpbf16ps(3, 5, 7);
    }
  }
}

template <bool kTwoRows, bool kTwoColumns>
static TOKA_INLINE void load_tile_sums(const float* sums, int64_t row_size) {
  const int64_t row_bytes = row_size * sizeof(float);
  _tile_loadd(0, sums, row_bytes);
  if constexpr (kTwoColumns) _tile_loadd(1, sums + kAmxRows, row_bytes);
  if constexpr (kTwoRows) {
    _tile_loadd(2, sums + kAmxRows * row_size, row_bytes);
    if constexpr (kTwoColumns) _tile_loadd(3, sums + kAmxRows * row_size + kAmxRows, row_bytes);
  }
}

template <bool kTwoRows, bool kTwoColumns>
static TOKA_INLINE void store_tile_sums(float* sums, int64_t row_size) {
  const int64_t row_bytes = row_size * sizeof(float);
  _tile_stored(0, sums, row_bytes);
  if constexpr (kTwoColumns) _tile_stored(1, sums + kAmxRows, row_bytes);
  if constexpr (kTwoRows) {
    _tile_stored(2, sums + kAmxRows * row_size, row_bytes);
    if constexpr (kTwoColumns) _tile_stored(3, sums + kAmxRows * row_size + kAmxRows, row_bytes);
  }
}

// scores [queries][kChunk] of up to 32 queries [padded_dim], for two groups of keys, or for one. ahead: groups to
// prefetch; null for none.
template <bool kTwoRows, bool kTwoGroups>
static TOKA_INLINE void score_groups_by_tiles(const bfloat16* query, const bfloat16* const* keys,
                                              const bfloat16* const* ahead, int64_t padded_dim, float* scores) {
  constexpr int64_t kLine = kCacheLineBytes / sizeof(bfloat16), kStepSize = kAmxRows * kAmxDepth;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTwoRows) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const bfloat16* second = kTwoGroups ? keys[1] : nullptr;
  const auto prefetch_step = [&](int64_t step) TOKA_LAMBDA {
    if (ahead == nullptr) return;
    for (int64_t i = step * kStepSize; i < (step + 1) * kStepSize; i += kLine) {
      __builtin_prefetch(ahead[0] + i, 0, 2);
      if constexpr (kTwoGroups) __builtin_prefetch(ahead[1] + i, 0, 2);
    }
  };
  add_tile_products<kTwoRows, kTwoGroups>(query, padded_dim, padded_dim / kAmxDepth, keys[0], second, kAmxDepth,
                                          kStepSize, prefetch_step);
  store_tile_sums<kTwoRows, kTwoGroups>(scores, kChunk);
}

// scores [queries][kChunk] of up to 32 queries, with the tiles' shapes set. ahead: keys to prefetch; null for none.
template <bool kTwoRows>
static void score_chunk_by_tiles(const bfloat16* query, const ChunkGroups<bfloat16>& chunk,
                                 const bfloat16* const* ahead, int num_groups, int64_t padded_dim, float* scores) {
  finish_stores();
  int g = 0;
  for (; g + 2 <= num_groups; g += 2)
    score_groups_by_tiles<kTwoRows, true>(query, chunk.keys + g, ahead == nullptr ? ahead : ahead + g, padded_dim,
                                          scores + g * kGroup);
  if (g < num_groups)
    score_groups_by_tiles<kTwoRows, false>(query, chunk.keys + g, ahead == nullptr ? ahead : ahead + g, padded_dim,
                                           scores + g * kGroup);
}

// output [queries][head_dim] += weights [queries][kChunk] times values [num_tokens / 2][head_dim][2]. num_tokens: a
// multiple of kAmxDepth.
template <bool kTwoRows>
static void add_weighted_values_by_tiles(float* output, const bfloat16* weights, const bfloat16* values, int num_tokens,
                                         int64_t head_dim) {
  finish_stores();
  const auto add = [&](auto two, int64_t column) TOKA_LAMBDA {
    constexpr bool kTwoColumns = decltype(two)::value;
    load_tile_sums<kTwoRows, kTwoColumns>(output + column, head_dim);
    add_tile_products<kTwoRows, kTwoColumns>(weights, kChunk, num_tokens / kAmxDepth, values + column * 2,
                                             values + (column + kAmxRows) * 2, head_dim * 2, kAmxDepth * head_dim,
                                             [](int64_t) {});
    store_tile_sums<kTwoRows, kTwoColumns>(output + column, head_dim);
  };
  int64_t column = 0;
  for (; column + 2 * kAmxRows <= head_dim; column += 2 * kAmxRows) add(std::true_type{}, column);
  if (column < head_dim) add(std::false_type{}, column);
}

#endif
