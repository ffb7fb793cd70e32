// Products of any number of rows by packed weights, with a norm before, and a bias, gate or sum behind.
#pragma once

#include <algorithm>
#include <vector>

#include "phases.h"
#include "rounding.h"
#include "threads.h"
#include "tiles.h"

// Weights as layer_kernels.PackedWeights holds them. panels: see tiles.h; padded by outputs of zeros to whole panels.
// is_gated: a panel holds the gates of 16 outputs, then their ups, and out_size counts the outputs.
// bias: [panels * 32] in the order of the panels, or null.
struct PackedWeights {
  int64_t is_bfloat16, in_size, out_size, is_gated;
  const void* panels;
  const void* bias;
};

// A panel streams through for one tile of rows: far enough ahead that memory answers in time.
constexpr int64_t kStreamAheadBytes = 8192;

// Rows of x that pass while a panel is kept: as many as stay in the last-level cache until the next panel.
constexpr int64_t kBlockBytes = 4 << 20;

// Rows that one thread norms at a time: fewer are done before another thread has come.
constexpr int64_t kNormRows = 32;

template <typename Element>
struct Product {
  const PackedWeights& weights;
  const Element* x;  // [num_rows, in_size], rows x_stride elements apart
  int64_t x_stride, num_rows;
  const Element* residual;  // [num_rows, out_size], or null
  Element* out;             // [num_rows, out_size]; may be the residual
};

// gate * sigmoid(gate) * up, each step rounded as it would be if it were stored.
template <typename Element>
inline f32x16 gated(f32x16 gate, f32x16 up) {
  gate = rounded<Element>(gate);
  const f32x16 small = exp_nonpositive(gate > 0.0f ? -gate : gate);  // e^-|gate|
  const f32x16 sigmoid = (gate > 0.0f ? splat(1.0f) : small) / (1.0f + small);
  return rounded<Element>(gate * sigmoid) * rounded<Element>(up);
}

template <typename Element>
inline f32x16 load_some(const Element* from, int64_t count) {
  if (count >= 16) return load16(from);
  f32x16 x = {};
  for (int64_t lane = 0; lane < count; ++lane) x[lane] = to_float(from[lane]);
  return x;
}

template <typename Element>
inline void store_some(Element* to, f32x16 x, int64_t count) {
  if (count >= 16) return store_rounded(to, x);
  for (int64_t lane = 0; lane < count; ++lane) from_float(to + lane, x[lane]);
}

// One row's sums of one panel to its place in `out`.
template <typename Element>
inline void finish(const Product<Element>& product, int64_t row, int64_t panel, const f32x16* sums) {
  const PackedWeights& weights = product.weights;
  f32x16 total[2] = {sums[0], sums[1]};
  if (weights.bias != nullptr)
    for (int half = 0; half < 2; ++half)
      total[half] += load16((const Element*)weights.bias + panel * kPanel + 16 * half);
  const int64_t width = weights.is_gated ? 16 : 32;
  const int64_t place = row * weights.out_size + panel * width;
  const int64_t count = std::min(width, weights.out_size - panel * width);
  if (weights.is_gated) return store_some(product.out + place, gated<Element>(total[0], total[1]), count);
  for (int64_t first = 0; first < count; first += 16) {
    f32x16 value = total[first / 16];
    if (product.residual != nullptr)
      value = rounded<Element>(value) + load_some(product.residual + place + first, count - first);
    store_some(product.out + place + first, value, count - first);
  }
}

template <typename Element>
void multiply_panel(const Product<Element>& product, int64_t panel, int64_t first_row, int64_t end_row) {
  const int64_t in_size = product.weights.in_size;
  const Element* weights = (const Element*)product.weights.panels + panel * in_size * kPanel;
  const int64_t num_rows = end_row - first_row;
  const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  f32x16 sums[kTileRows][2];
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    // With many tiles, the first one asks for the whole next panel, and the others have time to wait for it.
    const int64_t ahead = num_tiles == 1 ? kStreamAheadBytes : tile == 0 ? in_size * kPanel * sizeof(Element) : 0;
    const int64_t begin = first_row + num_rows * tile / num_tiles;
    const int64_t end = first_row + num_rows * (tile + 1) / num_tiles;
    multiply_rows(int(end - begin), product.x + begin * product.x_stride, product.x_stride, weights, in_size, ahead,
                  sums);
    for (int64_t row = begin; row < end; ++row) finish(product, row, panel, sums[row - begin]);
  }
}

template <typename Element>
Element* scratch(std::vector<Element>& memory, int64_t size) {
  if (int64_t(memory.size()) < size) memory.resize(size);
  return memory.data();
}

// norm_weight: of a norm that x passes first, or null.
template <typename Element>
void multiply(const Product<Element>& product, const void* norm_weight, double eps) {
  const PackedWeights& weights = product.weights;
  const int64_t in_size = weights.in_size, num_rows = product.num_rows;
  if (num_rows == 0) return;
  const PhaseTimer timer(kProducts);
  const int64_t width = weights.is_gated ? 16 : 32;
  const int64_t num_panels = (weights.out_size + width - 1) / width;
  const int64_t num_threads = Team::size();
  // Smaller blocks where there would be too few items for all threads to end at the same time.
  const int64_t wanted_blocks = (4 * num_threads + num_panels - 1) / num_panels;
  const int64_t cached_rows = kBlockBytes / int64_t(in_size * sizeof(Element));
  const int64_t block_rows =
      std::max<int64_t>(kTileRows, std::min(cached_rows, (num_rows + wanted_blocks - 1) / wanted_blocks));
  const int64_t num_items = (num_rows + block_rows - 1) / block_rows * num_panels;
  const int64_t chunk = std::max<int64_t>(1, num_items / (16 * num_threads));

  Product<Element> normed = product;
  if (norm_weight != nullptr) {
    static std::vector<Element> memory;
    Element* rows = scratch(memory, num_rows * in_size);
    Team::get().share(num_rows, kNormRows, [&](int64_t row) {
      rms_norm(product.x + row * product.x_stride, (const Element*)norm_weight, float(eps), in_size, rows + row * in_size);
    });
    normed.x = rows;
    normed.x_stride = in_size;
  }
  Team::get().share(num_items, chunk, [&](int64_t item) {
    const int64_t first = item / num_panels * block_rows;
    multiply_panel(normed, item % num_panels, first, std::min(first + block_rows, num_rows));
  });
}
