// Attention of one part of a forward, and of all of them, to one layer of the cache.

#include "attention_layout.h"

namespace {

template <typename Element>
void attend(const Problem<Element>& problem) {
  static Partial partial;
  attend(problem, share_out(problem), partial);
}

// query: rows of row_size elements -> output [num_rows, H, D], 0 in rows that are in no part.
template <typename Element>
void attend_layout(const Element* query, int64_t row_size, Element* output, const PagedForward& forward, int64_t layer,
                   int64_t num_rows, const Shape& shape) {
  std::fill(output, output + num_rows * shape.num_heads * shape.head_dim, Element{});
  LayoutAttention<Element>(forward, shape, query, row_size, output).run(layer);
}

}  // namespace

extern "C" {

// Largest head size, and most query heads per KV head, that the kernels take. Head sizes are multiples of 16.
int64_t toka_max_head_dim() { return kMaxHeadDim; }
int64_t toka_max_group() { return kMaxGroup; }

void toka_attend(int64_t is_bfloat16, const void* query, int64_t query_row_stride, void* output, float* lse,
                 const void* cache, const PagedPart* part, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                 int64_t page_size) {
  const Shape shape{num_heads, num_kv_heads, head_dim, page_size};
  if (is_bfloat16)
    attend(Problem<bfloat16>{shape, *part, (const bfloat16*)query, query_row_stride, output, lse, (const bfloat16*)cache});
  else
    attend(Problem<float>{shape, *part, (const float*)query, query_row_stride, output, lse, (const float*)cache});
}

void toka_attend_layout(int64_t is_bfloat16, const void* query, int64_t query_row_stride, void* output,
                        const PagedForward* forward, int64_t layer, int64_t num_rows, int64_t num_heads,
                        int64_t num_kv_heads, int64_t head_dim) {
  const Shape shape{num_heads, num_kv_heads, head_dim, forward->page_size};
  if (is_bfloat16)
    attend_layout((const bfloat16*)query, query_row_stride, (bfloat16*)output, *forward, layer, num_rows, shape);
  else
    attend_layout((const float*)query, query_row_stride, (float*)output, *forward, layer, num_rows, shape);
}
}
