// What adapters add to a gemm's outputs: the rows of x times the down matrices of their adapters, before the gemm, and
// these times the up matrices, panel by panel, before the epilogue.
#pragma once

#include <vector>

#include "gemm/amx_tile.h"
#include "gemm/gemm.h"
#include "simd/threads.h"

namespace {

// AMX multiplies whole panels only.
constexpr int64_t kRankMultiple = TOKA_AMX ? kPanel : kLanes;

// sums [M][kPanel] += M rows of x times a panel of `count` ranks. second: elements of x from the ranks of the first
// half of the outputs to those of the second.
template <int M, bool kAreAlike, typename Weight>
TOKA_NOINLINE void add_ranks(const Activation<Weight>* x, int64_t x_stride, int64_t second, const Weight* panel,
                             int64_t count, float* sums) {
  constexpr int P = kPair<Weight>, kHalf = kPanelVectors / 2;
  RowPointers<M, Activation<Weight>> rows(x, x_stride);
  Floats total[M][kPanelVectors];
  repeat<M>([&](auto i) TOKA_LAMBDA {
    repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA { total[i][v] = load(sums + i * kPanel + v * kLanes); });
  });
#pragma GCC unroll 1
  for (const Weight* const end = panel + count * kPanel; panel < end; panel += kPanel * P) {
    Operand<Weight> weights[kPanelVectors];
    repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA { weights[v] = load_operand(panel + v * kLanes * P); });
    repeat<M>([&](auto i) TOKA_LAMBDA {
      const auto first = broadcast_operand<Weight>(rows.row(i));
      const auto other = kAreAlike ? first : broadcast_operand<Weight>(rows.row(i) + second);
      repeat<kPanelVectors>(
          [&](auto v) TOKA_LAMBDA { total[i][v] = multiply_add(total[i][v], v < kHalf ? first : other, weights[v]); });
    });
    rows.advance(P);
  }
  repeat<M>([&](auto i) TOKA_LAMBDA {
    repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA { store(sums + i * kPanel + v * kLanes, total[i][v]); });
  });
}

// add_ranks for 1 to kTileRows rows, a number known at run time.
template <typename Weight, int M = kTileRows>
void add_ranks_of_rows(int num_rows, const Activation<Weight>* x, int64_t x_stride, int64_t second, const Weight* panel,
                       int64_t count, float* sums) {
  if (num_rows == M) {
    if (second == 0) return add_ranks<M, true>(x, x_stride, 0, panel, count, sums);
    return add_ranks<M, false>(x, x_stride, second, panel, count, sums);
  }
  if constexpr (M > 1) add_ranks_of_rows<Weight, M - 1>(num_rows, x, x_stride, second, panel, count, sums);
}

// sums [end - begin][kPanel] += what the adapters of these rows add to a panel's outputs.
template <typename Weight>
void add_low_rank(const Gemm<Weight>& gemm, int64_t panel, int64_t begin, int64_t end, float* sums) {
  if (gemm.inner == nullptr) return;
  const int32_t* const numbers = gemm.adapters.of_rows;
  for (int64_t row = begin, next; row < end; row = next) {
    for (next = row + 1; next < end && next < row + kTileRows && numbers[next] == numbers[row];) ++next;
    const LowRank& own = gemm.adapters.table[numbers[row]];
    if (own.up == nullptr) continue;
    const LowRankPanel& ranks = own.panels[panel];
    add_ranks_of_rows(int(next - row), gemm.inner + row * gemm.inner_size + ranks.first[0], gemm.inner_size,
                      ranks.first[1] - ranks.first[0], (const Weight*)own.up + ranks.offset, ranks.count,
                      sums + (row - begin) * kPanel);
  }
}

// Begins to load what add_low_rank reads of a panel, for these rows.
template <typename Weight>
void prefetch_low_rank(const Gemm<Weight>& gemm, int64_t panel, int64_t begin, int64_t end) {
  const int32_t* const numbers = gemm.adapters.of_rows;
  for (int64_t row = begin; row < end; ++row) {
    if (row > begin && numbers[row] == numbers[row - 1]) continue;
    const LowRank& own = gemm.adapters.table[numbers[row]];
    if (own.up == nullptr) continue;
    const char* const up = (const char*)((const Weight*)own.up + own.panels[panel].offset);
    const int64_t num_bytes = own.panels[panel].count * kPanel * int64_t(sizeof(Weight));
    for (int64_t byte = 0; byte < num_bytes; byte += kCacheLineBytes) __builtin_prefetch(up + byte, 0, 2);
  }
}

// Adjacent rows with one adapter.
struct AdapterRows {
  const LowRank* adapter;
  int64_t first, count;
};

std::vector<AdapterRows>& adapter_rows() {
  static std::vector<AdapterRows> memory;
  return memory;
}

// Memory for rows times down matrices.
template <typename Element>
ScratchMemory<Element>& inner_scratch() {
  static ScratchMemory<Element> memory;
  return memory;
}

// Some of the ranks of an adapter, for some of its rows: a panel of them, or a vector.
struct DownItem {
  AdapterRows rows;
  int64_t first;  // -1: none

  template <typename Weight>
  const Weight* weights(int64_t in_size) const {
    return first < 0 ? nullptr : (const Weight*)rows.adapter->down + first * in_size;
  }
};

// The rows' products with the item's ranks -> the same ranks of inner [num_rows, inner_size]. next: what is multiplied
// after it, or null.
template <typename Weight>
void multiply_down(const Gemm<Weight>& gemm, const DownItem& item, const Weight* next, Activation<Weight>* inner) {
  typedef Activation<Weight> Element;
  const AdapterRows& rows = item.rows;
  const int64_t in_size = gemm.weights.in_size;
  const Element* const x = gemm.x + rows.first * gemm.x_stride;
  const bool is_whole = item.first + kPanel <= rows.adapter->num_ranks;
  const int64_t count = is_whole ? kPanel : kLanes;
  const Prefetches prefetches{(const char*)next, next == nullptr ? 0 : count * kPair<Weight> * int64_t(sizeof(Weight))};
  alignas(64) float sums[Tiles<Weight>::kRows * kPanel] = {};
  if (is_whole) {
    Tiles<Weight> tiles;
    tiles.multiply(int(rows.count), XRows<Element>{x, gemm.x_stride, nullptr}, item.weights<Weight>(in_size), in_size,
                   prefetches, sums);
  } else {
    for (int64_t row = 0; row < rows.count; row += kTileRows)
      multiply_rows<1>(int(std::min<int64_t>(kTileRows, rows.count - row)), x + row * gemm.x_stride, gemm.x_stride,
                       item.weights<Weight>(in_size), in_size, prefetches, sums + row * kLanes);
  }
  for (int64_t row = 0; row < rows.count; ++row)
    for (int64_t i = 0; i < count; i += kLanes)
      store(inner + (rows.first + row) * gemm.inner_size + item.first + i, load(sums + row * count + i));
}

// Sets what add_low_rank reads. gemm.x: normalized. Each sum adds in the order of x, so that a row's result does not
// depend on the others.
template <typename Weight>
void multiply_down(Gemm<Weight>& gemm) {
  typedef Activation<Weight> Element;
  std::vector<AdapterRows>& runs = adapter_rows();
  runs.clear();
  int64_t num_ranks = 0, parts = 0;
  for (int64_t row = 0; row < gemm.num_rows; ++row) {
    const LowRank* const adapter = gemm.adapters.table + gemm.adapters.of_rows[row];
    if (adapter->up == nullptr) continue;
    num_ranks = std::max(num_ranks, adapter->num_ranks);
    parts = std::max(parts, adapter->num_ranks / kPanel + adapter->num_ranks % kPanel / kLanes);
    if (!runs.empty()) {
      AdapterRows& last = runs.back();
      if (last.adapter == adapter && last.first + last.count == row && last.count < Tiles<Weight>::kRows) {
        ++last.count;
        continue;
      }
    }
    runs.push_back({adapter, row, 1});
  }
  if (num_ranks == 0) return;
  Element* const inner = scratch(inner_scratch<Element>(), gemm.num_rows * num_ranks);
  gemm.inner = inner;
  gemm.inner_size = num_ranks;
  const int64_t num_items = int64_t(runs.size()) * parts, in_size = gemm.weights.in_size;
  const auto item_at = [&](int64_t index) {
    const AdapterRows& rows = runs[index / parts];
    const int64_t own = rows.adapter->num_ranks / kPanel, part = index % parts;
    const int64_t first = part < own ? part * kPanel : own * kPanel + (part - own) * kLanes;
    return DownItem{rows, first < rows.adapter->num_ranks ? first : -1};
  };
  Team::get().parallel_for_ranges(num_items, [&](int64_t index) {
    const DownItem item = item_at(index);
    if (item.first < 0) return;
    const Weight* const next =
        index + 1 < num_items ? item_at(index + 1).template weights<Weight>(in_size) : (const Weight*)nullptr;
    multiply_down(gemm, item, next, inner);
  });
}

}  // namespace
