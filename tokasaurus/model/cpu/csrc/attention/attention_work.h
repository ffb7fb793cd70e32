// Paged attention on the CPU: tiles (attention_partition.h) for all threads. Each key and value byte of a segment is read
// from memory once for all its query heads.
//
// Where there are too few tiles for the threads, a tile is cut into pieces of its tokens, merged at the end
// (Flash-Decoding, pytorch.org/blog/flash-decoding). Threads take piece after piece.
#pragma once

#include <atomic>
#include <vector>

#include "attention/attention_row.h"
#include "simd/threads.h"

constexpr int kMaxGroup = 32;

// A piece reads at least so many tokens (fewer do not repay the merge), and is one of at least so many of a thread's.
constexpr int kFewestTokens = 128;
constexpr int kPartitionsPerThread = 8;

// A row by itself takes so many KV heads at a time that at least so many bytes lie together.
constexpr int64_t kRunBytes = 16 << 10;

// Below this cost, about five microseconds, other threads are not woken.
constexpr int64_t kFewestForThreads = 1 << 19;

// The pieces of one tile, one behind the other.
struct Split {
  size_t first_partition;
  int num_pieces, num_queries;
};

struct Work {
  std::vector<Piece> pieces;
  std::vector<Split> splits;
  int num_threads = 1;
  int64_t num_partial = 0;  // queries of all pieces that are not whole tiles
};

// Time that a tile takes, roughly: reading a token from memory takes as long as multiplying it with a few queries.
static inline int64_t cost(const Piece& tile, const Shape& shape) {
  const int64_t num_queries = tile.num_rows * shape.num_heads / shape.num_kv_heads;
  return int64_t(tile.kv_end) * (num_queries + 8) * tile.num_kv_heads * shape.head_dim;
}

// How the threads share a problem's segments; the queries, the cache and the output may change.
template <typename Stored>
static Work partition_work(const Problem<Stored>& problem) {
  const int group = problem.group(), tile_rows = kTileQueries / group, num_kv_heads = int(problem.shape.num_kv_heads);
  const int64_t run_heads = kRunBytes / int64_t(problem.head_size() * sizeof(Stored));
  const int row_heads = group > kScoreQueries ? 1 : std::max(1, std::min({int(run_heads), num_kv_heads, tile_rows}));
  std::vector<Piece> tiles;
  int64_t total = 0;
  for (int segment = 0; segment < problem.part.num_segments; ++segment) {
    const int32_t begin = problem.part.query_starts[segment], end = problem.part.query_starts[segment + 1];
    // Last rows first: they see the most tokens, and long tiles at the end would leave threads idle.
    for (int32_t tile_end = end; tile_end > begin; tile_end -= tile_rows) {
      const int32_t first = std::max(begin, tile_end - tile_rows);
      const int32_t num_tokens = problem.visible_to(segment, tile_end - 1);
      const int heads = tile_end - first == 1 ? row_heads : 1;
      for (int32_t head = 0; head < num_kv_heads; head += heads) {
        tiles.push_back(
            {segment, head, std::min(heads, num_kv_heads - head), first, tile_end - first, 0, num_tokens, -1});
        total += cost(tiles.back(), problem.shape);
      }
    }
  }
  Work work;
  if (total >= kFewestForThreads) work.num_threads = Team::size();
  const int64_t most = work.num_threads == 1 ? total : total / (work.num_threads * kPartitionsPerThread);
  for (const Piece& tile : tiles) {
    const int64_t wanted = cost(tile, problem.shape) / (most + 1) + 1;
    const int num_pieces = int(std::min<int64_t>(wanted, tile.kv_end / kFewestTokens));
    if (num_pieces <= 1) {
      work.pieces.push_back(tile);
      continue;
    }
    const int num_tokens = ((tile.kv_end + num_pieces - 1) / num_pieces + kChunk - 1) / kChunk * kChunk;
    work.splits.push_back({work.pieces.size(), 0, problem.num_queries(tile)});
    for (Piece piece = tile; piece.kv_begin < tile.kv_end; piece.kv_begin += num_tokens) {
      piece.kv_end = std::min(tile.kv_end, piece.kv_begin + num_tokens);
      piece.partial = work.num_partial;
      work.pieces.push_back(piece);
      work.num_partial += problem.num_queries(tile);
      ++work.splits.back().num_pieces;
    }
  }
  return work;
}

// Merges the pieces of a tile into the first one's partial results, and that into the output.
template <typename Stored>
static void merge_split(const Problem<Stored>& problem, const Work& work, const Split& split, float* partial_output,
                        float* partial_lse) {
  const int64_t head_dim = problem.shape.head_dim;
  const Piece& piece = work.pieces[split.first_partition];
  for (int i = 0; i < split.num_queries; ++i) {
    const int64_t place = problem.place(piece, i);
    float* merged = partial_output + (piece.partial + i) * head_dim;
    float lse = partial_lse[piece.partial + i];
    for (int next = 1; next < split.num_pieces; ++next) {
      const int64_t from = piece.partial + i + int64_t(next) * split.num_queries;
      lse = merge_parts(merged, lse, partial_output + from * head_dim, partial_lse[from], merged, head_dim);
    }
    problem.finish(place, merged, lse);
  }
}

// Room for what pieces of tiles found, kept from call to call.
struct Partial {
  std::vector<float> output, lse;
};

// work: partition_work of the same segments.
template <typename Stored>
static void attend(const Problem<Stored>& problem, const Work& work, Partial& partial) {
  partial.output.resize(std::max<size_t>(partial.output.size(), work.num_partial * problem.shape.head_dim));
  partial.lse.resize(std::max<size_t>(partial.lse.size(), work.num_partial));
  std::atomic<size_t> num_taken{0};
  const size_t num_pieces = work.pieces.size();
  Team::get().run(work.num_threads, [&](int) {
    static thread_local Scratch<Stored> scratch;
    size_t index = num_taken++;
    while (index < num_pieces) {
      const size_t next = num_taken++;
      attend_partition(problem, work.pieces[index], next < num_pieces ? &work.pieces[next] : nullptr,
                   partial.output.data(), partial.lse.data(), scratch);
      index = next;
    }
  });
  Team::get().share(work.splits.size(), 1, [&](int64_t split) {
    merge_split(problem, work, work.splits[split], partial.output.data(), partial.lse.data());
  });
}
