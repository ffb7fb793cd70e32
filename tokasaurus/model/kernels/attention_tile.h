// The two products of attention over a few blocks, for a handful of queries at a time whose sums stay in registers.
//
// A chunk is up to kChunkGroups groups of sixteen tokens, which lie anywhere. Keys of a group are words
// [D / E][16 tokens], values are words [16 tokens / E][D], E being the elements of a word: in both, sixteen numbers
// advance with one multiply-add. For each line of a chunk that is used, one of the chunk to come is prefetched.
#pragma once

#include "attention_words.h"

// GCC inlines the inner loops into so large a function that it runs out of registers for their addresses.
#define TOKA_OWN_FUNCTION __attribute__((noinline)) static

constexpr int kGroup = 16;
constexpr int kGroupVectors = kGroup / kLanes;
constexpr int kChunkGroups = 8;
constexpr int kChunk = kChunkGroups * kGroup;

// Queries whose scores, or whose outputs in so many vectors of columns, are summed at once: what the registers hold.
#if defined(__AVX512F__)
constexpr int kScoreQueries = 12, kValueQueries = 6, kValueVectors = 4;
#elif defined(__AVX__)
constexpr int kScoreQueries = 4, kValueQueries = 4, kValueVectors = 2;
#else
constexpr int kScoreQueries = 2, kValueQueries = 4, kValueVectors = 2;
#endif

// Pointers to the words of a chunk's groups, and of those to be prefetched meanwhile.
template <typename Element>
struct ChunkWords {
  typedef typename Words<Element>::Word Word;
  const Word* keys[kChunkGroups];
  const Word* values[kChunkGroups];
  int num_groups;
};

// scores[0..N)[16 G) of N queries, as factors [D / E][N][E], against G groups. Sums are kept in S parts, so that no
// multiply-add waits for the one before it; S divides the words of a key.
template <int N, int G, int S, typename Element, typename Word = typename Words<Element>::Word>
TOKA_OWN_FUNCTION void score_groups(const typename Words<Element>::Factor* query, const Word* const* keys,
                                    const Word* const* next_keys, int64_t num_words, float* scores) {
  typedef typename Words<Element>::Vector Vector;
  constexpr int E = Words<Element>::kElements, kVectors = G * kGroupVectors;
  Floats total[S][N][kVectors] = {};
  const Word* from[G];
  for (int g = 0; g < G; ++g) from[g] = keys[g];
  // What is prefetched goes group by group: memory likes neighbouring lines.
  int64_t word = 0;
  for (int part = 0; part < G; ++part) {
    const Word* ahead = next_keys[part];
    for (const int64_t end = (part + 1) * num_words / G; word < end; word += S) {
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) {
        Vector key[kVectors];
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) {
#pragma GCC unroll 4
          for (int j = 0; j < kGroupVectors; ++j)
            key[g * kGroupVectors + j] = load<Vector>(from[g] + (word + s) * kGroup + j * kLanes);
          __builtin_prefetch(ahead + (s * G + g) * kGroup);
        }
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i)
#pragma GCC unroll 8
          for (int j = 0; j < kVectors; ++j)
            total[s][i][j] = add_products(total[s][i][j], key[j], query + ((word + s) * N + i) * E);
      }
      ahead += S * G * kGroup;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      Floats sum = total[0][i][j];
#pragma GCC unroll 4
      for (int s = 1; s < S; ++s) sum += total[s][i][j];
      store(scores + i * kChunk + j * kLanes, sum);
    }
}

// scores[0..num_queries)[kChunk]. Few queries take more groups at once: no multiply-add waits for the one before it.
template <int N, typename Element>
static void score_chunk(int num_queries, const typename Words<Element>::Factor* query,
                        const ChunkWords<Element>& chunk, const ChunkWords<Element>& next, int num_groups,
                        int64_t num_words, float* scores) {
  if (num_queries < N) {
    if constexpr (N > 1)
      score_chunk<N - 1, Element>(num_queries, query, chunk, next, num_groups, num_words, scores);
    return;
  }
  constexpr int kMost = kScoreQueries * (kLanes < 16 ? 1 : 2);  // groups times queries
  constexpr int kAtOnce = kMost / N >= 4 ? 4 : kMost / N >= 2 ? 2 : 1;
  int g = 0;
  for (; g + kAtOnce <= num_groups; g += kAtOnce)
    score_groups<N, kAtOnce, 1, Element>(query, chunk.keys + g, next.keys + g, num_words, scores + g * kGroup);
  for (; g < num_groups; ++g)
    score_groups<N, 1, 1, Element>(query, chunk.keys + g, next.keys + g, num_words, scores + g * kGroup);
}

// output[0..N)[column..column + kLanes V) += weights[0..N)[kChunk] times the chunk's values.
template <int N, int V, typename Element, typename Word = typename Words<Element>::Word>
TOKA_OWN_FUNCTION void add_columns(float* output, const typename Words<Element>::Factor* weights,
                               const ChunkWords<Element>& chunk, const ChunkWords<Element>& next, int num_groups,
                               int64_t head_dim, int64_t column) {
  typedef typename Words<Element>::Vector Vector;
  constexpr int E = Words<Element>::kElements, kWords = kGroup / E;
  Floats total[N][V];
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) total[i][j] = load(output + i * head_dim + column + kLanes * j);
  for (int g = 0; g < num_groups; ++g) {
    const Word* values = chunk.values[g] + column;
    const Word* next_values = next.values[g] + column;
    for (int word = 0; word < kWords; ++word) {
      Vector value[V];
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) {
        value[j] = load<Vector>(values + word * head_dim + kLanes * j);
        __builtin_prefetch(next_values + word * head_dim + kLanes * j);
      }
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < V; ++j)
          total[i][j] = add_products(total[i][j], value[j], weights + i * kChunk + g * kGroup + word * E);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) store(output + i * head_dim + column + kLanes * j, total[i][j]);
}

// output[0..num_queries)[head_dim] += weights[0..num_queries)[kChunk] times the chunk's values.
template <int N, typename Element>
static void add_chunk(int num_queries, float* output, const typename Words<Element>::Factor* weights,
                      const ChunkWords<Element>& chunk, const ChunkWords<Element>& next, int num_groups,
                      int64_t head_dim) {
  if (num_queries < N) {
    if constexpr (N > 1)
      add_chunk<N - 1, Element>(num_queries, output, weights, chunk, next, num_groups, head_dim);
    return;
  }
  int64_t column = 0;
  for (; column + kLanes * kValueVectors <= head_dim; column += kLanes * kValueVectors)
    add_columns<N, kValueVectors, Element>(output, weights, chunk, next, num_groups, head_dim, column);
  for (; column < head_dim; column += kLanes)
    add_columns<N, 1, Element>(output, weights, chunk, next, num_groups, head_dim, column);
}
