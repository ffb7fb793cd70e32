// Paged attention on the CPU: divides a problem into tiles (attention_partition.h) for all threads. Each key and value
// byte of a segment is read from memory once for all its query heads.
//
// If there are too few tiles for the threads, the tokens of a tile are split into partitions, whose results are merged
// at the end (Flash-Decoding, pytorch.org/blog/flash-decoding). Threads claim one partition after another.
#pragma once

#include <atomic>
#include <vector>

#include "attention/attention_row.h"
#include "simd/threads.h"

constexpr int kMaxGroup = 32;

// A partition reads at least kMinPartitionTokens tokens (fewer do not repay the merge); tiles are split until each
// thread has about kPartitionsPerThread partitions.
constexpr int kMinPartitionTokens = 128;
constexpr int kPartitionsPerThread = 8;

// A tile of a single row takes enough KV heads that at least this many contiguous bytes are read at a time.
constexpr int64_t kMinContiguousBytes = 16 << 10;

// Below this cost, about five microseconds, other threads are not woken.
constexpr int64_t kMinCostForThreads = 1 << 19;

// A tile that was split. Its partitions are consecutive in Work::partitions. num_queries: queries of each partition.
struct SplitTile {
  size_t first_partition;
  int num_partitions, num_queries;
};

struct Work {
  std::vector<Partition> partitions;
  std::vector<SplitTile> splits;
  int num_threads = 1;
  int64_t num_partial_queries = 0;  // queries of all partitions that are not whole tiles
};

// Estimated time of a tile, in multiply-adds: reading a token from memory takes as long as multiplying it with a few
// queries.
static inline int64_t cost(const Partition& tile, const Shape& shape) {
  const int64_t num_queries = tile.num_rows * shape.num_heads / shape.num_kv_heads;
  return int64_t(tile.kv_end - tile.kv_begin) * (num_queries + 8) * tile.num_kv_heads * shape.head_dim;
}

// The tokens that rows [first, end) of a segment read: a layer with a window reads from the first group of tokens that
// any of the rows sees.
template <typename Stored>
static std::pair<int32_t, int32_t> tokens_read(const Problem<Stored>& problem, int segment, int first, int end) {
  const int32_t num_tokens = problem.visible_to(segment, end - 1);
  if (problem.scores.window == 0) return {0, num_tokens};
  int32_t begin = num_tokens;
  for (int row = first; row < end; ++row) begin = std::min(begin, problem.first_seen_by(segment, row));
  if (begin >= num_tokens) return {0, 0};  // all windows begin after the part
  return {begin / kGroup * kGroup, num_tokens};
}

// Divides a problem's segments into partitions. The result stays valid if the queries, the cache and the output change,
// and for all layers with the same window.
template <typename Stored>
static Work partition_work(const Problem<Stored>& problem) {
  const int group = problem.group(), tile_rows = kTileQueries / group, num_kv_heads = int(problem.shape.num_kv_heads);
  const int64_t contiguous_heads = kMinContiguousBytes / int64_t(problem.head_size() * sizeof(Stored));
  const int row_heads =
      !reads_rows_alone(problem) ? 1 : std::max(1, std::min({int(contiguous_heads), num_kv_heads, tile_rows}));
  std::vector<Partition> tiles;
  int64_t total = 0;
  for (int segment = 0; segment < problem.part.num_segments; ++segment) {
    const int32_t begin = problem.part.query_starts[segment], end = problem.part.query_starts[segment + 1];
    // Last rows first: they attend to the most tokens, and long tiles at the end would leave threads idle.
    for (int32_t tile_end = end; tile_end > begin; tile_end -= tile_rows) {
      const int32_t first = std::max(begin, tile_end - tile_rows);
      const auto [kv_begin, kv_end] = tokens_read(problem, segment, first, tile_end);
      const int heads = tile_end - first == 1 ? row_heads : 1;
      for (int32_t head = 0; head < num_kv_heads; head += heads) {
        tiles.push_back(
            {segment, head, std::min(heads, num_kv_heads - head), first, tile_end - first, kv_begin, kv_end, -1});
        total += cost(tiles.back(), problem.shape);
      }
    }
  }
  Work work;
  if (total >= kMinCostForThreads) work.num_threads = Team::size();
  const int64_t max_cost = work.num_threads == 1 ? total : total / (work.num_threads * kPartitionsPerThread);
  for (const Partition& tile : tiles) {
    const int64_t wanted = cost(tile, problem.shape) / (max_cost + 1) + 1;
    const int tile_tokens = tile.kv_end - tile.kv_begin;
    const int num_partitions = int(std::min<int64_t>(wanted, tile_tokens / kMinPartitionTokens));
    if (num_partitions <= 1) {
      work.partitions.push_back(tile);
      continue;
    }
    const int num_tokens = ((tile_tokens + num_partitions - 1) / num_partitions + kChunk - 1) / kChunk * kChunk;
    work.splits.push_back({work.partitions.size(), 0, problem.num_queries(tile)});
    for (Partition partition = tile; partition.kv_begin < tile.kv_end; partition.kv_begin += num_tokens) {
      partition.kv_end = std::min(tile.kv_end, partition.kv_begin + num_tokens);
      partition.partial_index = work.num_partial_queries;
      work.partitions.push_back(partition);
      work.num_partial_queries += problem.num_queries(tile);
      ++work.splits.back().num_partitions;
    }
  }
  return work;
}

// Merges the partial results of a tile's partitions into those of the first one, and stores them in the output.
template <typename Stored>
static void merge_split(const Problem<Stored>& problem, const Work& work, const SplitTile& split, float* partial_output,
                        float* partial_lse) {
  const int64_t head_dim = problem.shape.head_dim;
  const Partition& partition = work.partitions[split.first_partition];
  for (int i = 0; i < split.num_queries; ++i) {
    const int64_t index = problem.output_index(partition, i);
    float* merged = partial_output + (partition.partial_index + i) * head_dim;
    float lse = partial_lse[partition.partial_index + i];
    for (int next = 1; next < split.num_partitions; ++next) {
      const int64_t from = partition.partial_index + i + int64_t(next) * split.num_queries;
      lse = merge_parts(merged, lse, partial_output + from * head_dim, partial_lse[from], merged, head_dim);
    }
    problem.store_result(index, merged, lse);
  }
}

// Results of partitions that are not whole tiles. The memory is kept between calls.
struct PartialResults {
  std::vector<float> output, lse;
};

// work: from partition_work for the same segments.
template <typename Stored>
static void attend(const Problem<Stored>& problem, const Work& work, PartialResults& partial) {
  partial.output.resize(std::max<size_t>(partial.output.size(), work.num_partial_queries * problem.shape.head_dim));
  partial.lse.resize(std::max<size_t>(partial.lse.size(), work.num_partial_queries));
  std::atomic<size_t> num_claimed{0};
  const size_t num_partitions = work.partitions.size();
  Team::get().run(work.num_threads, [&](int) {
    static thread_local Scratch<Stored> scratch;
    size_t index = num_claimed++;
    while (index < num_partitions) {
      const size_t next = num_claimed++;
      attend_partition(problem, work.partitions[index], next < num_partitions ? &work.partitions[next] : nullptr,
                       partial.output.data(), partial.lse.data(), scratch);
      index = next;
    }
  });
  Team::get().parallel_for(work.splits.size(), 1, [&](int64_t split) {
    merge_split(problem, work, work.splits[split], partial.output.data(), partial.lse.data());
  });
}
