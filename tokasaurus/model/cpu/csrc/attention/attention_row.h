// Attention of a piece of one row: a few queries for each KV head. Reading memory takes longest: keys and values of sixteen
// tokens at a time, in the order in which they lie in a block, one KV head after the other, and what comes a few such units
// later is asked for meanwhile. Long runs of memory come faster, and small steps keep it busy all the time.
#pragma once

#include "attention/attention_partition.h"

// Units that are on their way.
constexpr int kUnitsAhead = 2;

// The units of a piece, one after the other.
template <typename Stored>
class UnitWalk {
 public:
  UnitWalk(const Problem<Stored>& problem, const Piece& piece) : problem_(problem) { start(piece); }

  bool ended() const { return token_ >= end_; }
  int head() const { return head_; }
  int token() const { return token_; }
  const Stored* keys() const { return keys_; }
  const Stored* values() const { return keys_ + problem_.head_size() / 2; }

  void start(const Piece& piece) {
    const int64_t page_size = problem_.shape.page_size;
    num_heads_ = piece.num_kv_heads;
    token_ = piece.kv_begin;
    end_ = piece.kv_end;
    offset_ = token_ % page_size;
    block_ = problem_.part.block_table + piece.segment * problem_.part.table_stride + token_ / page_size;
    first_ = problem_.cache + piece.kv_head * problem_.head_size();
    find_keys();
  }

  void advance() {
    if (++head_ < num_heads_) {
      keys_ += problem_.head_size();
      return;
    }
    token_ += kGroup;
    offset_ += kGroup;
    if (offset_ == problem_.shape.page_size) {
      offset_ = 0;
      ++block_;
    }
    if (!ended()) find_keys();
  }

 private:
  void find_keys() {
    head_ = 0;
    keys_ = first_ + *block_ * problem_.shape.num_kv_heads * problem_.head_size() + offset_ * problem_.shape.head_dim;
  }

  const Problem<Stored>& problem_;
  const int32_t* block_;
  const Stored *first_, *keys_;
  int64_t offset_;
  int num_heads_, head_, token_, end_;
};

// N queries for each KV head.
template <int N, typename Stored>
static void attend_row_of(const Problem<Stored>& problem, const Piece& piece, const Piece* next_partition,
                          Scratch<Stored>& scratch) {
  constexpr int kSums = N * kGroupVectors, kParts = kSums <= 3 ? 4 : kSums <= 6 ? 2 : 1;
  const int64_t head_dim = problem.shape.head_dim, num_steps = head_dim / kPair<Stored>;
  const float scale = problem.scale();
  const int visible = problem.visible_to(piece.segment, piece.first_row);
  load_queries(problem, piece, N, scratch);
  UnitWalk<Stored> unit(problem, piece), ahead = unit;
  const auto advance_ahead = [&] {
    ahead.advance();
    if (ahead.ended() && next_partition != nullptr) {
      ahead.start(*next_partition);
      next_partition = nullptr;
    }
  };
  for (int i = 0; i < kUnitsAhead && !ahead.ended(); ++i) advance_ahead();
  ChunkGroups<Stored> groups, next;
  groups.num_groups = 1;
  for (; !unit.ended(); unit.advance()) {
    groups.keys[0] = unit.keys();
    groups.values[0] = unit.values();
    next.keys[0] = ahead.ended() ? unit.keys() : ahead.keys();
    next.values[0] = ahead.ended() ? unit.keys() : ahead.values();
    if (!ahead.ended()) advance_ahead();
    const int first = unit.head() * N;
    score_groups<N, 1, kParts, Stored>(scratch.query + first * head_dim, groups.keys, next.keys, num_steps,
                                        scratch.scores);
    for (int i = 0; i < N; ++i)
      add_to_softmax(scratch, first + i, scratch.scores + i * kChunk, std::min(visible - unit.token(), kGroup), kGroup, scale,
             head_dim, scratch.weights + i * kChunk);
    for (int i = 0; i < N; i += kValueQueries)
      add_chunk<std::min(N, kValueQueries), Stored>(std::min(kValueQueries, N - i),
                                                     scratch.output + (first + i) * head_dim,
                                                     scratch.weights + i * kChunk, groups, next, 1, head_dim);
  }
}

// For up to N queries for each KV head.
template <int N, typename Stored>
static void attend_row(const Problem<Stored>& problem, const Piece& piece, const Piece* next_partition,
                       Scratch<Stored>& scratch) {
  if (problem.group() == N) return attend_row_of<N>(problem, piece, next_partition, scratch);
  if constexpr (N > 1) attend_row<N - 1>(problem, piece, next_partition, scratch);
}

// One piece of work. next_partition: what this thread does next, or null. partial_output [queries][D], partial_lse [queries]:
// where the result goes if the piece is not the whole tile.
template <typename Stored>
static void attend_partition(const Problem<Stored>& problem, const Piece& piece, const Piece* next_partition,
                         float* partial_output, float* partial_lse, Scratch<Stored>& scratch) {
  if (piece.num_rows == 1 && problem.group() <= kScoreQueries)
    attend_row<kScoreQueries>(problem, piece, next_partition, scratch);
  else
    attend_rows(problem, piece, next_partition, scratch);
  finish_partition(problem, piece, partial_output, partial_lse, scratch);
}
