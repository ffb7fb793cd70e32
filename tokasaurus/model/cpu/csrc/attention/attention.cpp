// Exported attention functions: write keys and values into one layer of the cache, attend over one part of a forward or
// all of its parts, and merge the results of two parts.

#include "attention/attention_layout.h"
#include "attention/kv_write.h"
#include "simd/element_type.h"

TOKA_STRUCT_SIZE(PagedPart)
TOKA_STRUCT_SIZE(PagedForward)
TOKA_STRUCT_SIZE(LayerScores)

// Limits of the kernels: the largest head size (head sizes are multiples of 16) and the most query heads per KV head.
TOKA_EXPORT int64_t toka_max_head_dim() { return kMaxHeadDim; }
TOKA_EXPORT int64_t toka_max_group() { return kMaxGroup; }

// Attention of one part in a layer. query is of activation_type, and so is the output unless the part is partial: then
// it is float32.
TOKA_EXPORT void toka_attend(int64_t activation_type, int64_t cache_type, const void* query, int64_t query_row_stride,
                             void* output, float* lse, const void* cache, const PagedPart* part, int64_t num_heads,
                             int64_t num_kv_heads, int64_t head_dim, int64_t page_size, const LayerScores* scores) {
  const Shape shape{num_heads, num_kv_heads, head_dim, page_size};
  dispatch_cache_type(cache_type, [&](auto cache_tag) {
    typedef TypeOf<decltype(cache_tag)> Stored;
    attend_part<Stored>({shape, *part, activation_type, query, query_row_stride, output, lse, (const Stored*)cache,
                         nullptr, nullptr, *scores});
  });
}

// Attention of all parts. query: rows query_row_stride elements apart -> output [num_rows, H, D]; rows that are in no
// part become 0.
TOKA_EXPORT void toka_attend_layout(int64_t activation_type, const void* query, int64_t query_row_stride, void* output,
                                    const PagedForward* forward, int64_t layer, int64_t num_rows, int64_t num_heads,
                                    int64_t num_kv_heads, int64_t head_dim) {
  const Shape shape{num_heads, num_kv_heads, head_dim, forward->page_size};
  dispatch_activation_type(activation_type, [&](auto tag) {
    typedef TypeOf<decltype(tag)> Element;
    std::fill((Element*)output, (Element*)output + num_rows * num_heads * head_dim, Element{});
  });
  dispatch_cache_type(forward->cache_type, [&](auto cache_tag) {
    typedef TypeOf<decltype(cache_tag)> Stored;
    LayoutAttention<Stored>(*forward, shape, activation_type, query, query_row_stride, output).run(layer);
  });
}

// key, value: [num_tokens, kv heads, head_dim] of activation_type, rows key_stride and value_stride elements apart.
// cache: one layer, of cache_type. blocks: as in LayerScores.
TOKA_EXPORT void toka_write_kv(int64_t activation_type, int64_t cache_type, const void* key, const void* value,
                               int64_t key_stride, int64_t value_stride, const int64_t* kv_indices, int64_t num_tokens,
                               void* cache, const int32_t* blocks, int64_t num_kv_heads, int64_t head_dim,
                               int64_t page_size) {
  dispatch_cache_type(cache_type, [&](auto cache_tag) {
    dispatch_activation_type(activation_type, [&](auto tag) {
      typedef TypeOf<decltype(cache_tag)> Stored;
      typedef TypeOf<decltype(tag)> Element;
      const CacheLayer<Stored> layer{(Stored*)cache, num_kv_heads, head_dim, page_size, blocks};
      for (int64_t token = 0; token < num_tokens; ++token)
        layer.write(kv_indices[token], (const Element*)key + token * key_stride,
                    (const Element*)value + token * value_stride);
    });
  });
}

// Merges attention over two parts for the same rows, as attention/row_split.py does in torch.
// first, second [count, head_dim] and their lse [count] -> output [count, head_dim] of output_type. count: rows times
// query heads. head_dim: a multiple of 16.
TOKA_EXPORT void toka_merge(int64_t output_type, const float* first, const float* first_lse, const float* second,
                            const float* second_lse, void* output, int64_t count, int64_t head_dim) {
  constexpr int64_t kChunkRows = 2048;  // with fewer, a second thread costs more than it saves
  dispatch_activation_type(output_type, [&](auto tag) {
    typedef TypeOf<decltype(tag)> Element;
    Team::get().parallel_for(count, kChunkRows, [&](int64_t index) {
      const int64_t offset = index * head_dim;
      merge_parts(first + offset, first_lse[index], second + offset, second_lse[index], (Element*)output + offset,
                  head_dim);
    });
  });
}
