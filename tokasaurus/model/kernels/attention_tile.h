// The two products of attention over a few blocks, for a handful of queries at a time whose sums stay in registers.
//
// A chunk is up to kChunkGroups groups of sixteen tokens, which lie anywhere. Keys of a group are words
// [D / E][16 tokens], values are words [16 tokens / E][D], E being the elements of a word: in both, sixteen numbers
// advance with one multiply-add. For each line of a chunk that is used, one of the chunk to come is prefetched.
#pragma once

#include "attention_words.h"

constexpr int kGroup = 16;
constexpr int kChunkGroups = 8;
constexpr int kChunk = kChunkGroups * kGroup;

// Queries whose scores, or outputs, are summed at once: as many as registers hold.
#ifdef __AVX512F__
constexpr int kScoreQueries = 12;
constexpr int kValueQueries = 6;
constexpr int kValueColumns = 4;
#else
constexpr int kScoreQueries = 4;
constexpr int kValueQueries = 2;
constexpr int kValueColumns = 2;
#endif

// Pointers to the words of a chunk's groups, and of those to be prefetched meanwhile.
template <typename Element>
struct ChunkWords {
  typedef typename Words<Element>::Word Word;
  const Word* keys[kChunkGroups];
  const Word* values[kChunkGroups];
  int num_groups;
};

// scores[0..N)[16 G) of N queries, as words [D / E][N], against G groups.
template <int N, int G, typename Element, typename Word = typename Words<Element>::Word>
static inline void score_groups(const Word* query, const Word* const* keys, const Word* const* next_keys,
                                int64_t num_words, float* scores) {
  f32x16 total[N][G] = {};
  const Word* from[G];
  for (int g = 0; g < G; ++g) from[g] = keys[g];
  // What is prefetched goes group by group: memory likes neighbouring lines.
  int64_t word = 0;
  for (int part = 0; part < G; ++part) {
    const Word* ahead = next_keys[part];
    for (const int64_t end = (part + 1) * num_words / G; word < end; ++word) {
      typename Words<Element>::Vector key[G];
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
        key[g] = load16(from[g] + word * kGroup);
        __builtin_prefetch(ahead + g * kGroup);
      }
      ahead += G * kGroup;
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i)
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) total[i][g] = add_products(total[i][g], key[g], query[word * N + i]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i)
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) store16(scores + i * kChunk + g * kGroup, total[i][g]);
}

// scores[0..num_queries)[kChunk]. Few queries take more groups at once: no multiply-add waits for the one before it.
template <int N, typename Element, typename Word = typename Words<Element>::Word>
static void score_chunk(int num_queries, const Word* query, const ChunkWords<Element>& chunk,
                        const ChunkWords<Element>& next, int num_groups, int64_t num_words, float* scores) {
  if (num_queries < N) {
    if constexpr (N > 1)
      score_chunk<N - 1, Element>(num_queries, query, chunk, next, num_groups, num_words, scores);
    return;
  }
  constexpr int kAtOnce = 2 * N <= kScoreQueries ? 4 : kScoreQueries > 4 ? 2 : 1;
  int g = 0;
  for (; g + kAtOnce <= num_groups; g += kAtOnce)
    score_groups<N, kAtOnce, Element>(query, chunk.keys + g, next.keys + g, num_words, scores + g * kGroup);
  for (; g < num_groups; ++g)
    score_groups<N, 1, Element>(query, chunk.keys + g, next.keys + g, num_words, scores + g * kGroup);
}

// output[0..N)[column..column + 16 V) += weights[0..N) (words of a chunk's tokens) times values.
template <int N, int V, typename Element, typename Word = typename Words<Element>::Word>
static inline void add_columns(float* output, const Word* weights, const ChunkWords<Element>& chunk,
                               const ChunkWords<Element>& next, int num_groups, int64_t head_dim, int64_t column) {
  constexpr int kWords = kGroup / Words<Element>::kElements;
  f32x16 total[N][V];
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) total[i][j] = load16(output + i * head_dim + column + 16 * j);
  for (int g = 0; g < num_groups; ++g) {
    const Word* values = chunk.values[g] + column;
    const Word* next_values = next.values[g] + column;
    for (int word = 0; word < kWords; ++word) {
      typename Words<Element>::Vector value[V];
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) {
        value[j] = load16(values + word * head_dim + 16 * j);
        __builtin_prefetch(next_values + word * head_dim + 16 * j);
      }
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < V; ++j)
          total[i][j] = add_products(total[i][j], value[j], weights[(i * kChunkGroups + g) * kWords + word]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) store16(output + i * head_dim + column + 16 * j, total[i][j]);
}

// output[0..num_queries)[head_dim] += weights[0..num_queries)[kChunk] times the chunk's values.
template <int N, typename Element, typename Word = typename Words<Element>::Word>
static void add_chunk(int num_queries, float* output, const Word* weights, const ChunkWords<Element>& chunk,
                      const ChunkWords<Element>& next, int num_groups, int64_t head_dim) {
  if (num_queries < N) {
    if constexpr (N > 1)
      add_chunk<N - 1, Element>(num_queries, output, weights, chunk, next, num_groups, head_dim);
    return;
  }
  int64_t column = 0;
  for (; column + 16 * kValueColumns <= head_dim; column += 16 * kValueColumns)
    add_columns<N, kValueColumns, Element>(output, weights, chunk, next, num_groups, head_dim, column);
  for (; column < head_dim; column += 16)
    add_columns<N, 1, Element>(output, weights, chunk, next, num_groups, head_dim, column);
}
