// The parts of a forward put together: what attention/row_split.py does for backends that supply single parts.
// attention_layout.cpp.h has the definitions, which are compiled once for each type of cache.
#pragma once

#include "attention/attention_work.h"

// The cache, and where the tokens of a forward live in it: backend.PagedLayout.
struct PagedForward {
  int64_t cache_type;  // an ElementType
  void* cache;         // [layers][blocks]..., layers layer_size elements apart
  int64_t layer_size, page_size;
  const int64_t* kv_indices;
  const PagedPart* parts;
  int64_t num_parts;
  const PagedPart* prefix;  // null where no rows share one
};

// The attention of all rows of a forward, whose layers differ in the cache alone: part by part, and of rows in groups first
// to the prefixes, with which what they attend to by themselves is then merged.
template <typename Stored>
class LayoutAttention {
 public:
  // heads: rows of row_size elements, queries first. attended [rows, query heads, head_dim]. Both bfloat16, or float32.
  LayoutAttention(const PagedForward& forward, const Shape& shape, bool is_bfloat16, const void* heads, int64_t row_size,
                  void* attended);

  // Rows that lie in parts; those behind them are padding.
  int64_t num_rows() const { return num_rows_; }

  void run(int64_t layer);

 private:
  const PagedForward& forward_;
  int64_t num_rows_ = 0;
  std::vector<Problem<Stored>> problems_;  // the prefix first
  std::vector<Work> work_;
  std::vector<float> lse_, prefix_output_, prefix_lse_;
  Partial partial_;
};

// The attention of one part.
template <typename Stored>
void attend_part(const Problem<Stored>& problem);

extern template class LayoutAttention<float>;
extern template class LayoutAttention<bfloat16>;
extern template class LayoutAttention<float16>;
extern template void attend_part(const Problem<float>&);
extern template void attend_part(const Problem<bfloat16>&);
extern template void attend_part(const Problem<float16>&);
