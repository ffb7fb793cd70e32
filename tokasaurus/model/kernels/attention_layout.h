// The parts of a forward put together: what attention/row_split.py does for backends that supply single parts.
#pragma once

#include "attention_work.h"
#include "phases.h"

// The cache, and where the tokens of a forward live in it: backend.PagedLayout.
struct PagedForward {
  void* cache;  // [layers][blocks]..., layers layer_size elements apart
  int64_t layer_size, page_size;
  const int64_t* token_places;
  const PagedPart* parts;
  int64_t num_parts;
  const PagedPart* prefix;  // null where no rows share one
};

// The attention of all rows of a forward, whose layers differ in the cache alone: part by part, and of rows in groups first
// to the prefixes, with which what they attend to by themselves is then merged.
template <typename Element>
class LayoutAttention {
 public:
  // heads: rows of row_size elements, queries first. attended [rows, query heads, head_dim].
  LayoutAttention(const PagedForward& forward, const Shape& shape, const Element* heads, int64_t row_size, Element* attended)
      : forward_(forward) {
    const int64_t query_size = shape.num_heads * shape.head_dim;
    for (int64_t i = 0; i < forward.num_parts; ++i) num_rows_ += forward.parts[i].num_rows;
    lse_.resize(num_rows_ * shape.num_heads);
    const auto plan = [&](const PagedPart& part, void* output, float* lse) {
      problems_.push_back({shape, part, heads + part.first_row * row_size, row_size, output, lse, nullptr});
      work_.push_back(share_out(problems_.back()));
    };
    if (forward.prefix != nullptr) {
      prefix_output_.resize(forward.prefix->num_rows * query_size);
      prefix_lse_.resize(forward.prefix->num_rows * shape.num_heads);
      plan(*forward.prefix, prefix_output_.data(), prefix_lse_.data());
    }
    for (int64_t i = 0; i < forward.num_parts; ++i) {
      const PagedPart& part = forward.parts[i];
      plan(part, attended + part.first_row * query_size, lse_.data() + part.first_row * shape.num_heads);
    }
    if (forward.prefix != nullptr) {  // of the rows of the first part
      problems_[1].beside_output = prefix_output_.data();
      problems_[1].beside_lse = prefix_lse_.data();
    }
  }

  // Rows that lie in parts; those behind them are padding.
  int64_t num_rows() const { return num_rows_; }

  void run(int64_t layer) {
    for (size_t i = 0; i < problems_.size(); ++i) {
      const PhaseTimer timer(i == 0 && forward_.prefix != nullptr ? kPrefixAttention : kAttention);
      problems_[i].cache = (const Element*)forward_.cache + layer * forward_.layer_size;
      attend(problems_[i], work_[i], partial_);
    }
  }

 private:
  const PagedForward& forward_;
  int64_t num_rows_ = 0;
  std::vector<Problem<Element>> problems_;  // the prefix first
  std::vector<Work> work_;
  std::vector<float> lse_, prefix_output_, prefix_lse_;
  Partial partial_;
};
