// Attention of a partition of one row: a few queries per KV head, so reading memory takes longest.
//
// A unit is the keys and values of sixteen tokens of one KV head. Units are read in the order in which a block
// stores them, one KV head after the other, and the unit kUnitsAhead units later is prefetched at the same time: long
// contiguous reads are faster, and small steps keep memory busy all the time.
#pragma once

#include "attention/attention_partition.h"

// How many units ahead to prefetch.
constexpr int kUnitsAhead = 2;

// Iterates over the units of a partition.
template <typename Stored>
class UnitIterator {
 public:
  UnitIterator(const Problem<Stored>& problem, const Partition& partition) : problem_(problem) { start(partition); }

  bool ended() const { return token_ >= end_; }
  int head() const { return head_; }
  int token() const { return token_; }
  // As the only group of a chunk.
  ChunkGroups<Stored> group() const {
    ChunkGroups<Stored> chunk;
    chunk.num_groups = 1;
    problem_.set_group(chunk, 0, stored_, offset_);
    return chunk;
  }

  void start(const Partition& partition) {
    const int64_t page_size = problem_.shape.page_size;
    num_heads_ = partition.num_kv_heads;
    token_ = partition.kv_begin;
    end_ = partition.kv_end;
    offset_ = token_ % page_size;
    block_ = problem_.part.block_table + partition.segment * problem_.part.table_stride + token_ / page_size;
    first_ = problem_.cache + partition.kv_head * problem_.head_size();
    find_block();
  }

  void advance() {
    if (++head_ < num_heads_) {
      stored_ += problem_.head_size();
      return;
    }
    token_ += kGroup;
    offset_ += kGroup;
    if (offset_ == problem_.shape.page_size) {
      offset_ = 0;
      ++block_;
    }
    if (!ended()) find_block();
  }

 private:
  void find_block() {
    head_ = 0;
    stored_ = first_ + problem_.stored_in(*block_) * problem_.shape.num_kv_heads * problem_.head_size();
  }

  const Problem<Stored>& problem_;
  const int32_t* block_;
  const Stored *first_, *stored_;  // of the partition's first KV head in block 0; of this head in this block
  int64_t offset_;
  int num_heads_, head_, token_, end_;
};

// Calls body(unit, ahead) for each unit of a partition, and what to prefetch meanwhile: a later unit of this or the
// next partition, or the unit itself.
template <typename Stored, typename Body>
static TOKA_INLINE void for_each_unit(const Problem<Stored>& problem, const Partition& partition,
                                      const Partition* next_partition, const Body& body) {
  UnitIterator<Stored> unit(problem, partition), ahead = unit;
  const auto advance_ahead = [&] {
    ahead.advance();
    if (ahead.ended() && next_partition != nullptr) {
      ahead.start(*next_partition);
      next_partition = nullptr;
    }
  };
  for (int i = 0; i < kUnitsAhead && !ahead.ended(); ++i) advance_ahead();
  for (; !unit.ended(); unit.advance()) {
    const ChunkGroups<Stored> stored = unit.group(), stored_ahead = ahead.ended() ? stored : ahead.group();
    if (!ahead.ended()) advance_ahead();
    body(unit, stored, stored_ahead);
  }
}

#if TOKA_INT8_DOT

// attend_row_of with an int8 cache.
template <int N>
static void attend_codes_of(const Problem<int8_t>& problem, const Partition& partition, const Partition* next_partition,
                            Scratch<int8_t>& scratch) {
  constexpr int kParts = N * kGroupVectors <= 3 ? 4 : N * kGroupVectors <= 6 ? 2 : 1;
  const int64_t head_dim = problem.shape.head_dim;
  const float scale = problem.scale();
  const int visible = problem.visible_to(partition.segment, partition.first_row);
  const int first_seen = problem.first_seen_by(partition.segment, partition.first_row);
  const int num_queries = problem.num_queries(partition);
  for (int query = 0; query < num_queries; ++query) {
    const int64_t from =
        problem.row_of(partition, query) * problem.query_row_stride + problem.head_of(partition, query) * head_dim;
    dispatch_activation_type(problem.activation_type, [&](auto tag) {
      scratch.coded[query].set((const TypeOf<decltype(tag)>*)problem.query + from, head_dim);
    });
  }
  reset_queries(num_queries, head_dim, scratch);
  for_each_unit(
      problem, partition, next_partition,
      [&](const UnitIterator<int8_t>& unit, const ChunkGroups<int8_t>& stored,
          const ChunkGroups<int8_t>& ahead) TOKA_LAMBDA {
        const int first = unit.head() * N;
        score_codes<N, kParts>(scratch.coded + first, stored.keys[0], ahead.keys[0], stored.scales[0], head_dim,
                               scratch.scores);
        __builtin_prefetch(ahead.scales[0], 0, 2);
        CodedWeights weights[N];
        for (int i = 0; i < N; ++i) {
          float* const own = scratch.scores + i * kChunk;
          problem.cap(own, kGroup);
          update_online_softmax<false>(scratch, first + i, own, first_seen - unit.token(),
                                       std::min(visible - unit.token(), kGroup), kGroup, scale, head_dim, own);
          weights[i].set(own, stored.scales[0] + kGroup);
        }
        add_weighted_codes<N>(weights, stored.values[0], ahead.values[0], head_dim, scratch.output + first * head_dim);
      });
}

#endif

// Attention of one row with N queries per KV head.
template <int N, typename Stored>
static void attend_row_of(const Problem<Stored>& problem, const Partition& partition, const Partition* next_partition,
                          Scratch<Stored>& scratch) {
#if TOKA_INT8_DOT
  if constexpr (kHasScales<Stored>) return attend_codes_of<N>(problem, partition, next_partition, scratch);
#endif
  constexpr int kSums = N * kGroupVectors, kParts = kSums <= 3 ? 4 : kSums <= 6 ? 2 : 1;
  typedef std::conditional_t<kHasScales<Stored>, Multiplied<Stored>, Stored> Numbers;
  const int64_t head_dim = problem.shape.head_dim, num_steps = head_dim / kPair<Numbers>;
  const float scale = problem.scale();
  const int visible = problem.visible_to(partition.segment, partition.first_row);
  const int first_seen = problem.first_seen_by(partition.segment, partition.first_row);
  load_queries(problem, partition, N, scratch);
  for_each_unit(problem, partition, next_partition,
                [&](const UnitIterator<Stored>& unit, const ChunkGroups<Stored>& stored,
                    const ChunkGroups<Stored>& stored_ahead) TOKA_LAMBDA {
                  ChunkGroups<Numbers> groups, next;
                  if constexpr (kHasScales<Stored>)
                    groups = next = widened(stored, stored_ahead, head_dim, scratch);
                  else
                    groups = stored, next = stored_ahead;
                  const int first = unit.head() * N;
                  score_groups<N, 1, kParts, Numbers>(scratch.query + first * head_dim, groups.keys, next.keys,
                                                      num_steps, scratch.scores);
                  for (int i = 0; i < N; ++i) {
                    float* const own = scratch.scores + i * kChunk;
                    if constexpr (kHasScales<Stored>) scale_scores(own, scratch.key_scales, kGroup);
                    problem.cap(own, kGroup);
                    update_online_softmax<kHasScales<Stored>>(scratch, first + i, own, first_seen - unit.token(),
                                                              std::min(visible - unit.token(), kGroup), kGroup, scale,
                                                              head_dim, scratch.weights + i * kChunk);
                  }
                  for (int i = 0; i < N; i += kValueQueries)
                    add_weighted_values<std::min(N, kValueQueries), Numbers>(
                        std::min(kValueQueries, N - i), scratch.output + (first + i) * head_dim,
                        scratch.weights + i * kChunk, groups, next, 1, head_dim);
                });
}

// Calls attend_row_of for the number of queries per KV head, which is at most N.
template <int N, typename Stored>
static void attend_row(const Problem<Stored>& problem, const Partition& partition, const Partition* next_partition,
                       Scratch<Stored>& scratch) {
  if (problem.group() == N) return attend_row_of<N>(problem, partition, next_partition, scratch);
  if constexpr (N > 1) attend_row<N - 1>(problem, partition, next_partition, scratch);
}

// Whether a single row is attended to by attend_row, which reads several KV heads in turn.
template <typename Stored>
static bool reads_rows_alone(const Problem<Stored>& problem) {
  // With fewer queries, tiles take longer; the codes of an int8 cache would be widened for them.
  constexpr int kMinTileGroup = kHasScales<Stored> ? 9 : 4;
  return problem.group() <= kScoreQueries && !(kUsesAmx<Stored> && problem.group() >= kMinTileGroup);
}

// One work item. next_partition: this thread's next work item, or null; its first tokens are prefetched. partial_output
// [queries][D] and partial_lse [queries] receive the result if the partition is not a whole tile.
template <typename Stored>
static void attend_partition(const Problem<Stored>& problem, const Partition& partition,
                             const Partition* next_partition, float* partial_output, float* partial_lse,
                             Scratch<Stored>& scratch) {
  if (partition.num_rows == 1 && reads_rows_alone(problem))
    attend_row<kScoreQueries>(problem, partition, next_partition, scratch);
  else
    attend_rows(problem, partition, next_partition, scratch);
  store_partition(problem, partition, partial_output, partial_lse, scratch);
}
