// Attention of one part of a forward, and of all of them, to one layer of the cache.

#include "attention_layout.h"
#include "element_type.h"

// Largest head size, and most query heads per KV head, that the kernels take. Head sizes are multiples of 16.
TOKA_EXPORT int64_t toka_max_head_dim() { return kMaxHeadDim; }
TOKA_EXPORT int64_t toka_max_group() { return kMaxGroup; }

// query: of activation_type, as is the output unless the part is partial.
TOKA_EXPORT void toka_attend(int64_t activation_type, int64_t cache_type, const void* query, int64_t query_row_stride,
                             void* output, float* lse, const void* cache, const PagedPart* part, int64_t num_heads,
                             int64_t num_kv_heads, int64_t head_dim, int64_t page_size) {
  const Shape shape{num_heads, num_kv_heads, head_dim, page_size};
  const bool is_bfloat16 = activation_type == kBfloat16;
  with_stored_type(cache_type, [&](auto* stored) {
    typedef Pointee<decltype(stored)> Stored;
    const Problem<Stored> problem{shape, *part, is_bfloat16, query, query_row_stride, output, lse, (const Stored*)cache};
    attend_part(problem);
  });
}

// query: rows of query_row_stride elements -> output [num_rows, H, D], 0 in rows that are in no part.
TOKA_EXPORT void toka_attend_layout(int64_t activation_type, const void* query, int64_t query_row_stride, void* output,
                                    const PagedForward* forward, int64_t layer, int64_t num_rows, int64_t num_heads,
                                    int64_t num_kv_heads, int64_t head_dim) {
  const Shape shape{num_heads, num_kv_heads, head_dim, forward->page_size};
  with_stored_type(forward->cache_type, [&](auto* stored) {
    typedef Pointee<decltype(stored)> Stored;
    with_activation_type(activation_type, [&](auto* element) {
      typedef Pointee<decltype(element)> Element;
      std::fill((Element*)output, (Element*)output + num_rows * num_heads * head_dim, Element{});
    });
    LayoutAttention<Stored>(*forward, shape, activation_type == kBfloat16, query, query_row_stride, output).run(layer);
  });
}
