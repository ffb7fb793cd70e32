// The two gemms of attention over a few blocks, queries times keys and weights times values, for a few queries at a
// time whose sums stay in registers.
//
// A chunk is up to kChunkGroups groups of sixteen tokens; the groups need not be adjacent. With E = kPair<Stored>, a
// group's keys are stored as [D / E][16 tokens][E] and its values as [16 tokens / E][D][E]: in both, one multiply-add
// advances a register of neighbouring numbers. For each cache line of a chunk that is read, one line of the next chunk
// is prefetched.
#pragma once

#include "simd/multiply_add.h"

constexpr int kGroup = 16;
constexpr int kGroupVectors = kGroup / kLanes;
constexpr int kChunkGroups = 8;
constexpr int kChunk = kChunkGroups * kGroup;

// Vectors of sums that fit into the registers beside the operands.
constexpr int kMaxSums = kRegisters * 3 / 4;

// How many queries' scores are summed at once; how many queries' outputs, each in kValueVectors vectors of columns.
constexpr int kScoreQueries = kMaxSums / (kGroupVectors > 2 ? kGroupVectors : 2);
constexpr int kValueQueries = 6;
template <int N>
constexpr int kValueVectors = 4 * N <= kMaxSums ? 4 : 2;

// A chunk's groups, or the groups to prefetch while a chunk is computed. scales: of an int8 cache, sixteen of keys and
// sixteen of values.
template <typename Stored>
struct ChunkGroups {
  const Stored* keys[kChunkGroups];
  const Stored* values[kChunkGroups];
  const bfloat16* scales[std::is_same_v<Stored, int8_t> ? kChunkGroups : 1];
  int num_groups;
};

// scores[0..N)[16 G) of N queries, stored as [D / E][N][E], against G groups. Each sum is kept in S parts, so that no
// multiply-add waits for the previous one; S divides D / E.
// Not inlined: GCC would run out of registers for the addresses.
template <int N, int G, int S, typename Stored>
TOKA_NOINLINE static void score_groups(const Activation<Stored>* query, const Stored* const* keys,
                                       const Stored* const* next_keys, int64_t num_steps, float* scores) {
  constexpr int E = kPair<Stored>, kVectors = G * kGroupVectors;
  Floats total[S][N][kVectors] = {};
  const Stored* from[G];
  repeat<G>([&](auto g) TOKA_LAMBDA { from[g] = keys[g]; });
  // Prefetches go group by group: memory delivers neighbouring lines faster.
  int64_t step = 0;
  for (int part = 0; part < G; ++part) {
    const Stored* ahead = next_keys[part];
    for (const int64_t end = (part + 1) * num_steps / G; step < end; step += S) {
      repeat<S>([&](auto s) TOKA_LAMBDA {
        Operand<Stored> key[kVectors];
        repeat<G>([&](auto g) TOKA_LAMBDA {
          repeat<kGroupVectors>([&](auto j) TOKA_LAMBDA {
            key[g * kGroupVectors + j] = load_operand(from[g] + ((step + s) * kGroup + j * kLanes) * E);
          });
          __builtin_prefetch(ahead + (s * G + g) * kGroup * E);
        });
        repeat<N>([&](auto i) TOKA_LAMBDA {
          const auto value = broadcast_operand<Stored>(query + ((step + s) * N + i) * E);
          repeat<kVectors>([&](auto j) TOKA_LAMBDA { total[s][i][j] = multiply_add(total[s][i][j], value, key[j]); });
        });
      });
      ahead += S * G * kGroup * E;
    }
  }
  repeat<N>([&](auto i) TOKA_LAMBDA {
    repeat<kVectors>([&](auto j) TOKA_LAMBDA {
      Floats sum = total[0][i][j];
      repeat<S - 1>([&](auto s) TOKA_LAMBDA { sum += total[s + 1][i][j]; });
      store(scores + i * kChunk + j * kLanes, sum);
    });
  });
}

// scores[0..num_queries)[kChunk]. With few queries, several groups are computed at once, so that no multiply-add waits
// for the previous one.
template <int N, typename Stored>
static void score_chunk(int num_queries, const Activation<Stored>* query, const ChunkGroups<Stored>& chunk,
                        const ChunkGroups<Stored>& next, int num_groups, int64_t num_steps, float* scores) {
  if (num_queries < N) {
    if constexpr (N > 1) score_chunk<N - 1, Stored>(num_queries, query, chunk, next, num_groups, num_steps, scores);
    return;
  }
  constexpr int kMaxGroupQueries = kMaxSums / kGroupVectors;  // groups times queries
  constexpr int kGroupsAtOnce = kMaxGroupQueries / N >= 4 ? 4 : kMaxGroupQueries / N >= 2 ? 2 : 1;
  int g = 0;
  for (; g + kGroupsAtOnce <= num_groups; g += kGroupsAtOnce)
    score_groups<N, kGroupsAtOnce, 1, Stored>(query, chunk.keys + g, next.keys + g, num_steps, scores + g * kGroup);
  for (; g < num_groups; ++g)
    score_groups<N, 1, 1, Stored>(query, chunk.keys + g, next.keys + g, num_steps, scores + g * kGroup);
}

// output[0..N)[column..column + kLanes V) += weights[0..N)[kChunk] times the chunk's values.
// Not inlined: GCC would run out of registers for the addresses.
template <int N, int V, typename Stored>
TOKA_NOINLINE static void add_weighted_columns(float* output, const Activation<Stored>* weights,
                                               const ChunkGroups<Stored>& chunk, const ChunkGroups<Stored>& next,
                                               int num_groups, int64_t head_dim, int64_t column) {
  constexpr int E = kPair<Stored>;
  Floats total[N][V];
  repeat<N>([&](auto i) TOKA_LAMBDA {
    repeat<V>([&](auto j) TOKA_LAMBDA { total[i][j] = load(output + i * head_dim + column + kLanes * j); });
  });
  for (int g = 0; g < num_groups; ++g) {
    const Stored* values = chunk.values[g] + column * E;
    const Stored* next_values = next.values[g] + column * E;
    const Activation<Stored>* group_weights = weights + g * kGroup;
    for (int step = 0; step < kGroup / E; ++step) {
      // The operand with fewer vectors stays in registers.
      if constexpr (N < V) {
        Operand<Stored> weight[N];
        repeat<N>([&](auto i) TOKA_LAMBDA { weight[i] = broadcast_operand<Stored>(group_weights + i * kChunk); });
        repeat<V>([&](auto j) TOKA_LAMBDA {
          const auto value = load_operand(values + kLanes * E * j);
          __builtin_prefetch(next_values + kLanes * E * j);
          repeat<N>([&](auto i) TOKA_LAMBDA { total[i][j] = multiply_add(total[i][j], weight[i], value); });
        });
      } else {
        Operand<Stored> value[V];
        repeat<V>([&](auto j) TOKA_LAMBDA {
          value[j] = load_operand(values + kLanes * E * j);
          __builtin_prefetch(next_values + kLanes * E * j);
        });
        repeat<N>([&](auto i) TOKA_LAMBDA {
          const auto weight = broadcast_operand<Stored>(group_weights + i * kChunk);
          repeat<V>([&](auto j) TOKA_LAMBDA { total[i][j] = multiply_add(total[i][j], weight, value[j]); });
        });
      }
      values += head_dim * E;
      next_values += head_dim * E;
      group_weights += E;
    }
  }
  repeat<N>([&](auto i) TOKA_LAMBDA {
    repeat<V>([&](auto j) TOKA_LAMBDA { store(output + i * head_dim + column + kLanes * j, total[i][j]); });
  });
}

// output[0..num_queries)[head_dim] += weights[0..num_queries)[kChunk] times the chunk's values.
template <int N, typename Stored>
static void add_weighted_values(int num_queries, float* output, const Activation<Stored>* weights,
                                const ChunkGroups<Stored>& chunk, const ChunkGroups<Stored>& next, int num_groups,
                                int64_t head_dim) {
  if (num_queries < N) {
    if constexpr (N > 1)
      add_weighted_values<N - 1, Stored>(num_queries, output, weights, chunk, next, num_groups, head_dim);
    return;
  }
  constexpr int V = kValueVectors<N>;
  int64_t column = 0;
  for (; column + kLanes * V <= head_dim; column += kLanes * V)
    add_weighted_columns<N, V, Stored>(output, weights, chunk, next, num_groups, head_dim, column);
  for (; column < head_dim; column += kLanes)
    add_weighted_columns<N, 1, Stored>(output, weights, chunk, next, num_groups, head_dim, column);
}
