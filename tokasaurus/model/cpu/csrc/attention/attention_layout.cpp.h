// Definitions for attention_layout.h.
#pragma once

#include "attention/attention_layout.h"
#include "simd/phases.h"

template <typename Stored>
LayoutAttention<Stored>::LayoutAttention(const PagedForward& forward, const Shape& shape, int64_t activation_type,
                                         const void* heads, int64_t row_size, void* attended)
    : forward_(forward) {
  const int64_t query_size = shape.num_heads * shape.head_dim;
  int64_t element_size = 0;
  dispatch_activation_type(activation_type, [&](auto tag) { element_size = sizeof(TypeOf<decltype(tag)>); });
  for (int64_t i = 0; i < forward.num_parts; ++i) num_rows_ += forward.parts[i].num_rows;
  lse_.resize(num_rows_ * shape.num_heads);
  const auto plan = [&](const PagedPart& part, void* output, float* lse) {
    const void* query = (const char*)heads + part.first_row * row_size * element_size;
    problems_.push_back({shape, part, activation_type, query, row_size, output, lse, nullptr});
  };
  if (forward.prefix != nullptr) {
    prefix_output_.resize(forward.prefix->num_rows * query_size);
    prefix_lse_.resize(forward.prefix->num_rows * shape.num_heads);
    plan(*forward.prefix, prefix_output_.data(), prefix_lse_.data());
  }
  for (int64_t i = 0; i < forward.num_parts; ++i) {
    const PagedPart& part = forward.parts[i];
    plan(part, (char*)attended + part.first_row * query_size * element_size,
         lse_.data() + part.first_row * shape.num_heads);
  }
  if (forward.prefix != nullptr) {  // only rows of the first part have a prefix
    problems_[1].other_output = prefix_output_.data();
    problems_[1].other_lse = prefix_lse_.data();
  }
}

template <typename Stored>
void LayoutAttention<Stored>::run(int64_t layer) {
  const LayerScores& scores = forward_.scores[layer];
  for (Problem<Stored>& problem : problems_) problem.scores = scores;
  if (forward_.prefix != nullptr) problems_[0].scores.sinks = nullptr;  // they count once
  std::vector<Work>& work = work_[scores.window];
  if (work.empty())
    for (const Problem<Stored>& problem : problems_) work.push_back(partition_work(problem));
  for (size_t i = 0; i < problems_.size(); ++i) {
    const PhaseTimer timer(i == 0 && forward_.prefix != nullptr ? kPrefixAttention : kAttention);
    problems_[i].cache = (const Stored*)forward_.cache + scores.place * forward_.layer_size;
    attend(problems_[i], work[i], partial_);
  }
}

template <typename Stored>
void attend_part(const Problem<Stored>& problem) {
  static PartialResults partial;
  attend(problem, partition_work(problem), partial);
}
