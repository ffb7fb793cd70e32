// Attention of one tile: some rows of one segment, and one KV head or several, with up to kTileQueries queries: KV heads in
// order, then rows, then a row's heads of that KV head. Its tokens are taken chunk by chunk (attention_tile.h), each for
// all queries while it is in the processor's cache.
// Sources: FlashAttention (arXiv 2205.14135) for softmax in chunks, PagedAttention (arXiv 2309.06180) for the blocks.
#pragma once

#include <algorithm>

#include "attention_tile.h"
#include "merge.h"

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

template <typename Element>
struct alignas(64) Scratch {
  typename Words<Element>::Factor query[kTileQueries * kMaxHeadDim];
  typename Words<Element>::Factor weights[kScoreQueries * kChunk];
  float output[kTileQueries * kMaxHeadDim];
  float scores[kScoreQueries * kChunk];
  Floats sum[kTileQueries];
  float reference[kTileQueries];
};

// Segments of query rows, each against its own blocks: backend.PagedPart.
struct PagedPart {
  int64_t first_row, num_rows, num_segments;
  const int32_t *query_starts, *block_table;
  int64_t table_stride;
  const int32_t* kv_lengths;
  int64_t is_causal, is_partial;
};

template <typename Element>
struct Problem {
  Shape shape;
  PagedPart part;
  const Element* query;  // [rows, H, D], rows query_row_stride elements apart
  int64_t query_row_stride;
  void* output;  // [rows, H, D], contiguous; floats if is_partial and there is nothing beside, otherwise Elements
  float* lse;    // [rows, H]
  const Element* cache;  // [blocks][kv heads][keys, values][page size][D]
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
    const int64_t head_dim = shape.head_dim, from = place * head_dim;
    if (beside_output != nullptr) {
      merge_parts(beside_output + from, beside_lse[place], result, result_lse, (Element*)output + from, head_dim);
      return;
    }
    lse[place] = result_lse;
    for (int64_t d = 0; d < head_dim; d += 16) {
      if (part.is_partial)
        store16((float*)output + from + d, load16(result + d));
      else
        store_rounded((Element*)output + from + d, load16(result + d));
    }
  }

  // The chunk at token `start`, of the piece's first KV head.
  ChunkWords<Element> chunk(const Piece& piece, int start, int num_tokens) const {
    typedef const typename Words<Element>::Word* Pointer;
    const int32_t* table = part.block_table + piece.segment * part.table_stride;
    ChunkWords<Element> chunk;
    chunk.num_groups = std::min(num_tokens, piece.kv_end - start + kGroup - 1) / kGroup;
    for (int g = 0; g < chunk.num_groups; ++g) {
      const int token = start + g * kGroup;
      const int64_t block = table[token / shape.page_size];
      const Element* head = cache + (block * shape.num_kv_heads + piece.kv_head) * head_size();
      chunk.keys[g] = (Pointer)(head + token % shape.page_size * shape.head_dim);
      chunk.values[g] = chunk.keys[g] + head_size() / 2 / Words<Element>::kElements;
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
template <typename Element>
static inline void soften(Scratch<Element>& scratch, int query, float* scores, int visible, int padded, float scale,
                          int64_t head_dim, typename Words<Element>::Factor* weights) {
  if (visible <= 0) {
    std::memset(weights, 0, padded * sizeof *weights);
    return;
  }
  for (int token = visible; token < padded; ++token) scores[token] = -1e30f;
  Floats largest = load(scores);
  for (int token = kLanes; token < padded; token += kLanes) largest = larger_of(largest, load(scores + token));
  float reference = scratch.reference[query];
  if (any_greater(largest, reference + 8.0f / scale)) {
    const float rescale = std::exp2((reference - largest_of(largest)) * scale);
    scratch.reference[query] = reference = largest_of(largest);
    scratch.sum[query] *= rescale;
    float* output = scratch.output + query * head_dim;
    for (int64_t d = 0; d < head_dim; d += kLanes) store(output + d, load(output + d) * rescale);
  }
  Floats sum = scratch.sum[query];
  for (int token = 0; token < padded; token += kLanes) {
    const Floats weight = exp2_of(load(scores + token) * scale - reference * scale);
    sum += weight;
    store_factors(weights + token, weight);
  }
  scratch.sum[query] = sum;
}

// The queries of a piece as factors, in sets of `at_once` of each KV head (the last may be smaller): each
// [D / E][queries of the set][E], E being the elements of a word.
template <typename Element>
static void load_queries(const Problem<Element>& problem, const Piece& piece, int at_once, Scratch<Element>& scratch) {
  constexpr int E = Words<Element>::kElements;
  const int64_t head_dim = problem.shape.head_dim;
  const int per_head = problem.queries_per_head(piece);
  for (int query = 0; query < problem.num_queries(piece); ++query) {
    const int in_head = query % per_head, in_set = in_head % at_once;
    const int set = std::min(at_once, per_head - in_head + in_set);
    const Element* from = problem.query + problem.row_of(piece, query) * problem.query_row_stride +
                          problem.head_of(piece, query) * head_dim;
    auto* to = scratch.query + (query - in_set) * head_dim + in_set * E;
    for (int64_t word = 0; word < head_dim / E; ++word)
      for (int i = 0; i < E; ++i) to_factor(to + word * set * E + i, from[word * E + i]);
    for (int64_t d = 0; d < head_dim; ++d) scratch.output[query * head_dim + d] = 0;
    scratch.sum[query] = Floats{};
    scratch.reference[query] = -INFINITY;
  }
}

template <typename Word>
static inline void prefetch(const Word* from, int64_t num_words) {
  for (int64_t word = 0; word < num_words; word += 16) __builtin_prefetch(from + word);
}

// What a piece found, to the output or, if it is not the whole tile, to partial_output [queries][D] and partial_lse.
template <typename Element>
static void finish_piece(const Problem<Element>& problem, const Piece& piece, float* partial_output, float* partial_lse,
                         Scratch<Element>& scratch) {
  const int64_t head_dim = problem.shape.head_dim;
  for (int i = 0; i < problem.num_queries(piece); ++i) {
    const float sum = sum_of(scratch.sum[i]), inverse = sum == 0 ? 0.0f : 1.0f / sum;
    const float lse = scratch.reference[i] * problem.scale() * 0.693147181f + std::log(sum);
    float* output = scratch.output + i * head_dim;
    for (int64_t d = 0; d < head_dim; d += 16) store16(output + d, load16(output + d) * inverse);
    if (piece.partial < 0) {
      problem.finish(problem.place(piece, i), output, lse);
    } else {
      std::memcpy(partial_output + (piece.partial + i) * head_dim, output, head_dim * sizeof(float));
      partial_lse[piece.partial + i] = lse;
    }
  }
}

// A piece of one KV head. next_piece: what this thread does next, or null: its first tokens are prefetched.
template <typename Element>
static void attend_rows(const Problem<Element>& problem, const Piece& piece, const Piece* next_piece,
                        Scratch<Element>& scratch) {
  const int64_t head_dim = problem.shape.head_dim, num_words = head_dim / Words<Element>::kElements;
  const int num_queries = problem.num_queries(piece);
  const int num_sets = (num_queries + kScoreQueries - 1) / kScoreQueries;
  const int at_once = (num_queries + num_sets - 1) / num_sets;
  // With few queries, reading memory takes longest: a chunk and the one prefetched meanwhile fit into the first cache.
  const int chunk_tokens = num_sets == 1 ? kChunk / 2 : kChunk;

  load_queries(problem, piece, at_once, scratch);
  ChunkWords<Element> chunk = problem.chunk(piece, piece.kv_begin, chunk_tokens);
  for (int start = piece.kv_begin; start < piece.kv_end; start += chunk_tokens) {
    ChunkWords<Element> next = chunk;
    if (start + chunk_tokens < piece.kv_end)
      next = problem.chunk(piece, start + chunk_tokens, chunk_tokens);
    else if (next_piece)
      next = problem.chunk(*next_piece, next_piece->kv_begin, chunk_tokens);
    // What is prefetched for each group of this chunk.
    ChunkWords<Element> ahead = next;
    for (int g = next.num_groups; g < chunk.num_groups; ++g) ahead.keys[g] = ahead.values[g] = chunk.keys[g];
    for (int g = chunk.num_groups; g < next.num_groups; ++g) {
      prefetch(next.keys[g], num_words * kGroup);
      prefetch(next.values[g], num_words * kGroup);
    }
    for (int first = 0; first < num_queries; first += at_once) {
      const int set = std::min(at_once, num_queries - first);
      const int most = problem.visible_to(piece.segment, problem.row_of(piece, first + set - 1)) - start;
      const int num_groups = std::min(chunk.num_groups, (most + kGroup - 1) / kGroup);
      if (num_groups <= 0) continue;
      score_chunk<kScoreQueries, Element>(set, scratch.query + first * head_dim, chunk, ahead, num_groups, num_words,
                                          scratch.scores);
      for (int i = 0; i < set; ++i) {
        const int visible = problem.visible_to(piece.segment, problem.row_of(piece, first + i)) - start;
        soften(scratch, first + i, scratch.scores + i * kChunk, visible, num_groups * kGroup, problem.scale(), head_dim,
               scratch.weights + i * kChunk);
      }
      for (int i = 0; i < set; i += kValueQueries)
        add_chunk<kValueQueries, Element>(
            std::min(kValueQueries, set - i), scratch.output + (first + i) * head_dim,
            scratch.weights + i * kChunk, chunk, ahead, num_groups, head_dim);
    }
    chunk = next;
  }
}
