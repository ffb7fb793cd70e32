// Attention of one tile: some rows of one segment, and one KV head or several, with up to kTileQueries queries: KV heads in
// order, then rows, then a row's heads of that KV head. Its tokens are taken chunk by chunk (attention_tile.h), each for
// all queries while it is in the processor's cache.
// Sources: FlashAttention (arXiv 2205.14135) for softmax in chunks, PagedAttention (arXiv 2309.06180) for the blocks.
#pragma once

#include <algorithm>

#include "attention/attention_tile.h"
#include "attention/merge.h"
#include "simd/simd_math.h"

constexpr int kTileQueries = 96;
constexpr int kMaxHeadDim = 256;

struct Shape {
  int64_t num_heads, num_kv_heads, head_dim, page_size;
};

// The rows of a tile, and which of the segment's tokens this piece of it reads. partial: the place of its first query
// in the partial results, -1 if the piece is the whole tile.
struct Piece {
  int32_t segment, kv_head, num_kv_heads, first_row, num_rows, kv_begin, kv_end;
  int64_t partial;
};

// What many queries are multiplied with: the cache as it is or, where that would be widened again for every few queries,
// a copy in floats.
template <typename Stored>
using Multiplied = std::conditional_t<std::is_same_v<Activation<Stored>, float>, float, Stored>;

template <typename Stored>
struct alignas(64) Scratch {
  Activation<Stored> query[kTileQueries * kMaxHeadDim];
  Activation<Stored> weights[kScoreQueries * kChunk];
  float output[kTileQueries * kMaxHeadDim];
  float scores[kScoreQueries * kChunk];
  Floats sum[kTileQueries];
  float reference[kTileQueries];
  float widened_keys[std::is_same_v<Stored, Multiplied<Stored>> ? 1 : kChunk * kMaxHeadDim];
  float widened_values[std::is_same_v<Stored, Multiplied<Stored>> ? 1 : kChunk * kMaxHeadDim];
};

// Segments of query rows, each against its own blocks: backend.PagedPart.
struct PagedPart {
  int64_t first_row, num_rows, num_segments;
  const int32_t *query_starts, *block_table;
  int64_t table_stride;
  const int32_t* kv_lengths;
  int64_t is_causal, is_partial;
};

// Queries and outputs are bfloat16 numbers or floats, whatever the cache stores.
template <typename Stored>
struct Problem {
  Shape shape;
  PagedPart part;
  bool is_bfloat16;   // queries and outputs
  const void* query;  // [rows, H, D], rows query_row_stride elements apart
  int64_t query_row_stride;
  void* output;  // [rows, H, D], contiguous; floats if is_partial and there is nothing beside
  float* lse;    // [rows, H]
  const Stored* cache;  // [blocks][kv heads][keys, values][page size][D]
  // What the same queries found in another part, [rows, H, D] and [rows, H], to be merged with this one; or null.
  const float* beside_output = nullptr;
  const float* beside_lse = nullptr;

  int group() const { return int(shape.num_heads / shape.num_kv_heads); }

  // Tokens of its segment that a row sees.
  int visible_to(int segment, int row) const {
    const int32_t length = part.kv_lengths[segment];
    return part.is_causal ? length - (part.query_starts[segment + 1] - 1 - row) : length;
  }

  // Of a piece.
  int queries_per_head(const Piece& piece) const { return piece.num_rows * group(); }
  int num_queries(const Piece& piece) const { return piece.num_kv_heads * queries_per_head(piece); }
  int row_of(const Piece& piece, int query) const {
    return piece.first_row + query % queries_per_head(piece) / group();
  }
  int head_of(const Piece& piece, int query) const {
    return (piece.kv_head + query / queries_per_head(piece)) * group() + query % group();
  }
  int64_t place(const Piece& piece, int query) const {
    return int64_t(row_of(piece, query)) * shape.num_heads + head_of(piece, query);
  }

  // A query's output [D] and its lse, to where they belong.
  void finish(int64_t place, const float* result, float result_lse) const {
    const bool is_float = !is_bfloat16 || (part.is_partial && beside_output == nullptr);
    if (is_float)
      finish_as(place, result, result_lse, (float*)output + place * shape.head_dim);
    else
      finish_as(place, result, result_lse, (bfloat16*)output + place * shape.head_dim);
  }

  template <typename Element>
  void finish_as(int64_t place, const float* result, float result_lse, Element* to) const {
    const int64_t head_dim = shape.head_dim;
    if (beside_output != nullptr) {
      merge_parts(beside_output + place * head_dim, beside_lse[place], result, result_lse, to, head_dim);
      return;
    }
    lse[place] = result_lse;
    for (int64_t d = 0; d < head_dim; d += kLanes) store(to + d, load(result + d));
  }

  // The chunk at token `start`, of the piece's first KV head.
  ChunkGroups<Stored> chunk(const Piece& piece, int start, int num_tokens) const {
    const int32_t* table = part.block_table + piece.segment * part.table_stride;
    ChunkGroups<Stored> chunk;
    chunk.num_groups = std::min(num_tokens, piece.kv_end - start + kGroup - 1) / kGroup;
    for (int g = 0; g < chunk.num_groups; ++g) {
      const int token = start + g * kGroup;
      const int64_t block = table[token / shape.page_size];
      const Stored* head = cache + (block * shape.num_kv_heads + piece.kv_head) * head_size();
      chunk.keys[g] = head + token % shape.page_size * shape.head_dim;
      chunk.values[g] = chunk.keys[g] + head_size() / 2;
    }
    return chunk;
  }

  // Of scores, before 2 is raised to them.
  float scale() const { return 1.44269504f / std::sqrt(float(shape.head_dim)); }

  // Elements of a block that one KV head has.
  int64_t head_size() const { return 2 * shape.page_size * shape.head_dim; }
};

// scores[0..padded) of one query to weights 2^(scale * (score - reference)), and what was summed under another
// reference rescaled. The reference need not be the largest score, as long as weights stay within 2^8.
template <typename Stored>
static inline void add_to_softmax(Scratch<Stored>& scratch, int query, float* scores, int visible, int padded, float scale,
                          int64_t head_dim, Activation<Stored>* weights) {
  if (visible <= 0) {
    std::memset(weights, 0, padded * sizeof *weights);
    return;
  }
  for (int token = visible; token < padded; ++token) scores[token] = -1e30f;
  Floats largest = load(scores);
  for (int token = kLanes; token < padded; token += kLanes) largest = max(largest, load(scores + token));
  float reference = scratch.reference[query];
  if (any_greater(largest, reference + 8.0f / scale)) {
    const float most = max(largest);
    const float rescale = std::exp2((reference - most) * scale);
    scratch.reference[query] = reference = most;
    scratch.sum[query] *= rescale;
    float* output = scratch.output + query * head_dim;
    for (int64_t d = 0; d < head_dim; d += kLanes) store(output + d, load(output + d) * rescale);
  }
  Floats sum = scratch.sum[query];
  for (int token = 0; token < padded; token += kLanes) {
    const Floats weight = exp2(load(scores + token) * scale - reference * scale);
    sum += weight;
    store(weights + token, weight);
  }
  scratch.sum[query] = sum;
}

// A head's query [D] as an operand, E = kPair<Stored> numbers at a time, `stride` apart.
template <typename Stored, typename Element>
static inline void load_query(const Element* from, int64_t head_dim, int64_t stride, Activation<Stored>* to) {
  constexpr int E = kPair<Stored>;
  for (int64_t d = 0; d < head_dim; d += E, to += stride)
    for (int i = 0; i < E; ++i) convert(from[d + i], to + i);
}

// The queries of a piece as operands, in sets of `at_once` of each KV head (the last may be smaller): each
// [D / E][queries of the set][E].
template <typename Stored>
static void load_queries(const Problem<Stored>& problem, const Piece& piece, int at_once, Scratch<Stored>& scratch) {
  constexpr int E = kPair<Stored>;
  const int64_t head_dim = problem.shape.head_dim;
  const int per_head = problem.queries_per_head(piece);
  for (int query = 0; query < problem.num_queries(piece); ++query) {
    const int in_head = query % per_head, in_set = in_head % at_once;
    const int set = std::min(at_once, per_head - in_head + in_set);
    const int64_t from = problem.row_of(piece, query) * problem.query_row_stride +
                         problem.head_of(piece, query) * head_dim;
    auto* to = scratch.query + (query - in_set) * head_dim + in_set * E;
    if (problem.is_bfloat16)
      load_query<Stored>((const bfloat16*)problem.query + from, head_dim, set * E, to);
    else
      load_query<Stored>((const float*)problem.query + from, head_dim, set * E, to);
    for (int64_t d = 0; d < head_dim; ++d) scratch.output[query * head_dim + d] = 0;
    scratch.sum[query] = Floats{};
    scratch.reference[query] = -INFINITY;
  }
}

static inline void prefetch(const void* from, int64_t num_bytes) {
  for (int64_t byte = 0; byte < num_bytes; byte += 64) __builtin_prefetch((const char*)from + byte);
}

// What a piece found, to the output or, if it is not the whole tile, to partial_output [queries][D] and partial_lse.
template <typename Stored>
static void finish_partition(const Problem<Stored>& problem, const Piece& piece, float* partial_output, float* partial_lse,
                         Scratch<Stored>& scratch) {
  const int64_t head_dim = problem.shape.head_dim;
  for (int i = 0; i < problem.num_queries(piece); ++i) {
    const float total = sum(scratch.sum[i]), inverse = total == 0 ? 0.0f : 1.0f / total;
    const float lse = scratch.reference[i] * problem.scale() * 0.693147181f + std::log(total);
    float* output = scratch.output + i * head_dim;
    for (int64_t d = 0; d < head_dim; d += kLanes) store(output + d, load(output + d) * inverse);
    if (piece.partial < 0) {
      problem.finish(problem.place(piece, i), output, lse);
    } else {
      std::memcpy(partial_output + (piece.partial + i) * head_dim, output, head_dim * sizeof(float));
      partial_lse[piece.partial + i] = lse;
    }
  }
}

// num_numbers of the cache to floats; for each line, one at `ahead` is asked for.
template <typename Stored>
static inline void widen(const Stored* from, const Stored* ahead, int64_t num_numbers, float* to) {
  constexpr int64_t kLine = 64 / sizeof(Stored);
  for (int64_t first = 0; first < num_numbers; first += kLine) {
    __builtin_prefetch(ahead + first);
    for (int64_t i = first; i < first + kLine; i += kLanes) store(to + i, load(from + i));
  }
}

// The chunk as it is multiplied. ahead: what is prefetched for each of its groups.
template <typename Stored>
static inline ChunkGroups<Multiplied<Stored>> widened(const ChunkGroups<Stored>& chunk, const ChunkGroups<Stored>& ahead,
                                                      int64_t head_dim, Scratch<Stored>& scratch) {
  if constexpr (std::is_same_v<Stored, Multiplied<Stored>>) {
    return chunk;
  } else {
    const int64_t group_size = kGroup * head_dim;
    ChunkGroups<float> result;
    result.num_groups = chunk.num_groups;
    for (int g = 0; g < chunk.num_groups; ++g) {
      result.keys[g] = scratch.widened_keys + g * group_size;
      result.values[g] = scratch.widened_values + g * group_size;
      widen(chunk.keys[g], ahead.keys[g], group_size, scratch.widened_keys + g * group_size);
      widen(chunk.values[g], ahead.values[g], group_size, scratch.widened_values + g * group_size);
    }
    return result;
  }
}

// A piece of one KV head. next_partition: what this thread does next, or null: its first tokens are prefetched.
template <typename Stored>
static void attend_rows(const Problem<Stored>& problem, const Piece& piece, const Piece* next_partition,
                        Scratch<Stored>& scratch) {
  const int64_t head_dim = problem.shape.head_dim, num_steps = head_dim / kPair<Stored>;
  const int num_queries = problem.num_queries(piece);
  const int num_sets = (num_queries + kScoreQueries - 1) / kScoreQueries;
  const int at_once = (num_queries + num_sets - 1) / num_sets;
  // With few queries, reading memory takes longest: a chunk and the one prefetched meanwhile fit into the first cache.
  const int chunk_tokens = num_sets == 1 ? kChunk / 2 : kChunk;

  load_queries(problem, piece, at_once, scratch);
  ChunkGroups<Stored> chunk = problem.chunk(piece, piece.kv_begin, chunk_tokens);
  for (int start = piece.kv_begin; start < piece.kv_end; start += chunk_tokens) {
    ChunkGroups<Stored> next = chunk;
    if (start + chunk_tokens < piece.kv_end)
      next = problem.chunk(piece, start + chunk_tokens, chunk_tokens);
    else if (next_partition)
      next = problem.chunk(*next_partition, next_partition->kv_begin, chunk_tokens);
    // What is prefetched for each group of this chunk.
    ChunkGroups<Stored> ahead = next;
    for (int g = next.num_groups; g < chunk.num_groups; ++g) ahead.keys[g] = ahead.values[g] = chunk.keys[g];
    for (int g = chunk.num_groups; g < next.num_groups; ++g) {
      prefetch(next.keys[g], kGroup * head_dim * sizeof(Stored));
      prefetch(next.values[g], kGroup * head_dim * sizeof(Stored));
    }
    const ChunkGroups<Multiplied<Stored>> multiplied = widened(chunk, ahead, head_dim, scratch);
    // A widened chunk is in the cache already, as is then what was to be prefetched.
    const ChunkGroups<Multiplied<Stored>>* beside = &multiplied;
    if constexpr (std::is_same_v<Stored, Multiplied<Stored>>) beside = &ahead;
    for (int first = 0; first < num_queries; first += at_once) {
      const int set = std::min(at_once, num_queries - first);
      const int most = problem.visible_to(piece.segment, problem.row_of(piece, first + set - 1)) - start;
      const int num_groups = std::min(chunk.num_groups, (most + kGroup - 1) / kGroup);
      if (num_groups <= 0) continue;
      score_chunk<kScoreQueries, Multiplied<Stored>>(set, scratch.query + first * head_dim, multiplied, *beside,
                                                     num_groups, num_steps, scratch.scores);
      for (int i = 0; i < set; ++i) {
        const int visible = problem.visible_to(piece.segment, problem.row_of(piece, first + i)) - start;
        add_to_softmax(scratch, first + i, scratch.scores + i * kChunk, visible, num_groups * kGroup, problem.scale(), head_dim,
               scratch.weights + i * kChunk);
      }
      for (int i = 0; i < set; i += kValueQueries)
        add_chunk<kValueQueries, Multiplied<Stored>>(
            std::min(kValueQueries, set - i), scratch.output + (first + i) * head_dim,
            scratch.weights + i * kChunk, multiplied, *beside, num_groups, head_dim);
    }
    chunk = next;
  }
}
