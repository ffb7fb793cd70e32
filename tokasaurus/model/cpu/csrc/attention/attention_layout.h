// Attention over all parts of a forward, as attention/row_split.py computes it for backends that attend over one part
// at a time. The definitions are in attention_layout.cpp.h and are compiled once per cache type.
#pragma once

#include <map>

#include "attention/attention_work.h"

// The KV cache, and where a forward's tokens are stored in it. Filled by Python: structs.PagedForwardStruct,
// from backend.PagedLayout.
struct PagedForward {
  int64_t cache_type;  // an ElementType
  void* cache;         // [places of layers][blocks]..., places layer_size elements apart
  int64_t layer_size, page_size;
  const int64_t* kv_indices;
  const PagedPart* parts;
  int64_t num_parts;
  const PagedPart* prefix;    // null if no rows share a prefix
  const LayerScores* scores;  // [layers]
};

// Attention of all rows of a forward, planned once for each window that layers have, and run for each layer. It runs
// part by part. Rows in a prefix group attend to the shared prefix first; that result is then merged with attention
// over their own tokens.
template <typename Stored>
class LayoutAttention {
 public:
  // heads: rows of row_size elements, queries first. attended [rows, query heads, head_dim]. Both of activation_type.
  LayoutAttention(const PagedForward& forward, const Shape& shape, int64_t activation_type, const void* heads,
                  int64_t row_size, void* attended);

  // Rows that are in a part; later rows are padding.
  int64_t num_rows() const { return num_rows_; }

  void run(int64_t layer);

 private:
  const PagedForward& forward_;
  int64_t num_rows_ = 0;
  std::vector<Problem<Stored>> problems_;  // the prefix first, if there is one
  // By window: the work of each problem.
  std::map<int64_t, std::vector<Work>> work_;
  std::vector<float> lse_, prefix_output_, prefix_lse_;
  PartialResults partial_;
};

// Attention of one part.
template <typename Stored>
void attend_part(const Problem<Stored>& problem);

extern template class LayoutAttention<float>;
extern template class LayoutAttention<bfloat16>;
extern template class LayoutAttention<float16>;
extern template class LayoutAttention<int8_t>;
extern template void attend_part(const Problem<float>&);
extern template void attend_part(const Problem<bfloat16>&);
extern template void attend_part(const Problem<float16>&);
extern template void attend_part(const Problem<int8_t>&);
