// The gemm microkernel for AMX: up to 32 rows of bfloat16 times a panel of 32 outputs, whose layout is that of AMX's
// second factor.
#pragma once

#include <algorithm>
#include <cstring>

#include "gemm/gemm_tile.h"
#include "simd/amx.h"

// Rows of x, up to a tile of them, from one of their inputs on.
template <typename Element>
struct XRows {
  const Element* first;
  int64_t stride;  // from row to row
  // AMX: the same inputs as [in / 32][AmxTiles::kRows][32], or null. Read so, rows whose stride is a whole number of
  // pages do not take each other's places in the caches.
  const Element* tile;
};

#if TOKA_AMX

class AmxTiles {
 public:
  static constexpr int kRows = 2 * kAmxRows;
  static constexpr bool kAreTiled = true;  // rows of x may be in tiles too
  static constexpr bool kAreEven = false;  // changing the shapes would take longer

  // As multiply_rows, for 1 to kRows rows. Each sum adds in the order of the inputs, 32 at a time, whatever the number
  // of rows.
  void multiply(int num_rows, XRows<bfloat16> x, const bfloat16* panel, int64_t in_size, Prefetches prefetches,
                float* sums) {
    static_assert(kPanel * sizeof(float) == 2 * kAmxRowBytes);
    const int64_t whole = in_size / kInputs * kInputs;
    if (whole > 0) {
      shapes_.set(num_rows, kAmxRowBytes);
      if (num_rows > kAmxRows)
        add_inputs<true>(x, panel, whole, prefetches, sums);
      else
        add_inputs<false>(x, panel, whole, prefetches, sums);
    }
    for (int row = 0; whole < in_size && row < num_rows; row += kTileRows)
      multiply_rows(std::min(kTileRows, num_rows - row), x.first + row * x.stride + whole, x.stride,
                    panel + whole * kPanel, in_size - whole, Prefetches{}, sums + row * kPanel);
  }

  // As multiply_scaled_rows, for 1 to kRows rows.
  void multiply_scaled(int num_rows, XRows<bfloat16> x, const bfloat16* codes, int64_t in_size, Scales scales,
                       float* sums) {
    const int depth = int(std::min<int64_t>(kInputs, scales.inputs));
    const int64_t whole = in_size / depth * depth;
    if (whole > 0) {
      shapes_.set(num_rows, depth * int(sizeof(bfloat16)));
      if (num_rows > kAmxRows)
        add_scaled<true>(num_rows, x, codes, depth, whole, scales, sums);
      else
        add_scaled<false>(num_rows, x, codes, depth, whole, scales, sums);
    }
    if (whole == in_size) return;
    scales.first += whole / scales.inputs * scales.step;
    for (int row = 0; row < num_rows; row += kTileRows)
      multiply_scaled_rows(std::min(kTileRows, num_rows - row), x.first + row * x.stride + whole, x.stride,
                           codes + whole * kPanel, in_size - whole, scales, sums + row * kPanel);
  }

  // Of one row of x, a number of inputs that kInputs divides -> row `row` of a tile, as XRows has it.
  static void tile_row(const bfloat16* x, int64_t in_size, int64_t row, bfloat16* tile) {
    for (int64_t in = 0; in < in_size; in += kInputs)
      std::memcpy(tile + in * kRows + row * kInputs, x + in, kInputs * sizeof(bfloat16));
  }

 private:
  static constexpr int kInputs = 32;  // of a tile of x

  // Where the tiles' rows are: in XRows' tiles, or in its rows.
  struct Places {
    const bfloat16* first;
    int64_t stride;  // from row to row
    int64_t step;    // from kInputs inputs to the next

    explicit Places(XRows<bfloat16> x)
        : first(x.tile == nullptr ? x.first : x.tile),
          stride(x.tile == nullptr ? x.stride : kInputs),
          step(x.tile == nullptr ? kInputs : kInputs * kRows) {}
    TOKA_INLINE const bfloat16* at(int64_t in) const { return first + in / kInputs * step + in % kInputs; }
  };
  static constexpr int64_t kSumsBytes = kPanel * sizeof(float), kPanelBytes = kPanel * 2 * sizeof(bfloat16);

  template <bool kHasSecond>
  static TOKA_INLINE void load_sums(const float* sums) {
    _tile_loadd(0, sums, kSumsBytes);
    _tile_loadd(1, sums + kAmxRows, kSumsBytes);
    if (!kHasSecond) return;
    _tile_loadd(2, sums + kAmxRows * kPanel, kSumsBytes);
    _tile_loadd(3, sums + kAmxRows * kPanel + kAmxRows, kSumsBytes);
  }

  // As from memory: after _tile_zero, the next product was measured to wait for the one before it.
  template <bool kHasSecond>
  static TOKA_INLINE void clear_sums() {
    alignas(64) static const float zeros[kAmxRows] = {};
    _tile_loadd(0, zeros, 0);
    _tile_loadd(1, zeros, 0);
    if (!kHasSecond) return;
    _tile_loadd(2, zeros, 0);
    _tile_loadd(3, zeros, 0);
  }

  template <bool kHasSecond>
  static TOKA_INLINE void store_sums(float* sums) {
    _tile_stored(0, sums, kSumsBytes);
    _tile_stored(1, sums + kAmxRows, kSumsBytes);
    if (!kHasSecond) return;
    _tile_stored(2, sums + kAmxRows * kPanel, kSumsBytes);
    _tile_stored(3, sums + kAmxRows * kPanel + kAmxRows, kSumsBytes);
  }

  // The tiles += kInputs of x times the panel, which stays in the first-level cache: x must not replace it there.
  template <bool kHasSecond>
  static TOKA_INLINE void add_products(const bfloat16* x, int64_t stride, const bfloat16* panel) {
    const int64_t x_bytes = stride * sizeof(bfloat16);
    _tile_loadd(6, panel, kPanelBytes);
    _tile_loadd(7, panel + kPanel, kPanelBytes);
    _tile_stream_loadd(4, x, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (!kHasSecond) return;
    _tile_stream_loadd(5, x + kAmxRows * stride, x_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }

  template <bool kHasSecond>
  static void add_inputs(XRows<bfloat16> x, const bfloat16* panel, int64_t in_size, Prefetches prefetches,
                         float* sums) {
    const Places places(x);
    const int64_t step = prefetches.step * kInputs / 2;
    finish_stores();
    load_sums<kHasSecond>(sums);
    for (int64_t in = 0; in < in_size; in += kInputs, prefetches.next += step) {
      for (int64_t i = 0; i < step; i += kCacheLineBytes) __builtin_prefetch(prefetches.next + i, 0, 2);
      add_products<kHasSecond>(places.at(in), places.stride, panel + in * kPanel);
    }
    store_sums<kHasSecond>(sums);
  }

  // depth: of the tiles; it divides in_size and the inputs of a scale.
  template <bool kHasSecond>
  static void add_scaled(int num_rows, XRows<bfloat16> x, const bfloat16* codes, int depth, int64_t in_size,
                         Scales scales, float* sums) {
    const Places places(x);
    // Of two groups in turn: numbers that tiles have just stored are not read at once.
    alignas(64) float products[2][kRows * kPanel];
    const auto add = [&](const float* own, const float* scale) TOKA_LAMBDA {
      const Floats first = load(scale), second = load(scale + kLanes);
      for (int i = 0; i < num_rows * kPanel; i += kPanel) {
        store(sums + i, load(sums + i) + load(own + i) * first);
        store(sums + i + kLanes, load(sums + i + kLanes) + load(own + i + kLanes) * second);
      }
    };
    finish_stores();
    int turn = 0;
    const float* scale = scales.first;
    for (int64_t in = 0; in < in_size; scale += scales.step, turn ^= 1) {
      clear_sums<kHasSecond>();
      const int64_t start = in;
      for (const int64_t end = std::min(in + scales.inputs, in_size); in < end; in += depth)
        add_products<kHasSecond>(places.at(in), places.stride, codes + in * kPanel);
      if (start > 0) add(products[turn ^ 1], scale - scales.step);
      store_sums<kHasSecond>(products[turn]);
    }
    add(products[turn ^ 1], scale - scales.step);
  }

  AmxShapes shapes_;
};

#endif

// The microkernel for all other instruction sets and types.
struct VectorTiles {
  static constexpr int kRows = kTileRows;
  static constexpr bool kAreTiled = false;
  // Whether rows are divided evenly among tiles. A tile of fewer than four rows takes as long as one of four, because
  // each sum waits for its previous addition.
  static constexpr bool kAreEven = true;

  template <typename Weight>
  void multiply(int num_rows, XRows<Activation<Weight>> x, const Weight* panel, int64_t in_size, Prefetches prefetches,
                float* sums) {
    multiply_rows(num_rows, x.first, x.stride, panel, in_size, prefetches, sums);
  }

  template <typename Weight>
  void multiply_scaled(int num_rows, XRows<Activation<Weight>> x, const Weight* codes, int64_t in_size, Scales scales,
                       float* sums) {
    multiply_scaled_rows(num_rows, x.first, x.stride, codes, in_size, scales, sums);
  }
};

#if TOKA_AMX
template <typename Weight>
using Tiles = std::conditional_t<std::is_same_v<Weight, bfloat16>, AmxTiles, VectorTiles>;
#else
template <typename Weight>
using Tiles = VectorTiles;
#endif
