// Paged attention on the CPU: tiles (attention_piece.h) for all threads. Each key and value byte of a segment is read
// from memory once for all its query heads.
//
// Where there are too few tiles for the threads, a tile is cut into pieces of its tokens, merged at the end
// (Flash-Decoding, pytorch.org/blog/flash-decoding). Threads take piece after piece.

#include <omp.h>

#include <atomic>
#include <vector>

#include "attention_piece.h"
#include "merge.h"

namespace {

constexpr int kMaxGroup = 32;

// A piece reads at least so many tokens (fewer do not repay the merge), and is one of at least so many of a thread's.
constexpr int kFewestTokens = 256;
constexpr int kPiecesPerThread = 8;

// Below this cost, about ten microseconds, other threads are not woken.
constexpr int64_t kFewestForThreads = 1 << 20;

// The pieces of one tile, one behind the other.
struct Split {
  size_t first_piece;
  int num_pieces, num_queries;
};

struct Work {
  std::vector<Piece> pieces;
  std::vector<Split> splits;
  int num_threads = 1;
  int64_t num_partial = 0;  // queries of all pieces that are not whole tiles
};

// Time that a tile takes, roughly: reading a token from memory takes as long as multiplying it with a few queries.
inline int64_t cost(const Piece& tile, const Shape& shape) {
  const int64_t num_queries = tile.num_rows * shape.num_heads / shape.num_kv_heads;
  return int64_t(tile.kv_end) * (num_queries + 8) * shape.head_dim;
}

template <typename Element>
Work share_out(const Problem<Element>& problem, int num_segments) {
  const int group = problem.group(), tile_rows = kTileQueries / group;
  std::vector<Piece> tiles;
  int64_t total = 0;
  for (int segment = 0; segment < num_segments; ++segment) {
    const int32_t begin = problem.query_starts[segment], end = problem.query_starts[segment + 1];
    // Last rows first: they see the most tokens, and long tiles at the end would leave threads idle.
    for (int32_t tile_end = end; tile_end > begin; tile_end -= tile_rows) {
      const int32_t first = std::max(begin, tile_end - tile_rows);
      const int32_t num_tokens = problem.visible_to(segment, tile_end - 1);
      for (int32_t head = 0; head < problem.shape.num_kv_heads; ++head) {
        tiles.push_back({segment, head, first, tile_end - first, 0, num_tokens, -1});
        total += cost(tiles.back(), problem.shape);
      }
    }
  }
  Work work;
  if (total >= kFewestForThreads) work.num_threads = omp_get_max_threads();
  const int64_t most = work.num_threads == 1 ? total : total / (work.num_threads * kPiecesPerThread);
  for (const Piece& tile : tiles) {
    const int64_t wanted = cost(tile, problem.shape) / (most + 1) + 1;
    const int num_pieces = int(std::min<int64_t>(wanted, tile.kv_end / kFewestTokens));
    if (num_pieces <= 1) {
      work.pieces.push_back(tile);
      continue;
    }
    const int num_tokens = ((tile.kv_end + num_pieces - 1) / num_pieces + kChunk - 1) / kChunk * kChunk;
    work.splits.push_back({work.pieces.size(), 0, tile.num_rows * group});
    for (Piece piece = tile; piece.kv_begin < tile.kv_end; piece.kv_begin += num_tokens) {
      piece.kv_end = std::min(tile.kv_end, piece.kv_begin + num_tokens);
      piece.partial = work.num_partial;
      work.pieces.push_back(piece);
      work.num_partial += tile.num_rows * group;
      ++work.splits.back().num_pieces;
    }
  }
  return work;
}

// Merges the pieces of a tile into the first one's partial results, and that into the output.
template <typename Element>
void merge_split(const Problem<Element>& problem, const Work& work, const Split& split, float* partial_output,
                 float* partial_lse) {
  const int64_t head_dim = problem.shape.head_dim;
  const Piece& piece = work.pieces[split.first_piece];
  for (int i = 0; i < split.num_queries; ++i) {
    const int64_t place = problem.place(piece, i);
    float* merged = partial_output + (piece.partial + i) * head_dim;
    float lse = partial_lse[piece.partial + i];
    for (int next = 1; next < split.num_pieces; ++next) {
      const int64_t from = piece.partial + i + int64_t(next) * split.num_queries;
      lse = merge_parts(merged, lse, partial_output + from * head_dim, partial_lse[from], merged, head_dim);
    }
    problem.lse[place] = lse;
    problem.store(place, merged, 1.0f);
  }
}

template <typename Element>
void attend(const Problem<Element>& problem, int num_segments) {
  const Work work = share_out(problem, num_segments);
  std::vector<float> partial_output(work.num_partial * problem.shape.head_dim), partial_lse(work.num_partial);
  std::atomic<size_t> num_taken{0};
  const size_t num_pieces = work.pieces.size();
#pragma omp parallel num_threads(work.num_threads)
  {
    static thread_local Scratch<Element> scratch;
    size_t index = num_taken++;
    while (index < num_pieces) {
      const size_t next = num_taken++;
      attend_piece(problem, work.pieces[index], next < num_pieces ? &work.pieces[next] : nullptr,
                   partial_output.data(), partial_lse.data(), scratch);
      index = next;
    }
    if (!work.splits.empty()) {
#pragma omp barrier
#pragma omp for
      for (size_t split = 0; split < work.splits.size(); ++split)
        merge_split(problem, work, work.splits[split], partial_output.data(), partial_lse.data());
    }
  }
}

}  // namespace

extern "C" {

// Largest head size, and most query heads per KV head, that the kernels take. Head sizes are multiples of 16.
int64_t toka_max_head_dim() { return kMaxHeadDim; }
int64_t toka_max_group() { return kMaxGroup; }

void toka_attend(int64_t is_bfloat16, const void* query, int64_t query_row_stride, void* output, float* lse,
                 const void* cache, const int32_t* query_starts, const int32_t* block_table, int64_t table_stride,
                 const int32_t* kv_lengths, int64_t num_segments, int64_t causal, int64_t is_partial,
                 int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t page_size) {
  const Shape shape{num_heads, num_kv_heads, head_dim, page_size};
  if (is_bfloat16)
    attend(Problem<bfloat16>{shape, (const bfloat16*)query, query_row_stride, output, lse, (const bfloat16*)cache,
                             query_starts, block_table, table_stride, kv_lengths, causal != 0, is_partial != 0},
           int(num_segments));
  else
    attend(Problem<float>{shape, (const float*)query, query_row_stride, output, lse, (const float*)cache, query_starts,
                          block_table, table_stride, kv_lengths, causal != 0, is_partial != 0},
           int(num_segments));
}
}
