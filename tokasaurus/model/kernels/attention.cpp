// Attention of one part of a forward, for callers that put parts together themselves.

#include "attention_work.h"

namespace {

template <typename Element>
void attend(const Problem<Element>& problem) {
  static Partial partial;
  attend(problem, share_out(problem), partial);
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
}
