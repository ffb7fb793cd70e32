// Packs weights, multiplies by them (gemm), and reads token embeddings from them.

#include "gemm/gemm.h"

#include <algorithm>

#include "gemm/rms_norm.h"
#include "simd/element_type.h"
#include "simd/phases.h"
#include "simd/simd_math.h"
#include "simd/threads.h"

namespace {

// Prefetch distance if a panel is read for a single tile: far enough to cover the memory's latency.
constexpr int64_t kStreamAheadBytes = 8192;

// With several tiles, each of the first kMaxPrefetchingTiles prefetches an equal part of the next panel: a single tile
// would wait for its prefetches.
constexpr int64_t kMaxPrefetchingTiles = 8;

// Bytes of x that are multiplied by a panel while the panel is in the cache. So many bytes of x stay in the last-level
// cache until the next panel.
constexpr int64_t kRowBlockBytes = 4 << 20;

// Rows that a thread claims at a time for the norm. Fewer rows take less time than waking another thread.
constexpr int64_t kNormRows = 32;

// SwiGLU: gate * sigmoid(gate) * up. Each intermediate result is rounded as if it were stored as an Element.
template <typename Element>
static TOKA_INLINE Floats swiglu(Floats gate, Floats up) {
  gate = rounded<Element>(gate);
  const Floats small = exp_nonpositive(gate > 0.0f ? -gate : gate);  // e^-|gate|
  const Floats sigmoid = (gate > 0.0f ? broadcast(1.0f) : small) / (1.0f + small);
  return rounded<Element>(gate * sigmoid) * rounded<Element>(up);
}

// Applies bias, gate and residual to one row's sums [kPanel] of one panel and stores the result.
template <typename Weight>
inline void epilogue(const Gemm<Weight>& gemm, int64_t row, int64_t panel, float* sums) {
  typedef Activation<Weight> Element;
  const PackedWeights& weights = gemm.weights;
  const int64_t width = weights.panel_width(), first = row * weights.out_size + panel * width;
  const int64_t count = std::min(width, weights.out_size - panel * width);
  if (weights.bias != nullptr)
    for (int i = 0; i < kPanel; i += kLanes) store(sums + i, load(sums + i) + load(weights.bias + panel * kPanel + i));
  if (weights.is_gated)
    for (int i = 0; i < kPanel / 2; i += kLanes)
      store(sums + i, swiglu<Element>(load(sums + i), load(sums + kPanel / 2 + i)));
  Element* const out = gemm.out + first;
  const Element* const residual = gemm.residual == nullptr ? nullptr : gemm.residual + first;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Floats value = load(sums + i);
    if (residual != nullptr) value = rounded<Element>(value) + load(residual + i);
    store(out + i, value);
  }
  for (; i < count; ++i)
    from_float(out + i, residual == nullptr ? sums[i] : rounded<Element>(sums[i]) + to_float(residual[i]));
}

// Multiplies the rows [first_row, end_row) by one panel, tile by tile. panel_weights: the panel as stored, or widened.
template <typename Weight, typename Widened>
void multiply_tiles(const Gemm<Weight>& gemm, int64_t panel, const Widened* panel_weights, int64_t first_row,
                    int64_t end_row) {
  const int64_t in_size = gemm.weights.in_size, num_rows = end_row - first_row;
  const int64_t panel_bytes = in_size * kPanel * sizeof(Weight);
  const char* const own = (const char*)gemm.weights.panels + panel * panel_bytes;
  const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  const int64_t num_prefetching = std::min(num_tiles, kMaxPrefetchingTiles);
  alignas(64) float sums[kTileRows * kPanel];
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    Prefetches prefetches{own + kStreamAheadBytes, int64_t(kPanel * kPair<Weight> * sizeof(Weight))};
    if (num_tiles > 1) {
      prefetches.next = own + panel_bytes + panel_bytes * tile / num_prefetching;
      prefetches.step = tile < num_prefetching ? prefetches.step / num_prefetching : 0;
    }
    // Rows are divided evenly among the tiles: a tile of fewer than four rows takes as long as one of four, because
    // each sum waits for its previous addition.
    const int64_t begin = first_row + num_rows * tile / num_tiles, end = first_row + num_rows * (tile + 1) / num_tiles;
    multiply_rows(int(end - begin), gemm.x + begin * gemm.x_stride, gemm.x_stride, panel_weights, in_size, prefetches,
                  sums);
    for (int64_t row = begin; row < end; ++row) epilogue(gemm, row, panel, sums + (row - begin) * kPanel);
  }
}

// From this many tiles on, widening a panel once costs less than widening it for each tile.
constexpr int64_t kMinTilesToWiden = 12;

template <typename Weight>
void multiply_panel(const Gemm<Weight>& gemm, int64_t panel, int64_t first_row, int64_t end_row) {
  const int64_t panel_size = gemm.weights.in_size * kPanel;
  const Weight* weights = (const Weight*)gemm.weights.panels + panel * panel_size;
  if constexpr (std::is_same_v<Activation<Weight>, float> && !std::is_same_v<Weight, float>) {
    if (end_row - first_row > (kMinTilesToWiden - 1) * kTileRows) {
      static thread_local std::vector<float> widened;
      float* to = scratch(widened, panel_size);
      for (int64_t i = 0; i < panel_size; i += kLanes) store(to + i, load(weights + i));
      return multiply_tiles(gemm, panel, to, first_row, end_row);
    }
  }
  multiply_tiles(gemm, panel, weights, first_row, end_row);
}

// Memory for the normalized rows of x.
template <typename Element>
std::vector<Element>& norm_scratch() {
  static std::vector<Element> memory;
  return memory;
}

// The row of the unpacked weights [rows, in_size] that is output `output` of panel `panel`, or -1 for padding.
int64_t unpacked_row(const PackedWeights& weights, int64_t panel, int64_t output) {
  const int64_t width = weights.panel_width(), index = panel * width + output % width;
  if (index >= weights.out_size) return -1;
  return output / width * weights.out_size + index;
}

template <typename Weight>
void pack(const PackedWeights& weights, const Weight* unpacked, Weight* panels) {
  constexpr int64_t P = kPair<Weight>;
  const int64_t in_size = weights.in_size;
  Team::get().parallel_for(weights.num_panels(), 1, [&](int64_t panel) {
    for (int64_t output = 0; output < kPanel; ++output) {
      Weight* to = panels + panel * in_size * kPanel + output * P;
      const int64_t row = unpacked_row(weights, panel, output);
      for (int64_t i = 0; i < in_size; i += P, to += kPanel * P)
        for (int64_t j = 0; j < P; ++j) to[j] = row < 0 ? Weight{} : unpacked[row * in_size + i + j];
    }
  });
}

template <typename Weight>
void embed(const PackedWeights& weights, const int64_t* token_ids, int64_t num_tokens, Activation<Weight>* out) {
  constexpr int64_t kTokens = 16;  // a thread claims so many at a time
  constexpr int64_t P = kPair<Weight>;
  const int64_t in_size = weights.in_size;
  Team::get().parallel_for(num_tokens, kTokens, [&](int64_t index) {
    const int64_t token = token_ids[index];
    const Weight* from = (const Weight*)weights.panels + token / kPanel * in_size * kPanel + token % kPanel * P;
    Activation<Weight>* to = out + index * in_size;
    for (int64_t i = 0; i < in_size; i += P, from += kPanel * P)
      for (int64_t j = 0; j < P; ++j) convert(to + i + j, from[j]);
  });
}

}  // namespace

template <typename Weight>
void multiply(const Gemm<Weight>& gemm, const float* norm_weight, double eps) {
  typedef Activation<Weight> Element;
  const int64_t in_size = gemm.weights.in_size, num_rows = gemm.num_rows;
  if (num_rows == 0) return;
  const PhaseTimer timer(kGemms);
  const int64_t num_panels = gemm.weights.num_panels();
  const int64_t num_threads = Team::size();
  // Blocks are smaller if there would otherwise be too few work items for all threads to finish at the same time.
  const int64_t wanted_blocks = (4 * num_threads + num_panels - 1) / num_panels;
  const int64_t cached_rows = kRowBlockBytes / int64_t(in_size * sizeof(Element));
  const int64_t block_rows =
      std::max<int64_t>(kTileRows, std::min(cached_rows, (num_rows + wanted_blocks - 1) / wanted_blocks));
  const int64_t num_items = (num_rows + block_rows - 1) / block_rows * num_panels;

  Gemm<Weight> normed = gemm;
  if (norm_weight != nullptr) {
    Element* rows = scratch(norm_scratch<Element>(), num_rows * in_size);
    Team::get().parallel_for(num_rows, kNormRows, [&](int64_t row) {
      rms_norm(gemm.x + row * gemm.x_stride, norm_weight, float(eps), in_size, rows + row * in_size);
    });
    normed.x = rows;
    normed.x_stride = in_size;
  }
  Team::get().parallel_for_ranges(num_items, [&](int64_t item) {
    const int64_t first = item / num_panels * block_rows;
    multiply_panel(normed, item % num_panels, first, std::min(first + block_rows, num_rows));
  });
}

template void multiply(const Gemm<float>&, const float*, double);
template void multiply(const Gemm<bfloat16>&, const float*, double);

template <typename Element>
void reserve_normed_rows(int64_t num_rows, int64_t in_size) {
  scratch(norm_scratch<Element>(), num_rows * in_size);
}

template void reserve_normed_rows<float>(int64_t, int64_t);
template void reserve_normed_rows<bfloat16>(int64_t, int64_t);

// Number of outputs of a panel.
TOKA_EXPORT int64_t toka_panel_size() { return kPanel; }

TOKA_STRUCT_SIZE(PackedWeights)

// unpacked [out_size, in_size], or [2 * out_size, in_size] with gates before ups -> panels [num_panels * kPanel *
// in_size] in the layout that gemm_tile.h describes.
TOKA_EXPORT void toka_pack(const PackedWeights* weights, const void* unpacked, void* panels) {
  dispatch_activation_type(weights->weight_type, [&](auto tag) {
    typedef TypeOf<decltype(tag)> Weight;
    pack(*weights, (const Weight*)unpacked, (Weight*)panels);
  });
}

// out = x times weights, plus bias; SwiGLU if the weights are gated. If norm_weight is not null, x is normalized first.
TOKA_EXPORT void toka_multiply(const PackedWeights* weights, const void* x, int64_t x_stride, int64_t num_rows,
                               const float* norm_weight, double eps, void* out) {
  dispatch_activation_type(weights->weight_type, [&](auto tag) {
    typedef TypeOf<decltype(tag)> Weight;
    typedef Activation<Weight> Element;
    multiply<Weight>({*weights, (const Element*)x, x_stride, num_rows, nullptr, (Element*)out}, norm_weight, eps);
  });
}

// Rows `token_ids` of the packed weights -> out [num_tokens, in_size].
TOKA_EXPORT void toka_embed(const PackedWeights* weights, const int64_t* token_ids, int64_t num_tokens, void* out) {
  dispatch_activation_type(weights->weight_type, [&](auto tag) {
    typedef TypeOf<decltype(tag)> Weight;
    embed<Weight>(*weights, token_ids, num_tokens, (Activation<Weight>*)out);
  });
}
