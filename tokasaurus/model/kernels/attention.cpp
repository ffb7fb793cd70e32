// Paged attention on the CPU. Each key and value byte of a segment is read once for all its query heads and rows.
//
// Keys lie as [block][kv head][page / 16][head size][16 tokens]: sixteen scores advance with one multiply-add.
// Values lie as [block][kv head][page][head size].
// A work item is one KV head of one segment with up to kTileQueries of the queries that share that head; items go to the
// threads as they become free. Online softmax over chunks of kChunk tokens, everything in float32.
// Sources: FlashAttention (arXiv 2205.14135) for the chunked softmax, PagedAttention (arXiv 2309.06180) for the blocks.

#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.h"

namespace {

constexpr int kChunk = 128;
constexpr int kTileQueries = 32;
constexpr int kMaxHeadDim = 256;

// Blocks lie anywhere, so that the processor cannot guess the next: keys are asked for this many tokens early, values
// while the same tokens' keys are scored.
constexpr int kPrefetchTokens = 32;

inline void prefetch(const void* from, int64_t num_bytes) {
  for (int64_t offset = 0; offset < num_bytes; offset += 64) __builtin_prefetch((const char*)from + offset);
}

struct Shape {
  int64_t num_heads, num_kv_heads, head_dim, page_size;
};

// A tile's rows of one segment, seen by one KV head: queries are numbered row-major, group heads within a row.
struct Item {
  int32_t segment, kv_head, first_row, num_rows;
};

struct alignas(64) Scratch {
  float query[kTileQueries][kMaxHeadDim];
  float output[kTileQueries][kMaxHeadDim];
  float scores[kTileQueries][kChunk];
  float maximum[kTileQueries];
  float sum[kTileQueries];
};

// scores[0..N)[0..16) of N queries against sixteen tokens. With few queries, the sums are kept in several parts, so that
// a multiply-add need not wait for the one before it.
template <int N, typename Element>
inline void score_tokens(const float (*query)[kMaxHeadDim], const Element* keys, int64_t head_dim,
                         float (*scores)[kChunk]) {
  constexpr int kParts = N >= 8 ? 1 : N >= 4 ? 2 : 4;
  f32x16 total[N][kParts] = {};
  for (int64_t d = 0; d < head_dim; d += kParts) {
    for (int part = 0; part < kParts; ++part) {
      f32x16 key = load16(keys + (d + part) * 16);
      for (int i = 0; i < N; ++i) total[i][part] += query[i][d + part] * key;
    }
  }
  for (int i = 0; i < N; ++i) {
    for (int part = 1; part < kParts; ++part) total[i][0] += total[i][part];
    store16(scores[i], total[i][0]);
  }
}

template <typename Element>
void score_tile(const Scratch& scratch, int num_queries, const Element* keys, int64_t head_dim,
                float (*scores)[kChunk]) {
  int first = 0;
  for (; first + 8 <= num_queries; first += 8)
    score_tokens<8>(scratch.query + first, keys, head_dim, scores + first);
  switch (num_queries - first) {
    case 7: score_tokens<7>(scratch.query + first, keys, head_dim, scores + first); break;
    case 6: score_tokens<6>(scratch.query + first, keys, head_dim, scores + first); break;
    case 5: score_tokens<5>(scratch.query + first, keys, head_dim, scores + first); break;
    case 4: score_tokens<4>(scratch.query + first, keys, head_dim, scores + first); break;
    case 3: score_tokens<3>(scratch.query + first, keys, head_dim, scores + first); break;
    case 2: score_tokens<2>(scratch.query + first, keys, head_dim, scores + first); break;
    case 1: score_tokens<1>(scratch.query + first, keys, head_dim, scores + first); break;
  }
}

// output[0..N)[0..16 V) += weights[0..N)[token] * values[token][0..16 V) over consecutive tokens of one block.
template <int N, int V, typename Element>
inline void add_values(float (*output)[kMaxHeadDim], const float (*weights)[kChunk], const Element* values,
                       int64_t head_dim, int num_tokens) {
  f32x16 total[N][V];
  for (int i = 0; i < N; ++i)
    for (int j = 0; j < V; ++j) total[i][j] = load16(output[i] + 16 * j);
  for (int token = 0; token < num_tokens; ++token) {
    for (int j = 0; j < V; ++j) {
      f32x16 value = load16(values + token * head_dim + 16 * j);
      for (int i = 0; i < N; ++i) total[i][j] += weights[i][token] * value;
    }
  }
  for (int i = 0; i < N; ++i)
    for (int j = 0; j < V; ++j) store16(output[i] + 16 * j, total[i][j]);
}

template <int N, typename Element>
void add_values_rows(float (*output)[kMaxHeadDim], const float (*weights)[kChunk], const Element* values,
                     int64_t head_dim, int num_tokens) {
  typedef float Row[kMaxHeadDim];
  int64_t d = 0;
  for (; d + 64 <= head_dim; d += 64)
    add_values<N, 4>((Row*)(output[0] + d), weights, values + d, head_dim, num_tokens);
  for (; d < head_dim; d += 16)
    add_values<N, 1>((Row*)(output[0] + d), weights, values + d, head_dim, num_tokens);
}

template <typename Element>
void add_values_tile(Scratch& scratch, int num_queries, const float (*weights)[kChunk], const Element* values,
                     int64_t head_dim, int num_tokens) {
  int first = 0;
  for (; first + 4 <= num_queries; first += 4)
    add_values_rows<4>(scratch.output + first, weights + first, values, head_dim, num_tokens);
  switch (num_queries - first) {
    case 3: add_values_rows<3>(scratch.output + first, weights + first, values, head_dim, num_tokens); break;
    case 2: add_values_rows<2>(scratch.output + first, weights + first, values, head_dim, num_tokens); break;
    case 1: add_values_rows<1>(scratch.output + first, weights + first, values, head_dim, num_tokens); break;
  }
}

// Turns scores into weights e^(score - maximum) and rescales what was summed under the old maximum.
inline void soften(Scratch& scratch, int query, int num_tokens, int64_t head_dim) {
  float* scores = scratch.scores[query];
  f32x16 largest = load16(scores);
  for (int token = 16; token < num_tokens; token += 16) largest = greater(largest, load16(scores + token));
  float old_maximum = scratch.maximum[query];
  float maximum = std::max(old_maximum, max16(largest));
  f32x16 total = {};
  for (int token = 0; token < num_tokens; token += 16) {
    f32x16 weight = exp_nonpositive(load16(scores + token) - maximum);
    store16(scores + token, weight);
    total += weight;
  }
  float rescale = std::exp(old_maximum - maximum);
  scratch.maximum[query] = maximum;
  scratch.sum[query] = scratch.sum[query] * rescale + sum16(total);
  if (rescale != 1.0f)
    for (int64_t d = 0; d < head_dim; d += 16)
      store16(scratch.output[query] + d, load16(scratch.output[query] + d) * rescale);
}

template <typename Element>
struct Problem {
  Shape shape;
  const Element* query;  // [rows, H, D], rows query_row_stride elements apart
  int64_t query_row_stride;
  void* output;  // [rows, H, D], contiguous; floats if is_partial, otherwise Elements
  float* lse;    // [rows, H]
  const Element* keys;
  const Element* values;
  const int32_t* query_starts;
  const int32_t* block_table;
  int64_t table_stride;
  const int32_t* kv_lengths;
  bool causal, is_partial;
};

template <typename Element>
void attend_item(const Problem<Element>& problem, const Item& item, Scratch& scratch) {
  const Shape& shape = problem.shape;
  const int64_t head_dim = shape.head_dim;
  const int group = int(shape.num_heads / shape.num_kv_heads);
  const int num_queries = item.num_rows * group;
  const int segment_end = problem.query_starts[item.segment + 1];
  const int kv_length = problem.kv_lengths[item.segment];
  const int32_t* table = problem.block_table + item.segment * problem.table_stride;
  const float scale = 1.0f / std::sqrt(float(head_dim));

  for (int i = 0; i < num_queries; ++i) {
    int64_t row = item.first_row + i / group;
    const Element* from =
        problem.query + row * problem.query_row_stride + (item.kv_head * group + i % group) * head_dim;
    for (int64_t d = 0; d < head_dim; ++d) scratch.query[i][d] = to_float(from[d]) * scale;
    for (int64_t d = 0; d < head_dim; ++d) scratch.output[i][d] = 0;
    scratch.maximum[i] = -INFINITY;
    scratch.sum[i] = 0;
  }

  auto visible_to = [&](int row) { return problem.causal ? kv_length - (segment_end - 1 - row) : kv_length; };
  const int most_visible = visible_to(item.first_row + item.num_rows - 1);
  const int64_t block_stride = shape.page_size * head_dim;
  const int64_t tokens_bytes = 16 * head_dim * int64_t(sizeof(Element));
  // Where sixteen tokens' keys, or values, lie: both layouts keep them together.
  auto tokens_at = [&](const Element* cache, int place) {
    const int64_t block = table[place / shape.page_size];
    return cache + (block * shape.num_kv_heads + item.kv_head) * block_stride + place % shape.page_size * head_dim;
  };
  for (int start = 0; start < most_visible; start += kChunk) {
    const int num_tokens = std::min(kChunk, most_visible - start);
    const int padded = (num_tokens + 15) / 16 * 16;
    for (int token = 0; token < padded; token += 16) {
      const int ahead = start + token + kPrefetchTokens;
      if (ahead < most_visible) prefetch(tokens_at(problem.keys, ahead), tokens_bytes);
      prefetch(tokens_at(problem.values, start + token), tokens_bytes);
      score_tile(scratch, num_queries, tokens_at(problem.keys, start + token), head_dim,
                 (float(*)[kChunk])(scratch.scores[0] + token));
    }
    for (int i = 0; i < num_queries; ++i) {
      const int visible = std::max(0, std::min(padded, visible_to(item.first_row + i / group) - start));
      for (int token = visible; token < padded; ++token) scratch.scores[i][token] = -INFINITY;
      soften(scratch, i, padded, head_dim);
    }
    for (int token = 0; token < num_tokens; token += 16) {
      add_values_tile(scratch, num_queries, (const float(*)[kChunk])(scratch.scores[0] + token),
                      tokens_at(problem.values, start + token), head_dim, std::min(16, num_tokens - token));
    }
  }

  for (int i = 0; i < num_queries; ++i) {
    const int64_t place = int64_t(item.first_row + i / group) * shape.num_heads + item.kv_head * group + i % group;
    const float inverse = 1.0f / scratch.sum[i];
    for (int64_t d = 0; d < head_dim; ++d) {
      const float value = scratch.output[i][d] * inverse;
      if (problem.is_partial)
        ((float*)problem.output)[place * head_dim + d] = value;
      else
        from_float((Element*)problem.output + place * head_dim + d, value);
    }
    problem.lse[place] = scratch.maximum[i] + std::log(scratch.sum[i]);
  }
}

template <typename Element>
void attend(const Problem<Element>& problem, int64_t num_segments) {
  const int group = int(problem.shape.num_heads / problem.shape.num_kv_heads);
  const int tile_rows = std::max(1, kTileQueries / group);
  std::vector<Item> items;
  for (int32_t segment = 0; segment < num_segments; ++segment) {
    const int32_t end = problem.query_starts[segment + 1];
    // Last rows first: they see the most tokens, and long items at the end would leave threads idle.
    for (int32_t tile_end = end; tile_end > problem.query_starts[segment]; tile_end -= tile_rows) {
      const int32_t first = std::max(problem.query_starts[segment], tile_end - tile_rows);
      for (int32_t kv_head = 0; kv_head < problem.shape.num_kv_heads; ++kv_head)
        items.push_back({segment, kv_head, first, tile_end - first});
    }
  }
#pragma omp parallel
  {
    static thread_local Scratch scratch;
#pragma omp for schedule(dynamic, 1)
    for (size_t index = 0; index < items.size(); ++index) attend_item(problem, items[index], scratch);
  }
}

template <typename Element>
void write_kv(const Element* key, const Element* value, int64_t key_stride, int64_t value_stride,
              const int64_t* token_places, int64_t num_tokens, const Shape& shape, Element* keys, Element* values) {
  const int64_t head_dim = shape.head_dim;
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int64_t block = token_places[token] / shape.page_size;
    const int64_t offset = token_places[token] % shape.page_size;
    for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
      const int64_t base = (block * shape.num_kv_heads + head) * shape.page_size * head_dim;
      const Element* from = key + token * key_stride + head * head_dim;
      Element* to = keys + base + offset / 16 * 16 * head_dim + offset % 16;
      for (int64_t d = 0; d < head_dim; ++d) to[d * 16] = from[d];
      std::memcpy(values + base + offset * head_dim, value + token * value_stride + head * head_dim,
                  head_dim * sizeof(Element));
    }
  }
}

}  // namespace

extern "C" {

// Largest head size, and most query heads per KV head, that the kernels take.
int64_t toka_max_head_dim() { return kMaxHeadDim; }
int64_t toka_max_group() { return kTileQueries; }

void toka_attend(int64_t is_bfloat16, const void* query, int64_t query_row_stride, void* output, float* lse,
                 const void* keys, const void* values, const int32_t* query_starts, const int32_t* block_table,
                 int64_t table_stride, const int32_t* kv_lengths, int64_t num_segments, int64_t causal,
                 int64_t is_partial, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t page_size) {
  const Shape shape{num_heads, num_kv_heads, head_dim, page_size};
  if (is_bfloat16)
    attend(Problem<bfloat16>{shape, (const bfloat16*)query, query_row_stride, output, lse,
                             (const bfloat16*)keys, (const bfloat16*)values, query_starts, block_table, table_stride,
                             kv_lengths, causal != 0, is_partial != 0},
           num_segments);
  else
    attend(Problem<float>{shape, (const float*)query, query_row_stride, output, lse, (const float*)keys,
                          (const float*)values, query_starts, block_table, table_stride, kv_lengths, causal != 0, is_partial != 0},
           num_segments);
}

void toka_write_kv(int64_t is_bfloat16, const void* key, const void* value, int64_t key_stride, int64_t value_stride,
                   const int64_t* token_places, int64_t num_tokens, void* keys, void* values, int64_t num_kv_heads,
                   int64_t head_dim, int64_t page_size) {
  const Shape shape{0, num_kv_heads, head_dim, page_size};
  if (is_bfloat16)
    write_kv((const bfloat16*)key, (const bfloat16*)value, key_stride, value_stride, token_places, num_tokens, shape,
             (bfloat16*)keys, (bfloat16*)values);
  else
    write_kv((const float*)key, (const float*)value, key_stride, value_stride, token_places, num_tokens, shape,
             (float*)keys, (float*)values);
}
}
