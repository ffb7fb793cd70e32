// Attention of one tile: some rows of one segment and one or more KV heads, with up to kTileQueries queries, ordered by
// KV head, then row, then query head of that KV head. The tile's tokens are processed in chunks (attention_tile.h);
// each chunk is used for all queries while it is in the processor's cache.
// Sources: FlashAttention (arXiv 2205.14135) for online softmax over chunks, PagedAttention (arXiv 2309.06180) for the
// blocks.
#pragma once

#include <algorithm>

#include "attention/attention_amx.h"
#include "attention/attention_codes.h"
#include "attention/attention_tile.h"
#include "attention/int8_cache.h"
#include "attention/merge.h"
#include "simd/element_type.h"
#include "simd/simd_math.h"

// With tiles, products are so fast that reading a long context for fewer queries would take longer.
constexpr int kTileQueries = TOKA_AMX ? 192 : 96;

struct Shape {
  int64_t num_heads, num_kv_heads, head_dim, page_size;
};

// A tile's rows, and the range [kv_begin, kv_end) of the segment's tokens that this partition of the tile reads.
// partial_index: index of the partition's first query in the partial results; -1 if the partition is the whole tile.
struct Partition {
  int32_t segment, kv_head, num_kv_heads, first_row, num_rows, kv_begin, kv_end;
  int64_t partial_index;
};

template <typename Stored>
constexpr bool kHasScales = std::is_same_v<Stored, int8_t>;

// Type of the keys and values that many queries are multiplied with: the cache's own or, if the cache would be widened
// again for every few queries, that of a widened copy.
template <typename Stored>
using Multiplied = std::conditional_t<kHasScales<Stored>, std::conditional_t<TOKA_BFLOAT16_DOT, bfloat16, float>,
                                      std::conditional_t<kPair<Stored> == 2, Stored, float>>;

// Type of the queries and of the softmax weights.
template <typename Stored>
using QueryOperand = Activation<Multiplied<Stored>>;

template <typename Stored>
constexpr bool kUsesAmx = TOKA_AMX && std::is_same_v<Multiplied<Stored>, bfloat16>;

// How many queries are multiplied with a chunk at once.
template <typename Stored>
constexpr int kSetQueries = kUsesAmx<Stored> ? 32 : kScoreQueries;

// A thread's memory for one partition. key_scales and value_scales: of a chunk of an int8 cache.
template <typename Stored>
struct alignas(64) Scratch {
  static constexpr bool kIsWidened = !std::is_same_v<Stored, Multiplied<Stored>>;

  QueryOperand<Stored> query[kTileQueries * kMaxHeadDim];
  QueryOperand<Stored> weights[kSetQueries<Stored> * kChunk];
  float output[kTileQueries * kMaxHeadDim];
  float scores[kSetQueries<Stored> * kChunk];
  Floats sum[kTileQueries];
  float reference[kTileQueries];
  alignas(64) Multiplied<Stored> widened_keys[kIsWidened ? kChunk * kMaxHeadDim : 1];
  alignas(64) Multiplied<Stored> widened_values[kIsWidened || kUsesAmx<Stored> ? kChunk * kMaxHeadDim : 1];
  float key_scales[kHasScales<Stored> ? kChunk : 1], value_scales[kHasScales<Stored> ? kChunk : 1];
#if TOKA_INT8_DOT
  CodedQuery coded[kHasScales<Stored> ? kTileQueries : 1];
#endif
};

// Segments of query rows, each with its own blocks. Filled by Python: structs.PagedPartStruct, from
// backend.PagedPart.
struct PagedPart {
  int64_t first_row, num_rows, num_segments;
  const int32_t *query_starts, *block_table;
  int64_t table_stride;
  const int32_t* kv_lengths;
  int64_t is_causal, is_partial;
  const int32_t* tokens_after;  // [rows]: how many tokens each sees after the part's, in another part; null for none
};

// How a layer makes scores of queries and keys. Filled by Python: LayerScoresStruct, from backend.Scores.
struct LayerScores {
  double scale, softcap;  // softcap: 0 for none
  int64_t window;      // 0 for none; negative: a row sees the tokens of its chunk of -window, which no part begins in
  const float* sinks;  // [H], a score of each query head whose value is zero; null for none
  // Where the layer's keys and values are: in the block that `blocks` names for a block of a table, or in that block
  // itself if null; and there as layer number `place`.
  const int32_t* blocks;
  int64_t place;
};

// scores[0..count) -> softcap * tanh(scale * score / softcap). count: a multiple of kGroup.
TOKA_NOINLINE static void cap_scores(float* scores, int count, const LayerScores& how) {
  const float inner = float(how.scale / how.softcap), softcap = float(how.softcap);
  for (int i = 0; i < count; i += kLanes) store(scores + i, tanh(load(scores + i) * inner) * softcap);
}

// Attention of one part. The type of queries and outputs is independent of the cache's.
template <typename Stored>
struct Problem {
  Shape shape;
  PagedPart part;
  int64_t activation_type;  // an ElementType: of queries and outputs
  const void* query;        // [rows, H, D], rows query_row_stride elements apart
  int64_t query_row_stride;
  void* output;         // [rows, H, D], contiguous; float32 if is_partial and other_output is null
  float* lse;           // [rows, H]; not written if other_output is not null
  const Stored* cache;  // one layer of it, as kv_write.h describes it
  // Result of the same queries over another part, [rows, H, D] and [rows, H], to be merged with this one; or null.
  const float* other_output = nullptr;
  const float* other_lse = nullptr;
  LayerScores scores{};

  int group() const { return int(shape.num_heads / shape.num_kv_heads); }

  // How many of its segment's tokens a row attends to.
  int visible_to(int segment, int row) const {
    const int32_t length = part.kv_lengths[segment];
    return part.is_causal ? length - (part.query_starts[segment + 1] - 1 - row) : length;
  }

  // The first of the segment's tokens that a row attends to; not before visible_to if the row's window begins later.
  int first_seen_by(int segment, int row) const {
    if (scores.window == 0) return 0;
    const int visible = visible_to(segment, row), after = part.tokens_after == nullptr ? 0 : part.tokens_after[row];
    if (scores.window < 0) return std::max(visible - 1, 0) / int(-scores.window) * int(-scores.window);
    return int(std::clamp<int64_t>(visible + after - scores.window, 0, std::max(visible, 0)));
  }

  // Queries of a partition; `query` is an index into them.
  int queries_per_head(const Partition& partition) const { return partition.num_rows * group(); }
  int num_queries(const Partition& partition) const { return partition.num_kv_heads * queries_per_head(partition); }
  int row_of(const Partition& partition, int query) const {
    return partition.first_row + query % queries_per_head(partition) / group();
  }
  int head_of(const Partition& partition, int query) const {
    return (partition.kv_head + query / queries_per_head(partition)) * group() + query % group();
  }
  int64_t output_index(const Partition& partition, int query) const {
    return int64_t(row_of(partition, query)) * shape.num_heads + head_of(partition, query);
  }

  // Stores a query's output [D] and lse, with the sink, merged with the other part's result if there is one. index: in
  // [rows, H]. Overwrites result.
  void store_result(int64_t index, float* result, float result_lse) const {
    if (__builtin_expect(scores.sinks != nullptr, 0)) {
      const float sink = scores.sinks[index % shape.num_heads], largest = std::max(result_lse, sink);
      const float weight = std::exp(result_lse - largest), total = weight + std::exp(sink - largest);
      for (int64_t d = 0; d < shape.head_dim; d += kLanes) store(result + d, load(result + d) * (weight / total));
      result_lse = largest + std::log(total);
    }
    dispatch_activation_type(part.is_partial && other_output == nullptr ? kFloat32 : activation_type, [&](auto tag) {
      store_result_as(index, result, result_lse, (TypeOf<decltype(tag)>*)output + index * shape.head_dim);
    });
  }

  template <typename Element>
  void store_result_as(int64_t index, const float* result, float result_lse, Element* to) const {
    const int64_t head_dim = shape.head_dim;
    if (other_output != nullptr) {
      merge_parts(other_output + index * head_dim, other_lse[index], result, result_lse, to, head_dim);
      return;
    }
    lse[index] = result_lse;
    for (int64_t d = 0; d < head_dim; d += kLanes) store(to + d, load(result + d));
  }

  // The block of the cache that has the layer's keys and values of a table's block.
  int64_t stored_in(int32_t block) const { return scores.blocks == nullptr ? block : scores.blocks[block]; }

  // The chunk that starts at token `start`, for the partition's first KV head.
  ChunkGroups<Stored> chunk(const Partition& partition, int start, int num_tokens) const {
    const int32_t* table = part.block_table + partition.segment * part.table_stride;
    ChunkGroups<Stored> chunk;
    chunk.num_groups = std::min(num_tokens, partition.kv_end - start + kGroup - 1) / kGroup;
    for (int g = 0; g < chunk.num_groups; ++g) {
      const int token = start + g * kGroup;
      const int64_t block = stored_in(table[token / shape.page_size]);
      const Stored* head = cache + (block * shape.num_kv_heads + partition.kv_head) * head_size();
      set_group(chunk, g, head, token % shape.page_size);
    }
    return chunk;
  }

  // Factor of scores in the softmax, times log2(e), because weights are powers of 2. Capped scores are scaled already.
  float scale() const { return scores.softcap != 0 ? kLog2E : kLog2E * float(scores.scale); }

  // Caps the scores of a query that a softmax reads, if the layer has a cap.
  void cap(float* of_query, int num_scores) const {
    if (__builtin_expect(scores.softcap != 0, 0)) cap_scores(of_query, num_scores, scores);
  }

  // The group of tokens at `offset` in a block. head: what the block stores for the KV head.
  void set_group(ChunkGroups<Stored>& chunk, int g, const Stored* head, int64_t offset) const {
    chunk.keys[g] = head + offset * shape.head_dim;
    chunk.values[g] = chunk.keys[g] + shape.page_size * shape.head_dim;
    if constexpr (kHasScales<Stored>)
      chunk.scales[g] = (const bfloat16*)(head + 2 * shape.page_size * shape.head_dim) + 2 * offset;
  }

  // Elements of one KV head in a block: keys, values and their scales.
  int64_t head_size() const { return shape.page_size * (2 * shape.head_dim + kScaleElements<Stored>); }
};

// scores[0..count) of a query times the scales of the keys. count: a multiple of kGroup.
static inline void scale_scores(float* scores, const float* key_scales, int count) {
  for (int i = 0; i < count; i += kLanes) store(scores + i, load(scores + i) * load(key_scales + i));
}

// Online softmax: turns scores[0..padded) of one query into weights 2^(scale * (score - reference)). Only tokens from
// `first` on and before `visible` get a weight. If the reference changes, the sum and output so far are rescaled. The
// reference need not be the largest score, as long as weights stay within 2^8. has_scales: the weights are multiplied
// by the scales of the values.
template <bool has_scales, typename Stored, typename Weight>
static inline void update_online_softmax(Scratch<Stored>& scratch, int query, float* scores, int first, int visible,
                                         int padded, float scale, int64_t head_dim, Weight* weights) {
  constexpr bool is_rounded = std::is_same_v<Weight, bfloat16>;
  if (std::max(first, 0) >= std::min(visible, padded)) {
    std::memset(weights, 0, padded * sizeof *weights);
    return;
  }
  for (int token = 0; token < first; ++token) scores[token] = -1e30f;
  for (int token = visible; token < padded; ++token) scores[token] = -1e30f;
  Floats largest = load(scores);
  for (int token = kLanes; token < padded; token += kLanes) largest = max(largest, load(scores + token));
  float reference = scratch.reference[query];
  if (any_greater(largest, reference + 8.0f / scale)) {
    const float new_reference = max(largest);
    const float rescale = std::exp2((reference - new_reference) * scale);
    scratch.reference[query] = reference = new_reference;
    scratch.sum[query] *= rescale;
    float* output = scratch.output + query * head_dim;
    for (int64_t d = 0; d < head_dim; d += kLanes) store(output + d, load(output + d) * rescale);
  }
  Floats sum = scratch.sum[query];
  for (int token = 0; token < padded; token += kLanes) {
    // The difference first: the product of a large score would be rounded.
    const Floats exponent = (load(scores + token) - reference) * scale;
    const Floats weight = is_rounded ? exp2_to_bfloat16(exponent) : exp2(exponent);
    sum += weight;
    if constexpr (has_scales)
      store(weights + token, weight * load(scratch.value_scales + token));
    else
      store(weights + token, weight);
  }
  scratch.sum[query] = sum;
}

// Converts a head's query [D] to an operand: E = kPair<Multiplied<Stored>> numbers at a time, `stride` apart.
template <typename Stored, typename Element>
static inline void load_query(const Element* from, int64_t head_dim, int64_t stride, QueryOperand<Stored>* to) {
  constexpr int E = kPair<Multiplied<Stored>>;
  for (int64_t d = 0; d < head_dim; d += E, to += stride)
    for (int i = 0; i < E; ++i) convert(to + i, from[d + i]);
}

// Resets the outputs and the softmax state of a partition's queries.
template <typename Stored>
static void reset_queries(int num_queries, int64_t head_dim, Scratch<Stored>& scratch) {
  std::fill(scratch.output, scratch.output + num_queries * head_dim, 0.0f);
  std::fill(scratch.sum, scratch.sum + num_queries, Floats{});
  std::fill(scratch.reference, scratch.reference + num_queries, -INFINITY);
}

// Loads a partition's queries as operands, in sets of queries_per_set for each KV head (the last may be smaller): each
// [D / E][queries of the set][E].
template <typename Stored>
static void load_queries(const Problem<Stored>& problem, const Partition& partition, int queries_per_set,
                         Scratch<Stored>& scratch) {
  constexpr int E = kPair<Multiplied<Stored>>;
  const int64_t head_dim = problem.shape.head_dim;
  const int per_head = problem.queries_per_head(partition);
  for (int query = 0; query < problem.num_queries(partition); ++query) {
    const int in_head = query % per_head, in_set = in_head % queries_per_set;
    const int set_size = std::min(queries_per_set, per_head - in_head + in_set);
    const int64_t from =
        problem.row_of(partition, query) * problem.query_row_stride + problem.head_of(partition, query) * head_dim;
    auto* to = scratch.query + (query - in_set) * head_dim + in_set * E;
    dispatch_activation_type(problem.activation_type, [&](auto tag) {
      load_query<Stored>((const TypeOf<decltype(tag)>*)problem.query + from, head_dim, set_size * E, to);
    });
  }
  reset_queries(problem.num_queries(partition), head_dim, scratch);
}

static inline void prefetch(const void* from, int64_t num_bytes) {
  for (int64_t byte = 0; byte < num_bytes; byte += kCacheLineBytes) __builtin_prefetch((const char*)from + byte);
}

// Divides a partition's outputs by their softmax sums and stores them: in the problem's output or, if the partition is
// not a whole tile, in partial_output [queries][D] and partial_lse.
template <typename Stored>
static void store_partition(const Problem<Stored>& problem, const Partition& partition, float* partial_output,
                            float* partial_lse, Scratch<Stored>& scratch) {
  const int64_t head_dim = problem.shape.head_dim;
  for (int i = 0; i < problem.num_queries(partition); ++i) {
    const float total = sum(scratch.sum[i]), inverse = total == 0 ? 0.0f : 1.0f / total;
    const float lse = scratch.reference[i] * problem.scale() * kLn2 + std::log(total);
    float* output = scratch.output + i * head_dim;
    for (int64_t d = 0; d < head_dim; d += kLanes) store(output + d, load(output + d) * inverse);
    if (partition.partial_index < 0) {
      problem.store_result(problem.output_index(partition, i), output, lse);
    } else {
      std::memcpy(partial_output + (partition.partial_index + i) * head_dim, output, head_dim * sizeof(float));
      partial_lse[partition.partial_index + i] = lse;
    }
  }
}

// Converts num_numbers of the cache to floats; for each line, prefetches the corresponding line of `ahead`.
template <typename Stored>
static inline void widen(const Stored* from, const Stored* ahead, int64_t num_numbers, float* to) {
  constexpr int64_t kLine = kCacheLineBytes / sizeof(Stored);
  for (int64_t first = 0; first < num_numbers; first += kLine) {
    __builtin_prefetch(ahead + first);
    for (int64_t i = first; i < first + kLine; i += kLanes) store(to + i, load(from + i));
  }
}

// The chunk itself or a widened copy of it. ahead: what to prefetch for each of its groups while copying.
template <typename Stored>
static inline ChunkGroups<Multiplied<Stored>> widened(const ChunkGroups<Stored>& chunk,
                                                      const ChunkGroups<Stored>& ahead, int64_t head_dim,
                                                      Scratch<Stored>& scratch) {
  if constexpr (!Scratch<Stored>::kIsWidened) {
    return chunk;
  } else {
    const int64_t group_size = kGroup * head_dim;
    ChunkGroups<Multiplied<Stored>> result;
    result.num_groups = chunk.num_groups;
    for (int g = 0; g < chunk.num_groups; ++g) {
      Multiplied<Stored>*const keys = scratch.widened_keys + g * group_size, *const values = scratch.widened_values +
                                                                                             g * group_size;
      result.keys[g] = keys;
      result.values[g] = values;
      if constexpr (kHasScales<Stored>) {
        widen_codes(chunk.keys[g], ahead.keys[g], head_dim / 4, kGroup, keys);
        widen_codes(chunk.values[g], ahead.values[g], kGroup / 4, head_dim, values);
        __builtin_prefetch(ahead.scales[g]);
        for (int i = 0; i < kGroup; i += kLanes) {
          store(scratch.key_scales + g * kGroup + i, load(chunk.scales[g] + i));
          store(scratch.value_scales + g * kGroup + i, load(chunk.scales[g] + kGroup + i));
        }
      } else {
        widen(chunk.keys[g], ahead.keys[g], group_size, keys);
        widen(chunk.values[g], ahead.values[g], group_size, values);
      }
    }
    return result;
  }
}

#if TOKA_AMX

// Loads a partition's queries, [queries][padded_head_dim].
template <typename Stored>
static void load_query_rows(const Problem<Stored>& problem, const Partition& partition, Scratch<Stored>& scratch) {
  const int64_t head_dim = problem.shape.head_dim, padded_dim = padded_head_dim(head_dim);
  for (int query = 0; query < problem.num_queries(partition); ++query) {
    const int64_t from =
        problem.row_of(partition, query) * problem.query_row_stride + problem.head_of(partition, query) * head_dim;
    bfloat16* const to = scratch.query + query * padded_dim;
    dispatch_activation_type(problem.activation_type, [&](auto tag) {
      const auto* own = (const TypeOf<decltype(tag)>*)problem.query + from;
      for (int64_t d = 0; d < head_dim; d += kLanes) store(to + d, load(own + d));
    });
    std::fill(to + head_dim, to + padded_dim, bfloat16{});
  }
  reset_queries(problem.num_queries(partition), head_dim, scratch);
}

// The values of a chunk, copied so that they lie next to each other, with zeros behind an odd number of groups. While
// copying, the values of the next chunk are prefetched.
template <typename Stored>
static void gather_values(const ChunkGroups<Stored>& chunk, const ChunkGroups<Stored>& ahead, int64_t head_dim,
                          Scratch<Stored>& scratch) {
  constexpr int64_t kLine = kCacheLineBytes / sizeof(bfloat16);
  const int64_t group_size = kGroup * head_dim;
  if constexpr (!Scratch<Stored>::kIsWidened)
    for (int g = 0; g < chunk.num_groups; ++g)
      for (int64_t i = 0; i < group_size; i += kLine) {
        __builtin_prefetch(ahead.values[g] + i, 0, 2);
        const Ints line = load_vector<Ints>(chunk.values[g] + i);
        std::memcpy(scratch.widened_values + g * group_size + i, &line, sizeof line);
      }
  if (chunk.num_groups % 2 != 0)
    std::memset(scratch.widened_values + chunk.num_groups * group_size, 0, group_size * sizeof(bfloat16));
}

// The scores and the weighted values of up to 32 queries and a chunk, of which the first num_groups are seen.
template <bool kTwoRows, typename Stored, typename Softmax>
static void attend_set_by_tiles(const ChunkGroups<bfloat16>& chunk, const bfloat16* const* ahead, int first,
                                int set_size, int num_groups, int64_t head_dim, Scratch<Stored>& scratch,
                                const Softmax& softmax) {
  const int64_t padded_dim = padded_head_dim(head_dim);
  score_chunk_by_tiles<kTwoRows>(scratch.query + first * padded_dim, chunk, ahead, num_groups, padded_dim,
                                 scratch.scores);
  softmax(first, set_size, num_groups);
  const int num_tokens = (num_groups * kGroup + kAmxDepth - 1) / kAmxDepth * kAmxDepth;
  for (int i = 0; i < set_size; ++i)
    std::fill(scratch.weights + i * kChunk + num_groups * kGroup, scratch.weights + i * kChunk + num_tokens,
              bfloat16{});
  add_weighted_values_by_tiles<kTwoRows>(scratch.output + first * head_dim, scratch.weights, scratch.widened_values,
                                         num_tokens, head_dim);
}

#endif

// Attention of a partition with one KV head. next_partition: this thread's next work item, or null; its first tokens
// are prefetched.
template <typename Stored>
static void attend_rows(const Problem<Stored>& problem, const Partition& partition, const Partition* next_partition,
                        Scratch<Stored>& scratch) {
  const int64_t head_dim = problem.shape.head_dim, num_steps = head_dim / kPair<Multiplied<Stored>>;
  const int num_queries = problem.num_queries(partition);
  const int num_sets = (num_queries + kSetQueries<Stored> - 1) / kSetQueries<Stored>;
  const int queries_per_set = (num_queries + num_sets - 1) / num_sets;
  // With few queries, reading memory takes longest: a chunk and the next one, which is prefetched at the same time,
  // fit into the L1 cache.
  const int chunk_tokens = num_sets == 1 ? kChunk / 2 : kChunk;

  const auto softmax = [&](int first, int set_size, int start, int num_groups) {
    for (int i = 0; i < set_size; ++i) {
      const int row = problem.row_of(partition, first + i);
      const int first_seen = problem.first_seen_by(partition.segment, row) - start;
      const int visible = problem.visible_to(partition.segment, row) - start;
      if constexpr (kHasScales<Stored>)
        scale_scores(scratch.scores + i * kChunk, scratch.key_scales, num_groups * kGroup);
      problem.cap(scratch.scores + i * kChunk, num_groups * kGroup);
      update_online_softmax<kHasScales<Stored>>(scratch, first + i, scratch.scores + i * kChunk, first_seen, visible,
                                                num_groups * kGroup, problem.scale(), head_dim,
                                                scratch.weights + i * kChunk);
    }
  };
#if TOKA_AMX
  AmxShapes shapes;
  if constexpr (kUsesAmx<Stored>) load_query_rows(problem, partition, scratch);
#endif
  if constexpr (!kUsesAmx<Stored>) load_queries(problem, partition, queries_per_set, scratch);
  ChunkGroups<Stored> chunk = problem.chunk(partition, partition.kv_begin, chunk_tokens);
  for (int start = partition.kv_begin; start < partition.kv_end; start += chunk_tokens) {
    ChunkGroups<Stored> next = chunk;
    if (start + chunk_tokens < partition.kv_end)
      next = problem.chunk(partition, start + chunk_tokens, chunk_tokens);
    else if (next_partition)
      next = problem.chunk(*next_partition, next_partition->kv_begin, chunk_tokens);
    // What to prefetch for each group of this chunk: the next chunk's group or, if it has fewer, the group itself.
    ChunkGroups<Stored> ahead = next;
    for (int g = next.num_groups; g < chunk.num_groups; ++g) {
      ahead.keys[g] = ahead.values[g] = chunk.keys[g];
      if constexpr (kHasScales<Stored>) ahead.scales[g] = chunk.scales[g];
    }
    for (int g = chunk.num_groups; g < next.num_groups; ++g) {
      prefetch(next.keys[g], kGroup * head_dim * sizeof(Stored));
      prefetch(next.values[g], kGroup * head_dim * sizeof(Stored));
      if constexpr (kHasScales<Stored>) __builtin_prefetch(next.scales[g]);
    }
    const ChunkGroups<Multiplied<Stored>> multiplied = widened(chunk, ahead, head_dim, scratch);
    // Widening has prefetched the next chunk already: prefetching the widened chunk, which is in the cache, does
    // nothing.
    const ChunkGroups<Multiplied<Stored>>* to_prefetch = &multiplied;
    if constexpr (!Scratch<Stored>::kIsWidened) to_prefetch = &ahead;
#if TOKA_AMX
    if constexpr (kUsesAmx<Stored>) gather_values(chunk, ahead, head_dim, scratch);
#endif
    for (int first = 0; first < num_queries; first += queries_per_set) {
      const int set_size = std::min(queries_per_set, num_queries - first);
      const int num_visible =
          problem.visible_to(partition.segment, problem.row_of(partition, first + set_size - 1)) - start;
      const int num_groups = std::min(chunk.num_groups, (num_visible + kGroup - 1) / kGroup);
      if (num_groups <= 0) continue;
#if TOKA_AMX
      if constexpr (kUsesAmx<Stored>) {
        shapes.set(set_size, kAmxRowBytes);
        const bfloat16* const* ahead_keys = nullptr;
        if constexpr (!Scratch<Stored>::kIsWidened) ahead_keys = first == 0 ? ahead.keys : nullptr;
        const auto of_chunk = [&](int first, int set_size, int num_groups) {
          softmax(first, set_size, start, num_groups);
        };
        if (set_size > kAmxRows)
          attend_set_by_tiles<true>(multiplied, ahead_keys, first, set_size, num_groups, head_dim, scratch, of_chunk);
        else
          attend_set_by_tiles<false>(multiplied, ahead_keys, first, set_size, num_groups, head_dim, scratch, of_chunk);
        continue;
      }
#endif
      score_chunk<kScoreQueries, Multiplied<Stored>>(set_size, scratch.query + first * head_dim, multiplied,
                                                     *to_prefetch, num_groups, num_steps, scratch.scores);
      softmax(first, set_size, start, num_groups);
      for (int i = 0; i < set_size; i += kValueQueries)
        add_weighted_values<kValueQueries, Multiplied<Stored>>(
            std::min(kValueQueries, set_size - i), scratch.output + (first + i) * head_dim,
            scratch.weights + i * kChunk, multiplied, *to_prefetch, num_groups, head_dim);
    }
    chunk = next;
  }
}
