// Packs weights, multiplies by them (gemm), and reads token embeddings from them.

#include "gemm/gemm.h"

#include <algorithm>

#include "gemm/amx_tile.h"
#include "gemm/blocks.h"
#include "gemm/int8_tile.h"
#include "gemm/low_rank.h"
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
// cache until the next panel; for AMX, that would be too slow, and they stay in the second-level cache.
constexpr int64_t kRowBlockBytes = TOKA_AMX ? 1 << 20 : 4 << 20;

// Inputs that are multiplied at a time, if there are more. The rows' own of a part, and a panel's, then stay in the
// second-level cache while the others' pass through it. A multiple of kWidenedInputs.
constexpr int64_t kPartInputs = 2048;

// Panels of which a thread multiplies one part after the other, so that it reads the rows' part once for all of them.
constexpr int64_t kPanelsTogether = TOKA_AMX ? 8 : 2;

// Most rows of which there are tiles.
constexpr int64_t kMaxTiledRows = 2048;

// Rows that a thread claims at a time for the norm. Fewer rows take less time than waking another thread.
constexpr int64_t kNormRows = 32;

static TOKA_INLINE Floats silu(Floats x) {
  const Floats small = exp_nonpositive(x > 0.0f ? -x : x);  // e^-|x|
  return x * ((x > 0.0f ? broadcast(1.0f) : small) / (1.0f + small));
}

// Activations are applied to numbers [kPanel] or fewer, in place. Numbers and results are rounded as if they were
// stored as Elements. What is not finite stays so, or becomes what torch makes of it.
template <typename Element, typename Function>
static TOKA_INLINE void apply(const Function& function, float* numbers, int count) {
  for (int i = 0; i < count; i += kLanes)
    store(numbers + i, rounded<Element>(function(rounded<Element>(load(numbers + i)))));
}

// All activations but silu; a function of its own, since inlining it would slow silu down.
template <typename Element>
TOKA_NOINLINE void activate_otherwise(int64_t activation, float* numbers, int count) {
  if (activation == kGelu) {
    apply<Element>([](Floats x) TOKA_LAMBDA { return 0.5f * x * (1.0f + erf(x * 0.707106781f)); }, numbers, count);
  } else if (activation == kGeluTanh) {
    const auto gelu = [](Floats x)
                          TOKA_LAMBDA { return 0.5f * x * (1.0f + tanh((x + 0.044715f * x * x * x) * 0.797884561f)); };
    apply<Element>(gelu, numbers, count);
  } else if (activation == kRelu2) {
    apply<Element>([](Floats x) TOKA_LAMBDA { return max(Floats{}, x) * max(Floats{}, x); }, numbers, count);
  }
}

// Gates that have limits, and their ups -> gate * sigmoid(alpha * gate) * (up + offset). numbers [kPanel], of which the
// first half become the results. NaN stays.
template <typename Element>
TOKA_NOINLINE void gate_within_limits(const PackedWeights& weights, float* numbers) {
  const Floats limit = broadcast(float(weights.gate_limit)), alpha = broadcast(float(weights.gate_alpha));
  for (int i = 0; i < kPanel / 2; i += kLanes) {
    Floats gate = rounded<Element>(load(numbers + i)), up = rounded<Element>(load(numbers + kPanel / 2 + i));
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
    store(numbers + i, silu(gate * alpha) / alpha * (up + float(weights.up_offset)));
  }
}

// Applies the gemm's multiplier and softcap to numbers [kPanel]. Each intermediate result is rounded as if it were
// stored as an Element.
template <typename Element>
TOKA_NOINLINE void scale_outputs(float multiplier, float softcap, float* numbers) {
  for (int i = 0; i < kPanel; i += kLanes) {
    Floats x = rounded<Element>(load(numbers + i)) * multiplier;
    if (softcap != 0) {
      x = rounded<Element>(rounded<Element>(x) / softcap);
      x = x == x ? rounded<Element>(tanh(x)) * softcap : x;  // NaN stays
    }
    store(numbers + i, x);
  }
}

// Applies all that follows the products to one row's sums [kPanel] of one panel, and stores the result.
template <typename Weight>
inline void epilogue(const Gemm<Weight>& gemm, int64_t row, int64_t panel, float* sums) {
  typedef Activation<Weight> Element;
  const PackedWeights& weights = gemm.weights;
  const int64_t width = weights.panel_width(), first = row * weights.out_size + panel * width;
  const int64_t count = std::min(width, weights.out_size - panel * width);
  if (weights.bias != nullptr)
    for (int i = 0; i < kPanel; i += kLanes) store(sums + i, load(sums + i) + load(weights.bias + panel * kPanel + i));
  if (weights.gate_limit != 0)
    gate_within_limits<Element>(weights, sums);
  else if (weights.activation == kSilu)
    apply<Element>([](Floats x) TOKA_LAMBDA { return silu(x); }, sums, int(width));
  else if (weights.activation != kIdentity)
    activate_otherwise<Element>(weights.activation, sums, int(width));
  if (weights.is_gated && weights.gate_limit == 0)
    for (int i = 0; i < kPanel / 2; i += kLanes)
      store(sums + i, load(sums + i) * rounded<Element>(load(sums + kPanel / 2 + i)));
  if (gemm.multiplier != 1 || gemm.softcap != 0) scale_outputs<Element>(gemm.multiplier, gemm.softcap, sums);
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

// A panel as it is stored.
struct StoredPanel {
  const char* start;
  int64_t num_bytes;
};

int64_t block_panel_bytes(int64_t block_type, int64_t in_size) {
  int64_t num_bytes = 0;
  dispatch_blocks(block_type, [&](auto type) { num_bytes = PanelSizes<type.value>(in_size).end; });
  return num_bytes;
}

template <typename Weight>
StoredPanel stored_panel(const PackedWeights& weights, int64_t panel) {
  const char* const panels = (const char*)weights.panels;
  if (weights.blocks == nullptr) {
    const int64_t num_bytes = weights.in_size * kPanel * sizeof(Weight);
    return {panels + panel * num_bytes, num_bytes};
  }
  return {panels + weights.blocks[panel].offset, block_panel_bytes(weights.blocks[panel].type, weights.in_size)};
}

// Sums of x over groups, of which a row has those of each size in turn.
constexpr int64_t kGroupSizes[] = {32, 64, 128};

// Where those of a size are in a row; of size 0, the end.
int64_t group_sums_start(int64_t in_size, int64_t group_inputs) {
  int64_t start = 0;
  for (const int64_t size : kGroupSizes) {
    if (size == group_inputs) break;
    start += in_size / size;
  }
  return start;
}

// Rows of x that are multiplied by the same weights, as many as stay in the cache.
struct RowBlock {
  int64_t group, first, end;
  int64_t integer_row;  // the first one's number among those that are multiplied in integers; -1: they are not
  int64_t first_tile;   // the first one's, if the block is multiplied in parts; else -1
};

// The inputs [first, end) of a panel.
struct Part {
  int64_t first, end;
  float* sums;       // [rows][kPanel], where they are kept until the last part; null if there is one part
  const char* next;  // what is read after it
};

// sums [rows][kPanel] += a tile's rows, from `row` on, of x times a part of a panel, from input `first` on. groups: of
// weights that are multiplied as codes, else null.
template <typename Weight, typename Widened>
void multiply_part(Tiles<Widened>& tiles, const Gemm<Weight>& gemm, const Groups* groups, const RowBlock& block,
                   int64_t row, int num_rows, const Widened* part, int64_t first, int64_t in_size,
                   Prefetches prefetches, float* sums) {
  constexpr int kRows = Tiles<Widened>::kRows;
  XRows<Activation<Weight>> x{gemm.x + row * gemm.x_stride + first, gemm.x_stride, nullptr};
  if (gemm.tiles != nullptr && block.first_tile >= 0)
    x.tile =
        gemm.tiles + (block.first_tile + (row - block.first) / kRows) * kRows * gemm.weights.in_size + first * kRows;
  if constexpr (kIsScaledLater<Widened>)
    if (groups != nullptr) {
      const int64_t row_size = group_sums_start(gemm.weights.in_size, 0);
      const float* const group_sums =
          gemm.group_sums + row * row_size + group_sums_start(gemm.weights.in_size, groups->inputs);
      for (int i = 0; groups->has_min && first == 0 && i < num_rows; i += kTileRows)
        multiply_rows(std::min(kTileRows, num_rows - i), group_sums + i * row_size, row_size,
                      (const float*)groups->mins, gemm.weights.in_size / groups->inputs, Prefetches{},
                      sums + i * kPanel);
      return tiles.multiply_scaled(num_rows, x, part, in_size, groups->scales_from(first), sums);
    }
  tiles.multiply(num_rows, x, part, in_size, prefetches, sums);
}

// Multiplies a block by a part of one panel, tile by tile. weights: the part as stored, or widened; groups: as in
// multiply_part.
template <typename Weight, typename Widened>
void multiply_tiles(const Gemm<Weight>& gemm, int64_t panel, const Part& part, const Widened* weights,
                    const Groups* groups, const RowBlock& block) {
  const int64_t num_rows = block.end - block.first, part_size = part.end - part.first;
  const int64_t part_bytes = part_size * kPanel * int64_t(sizeof(Weight));
  constexpr int kRows = Tiles<Widened>::kRows;
  Tiles<Widened> tiles;
  const int64_t num_tiles = (num_rows + kRows - 1) / kRows;
  const int64_t num_prefetching = std::min(num_tiles, kMaxPrefetchingTiles);
  const auto first_of = [&](int64_t tile) {
    return block.first + (tiles.kAreEven ? num_rows * tile / num_tiles : std::min(tile * kRows, num_rows));
  };
  alignas(64) float own[kRows * kPanel];
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    Prefetches prefetches{(const char*)weights + kStreamAheadBytes, int64_t(kPanel * kPair<Weight> * sizeof(Weight))};
    if (gemm.weights.blocks != nullptr) {  // what follows is prefetched while the panel is widened
      prefetches.step = 0;
    } else if (num_tiles > 1) {
      prefetches.next = part.next + part_bytes * tile / num_prefetching;
      prefetches.step = tile < num_prefetching ? prefetches.step / num_prefetching : 0;
    }
    const int64_t begin = first_of(tile), end = first_of(tile + 1);
    float* const sums = part.sums == nullptr ? own : part.sums + (begin - block.first) * kPanel;
    if (part.first == 0) std::fill(sums, sums + (end - begin) * kPanel, 0.0f);
    multiply_part(tiles, gemm, groups, block, begin, int(end - begin), weights, part.first, part_size, prefetches,
                  sums);
    if (part.end < gemm.weights.in_size) continue;
    add_low_rank(gemm, panel, begin, end, sums);
    for (int64_t row = begin; row < end; ++row) epilogue(gemm, row, panel, sums + (row - begin) * kPanel);
  }
}

// The rows of a single tile times a panel of blocks.
template <int bits, typename Weight>
void multiply_blocks(const Gemm<Weight>& gemm, int64_t panel, const uint8_t* codes, const Groups& groups,
                     const RowBlock& block) {
  const int64_t in_size = gemm.weights.in_size;
  alignas(64) Activation<Weight> widened[kWidenedInputs * kPanel];
  Tiles<Activation<Weight>> tiles;
  alignas(64) float sums[tiles.kRows * kPanel] = {};
  for (int64_t first = 0; first < in_size; first += kWidenedInputs) {
    const int64_t count = std::min(kWidenedInputs, in_size - first);
    widen_codes<bits>(codes, groups, first, first + count, widened);
    multiply_part(tiles, gemm, &groups, block, block.first, int(block.end - block.first), widened, first, count,
                  Prefetches{}, sums);
  }
  add_low_rank(gemm, panel, block.first, block.end, sums);
  for (int64_t row = block.first; row < block.end; ++row)
    epilogue(gemm, row, panel, sums + (row - block.first) * kPanel);
}

// A block times a panel of codes, in integers. planes: of a row.
template <int planes, int bits, typename Weight>
void multiply_integers(const Gemm<Weight>& gemm, const Int8Rows& x, int64_t panel, const uint8_t* codes,
                       const Groups& groups, const RowBlock& block) {
  const int64_t num_rows = block.end - block.first, num_tiles = (num_rows + kCodeRows<planes> - 1) / kCodeRows<planes>;
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t begin = num_rows * tile / num_tiles, end = num_rows * (tile + 1) / num_tiles;
    alignas(64) float sums[kCodeRows<planes> * kPanel];
    multiply_code_rows<planes, bits>(int(end - begin), x, block.integer_row + begin, codes, groups, sums);
    add_low_rank(gemm, panel, block.first + begin, block.first + end, sums);
    for (int64_t row = begin; row < end; ++row) epilogue(gemm, block.first + row, panel, sums + (row - begin) * kPanel);
  }
}

// From this many tiles on, widening a panel once costs less than widening it for each tile.
constexpr int64_t kMinTilesToWiden = 12;

// Up to so many rows are multiplied in planes: with more, widening the weights takes less time.
#if TOKA_INT8_DOT
constexpr int64_t kMaxPlaneRows = 6;
#elif defined(__AVX2__)
constexpr int64_t kMaxPlaneRows = 2;
#else
constexpr int64_t kMaxPlaneRows = 0;
#endif

// Whether num_rows rows are. Weights of float32 are widened to what they stand for, bit for bit, whatever the number of
// rows, so that a row's result does not depend on the others.
bool is_in_planes(const PackedWeights& weights, int64_t num_rows) {
  return weights.blocks != nullptr && !weights.is_int8 && weights.weight_type != kFloat32 &&
         num_rows <= kMaxPlaneRows && weights.in_size % kInputBlock == 0;
}

// Whether num_rows rows are multiplied as they are by codes.
bool is_by_codes(const PackedWeights& weights, int64_t num_rows) {
  return TOKA_BFLOAT16_DOT && weights.blocks != nullptr && !weights.is_int8 && weights.weight_type == kBfloat16 &&
         !is_in_planes(weights, num_rows);
}

// Whether num_rows rows are multiplied part by part, and x is in tiles if there are any.
template <typename Weight>
bool is_in_parts(const PackedWeights& weights, int64_t num_rows) {
  constexpr int kFewRows = Tiles<Weight>::kAreTiled ? Tiles<Weight>::kRows / 2 : Tiles<Weight>::kRows;
  return num_rows > kFewRows && weights.in_size > kPartInputs && weights.in_size % 32 == 0 && !weights.is_int8 &&
         !is_in_planes(weights, num_rows);
}

// A block times a part of a panel. x: the rows in integers that are multiplied so.
template <typename Weight>
void multiply_panel(const Gemm<Weight>& gemm, const Int8Rows& x, int64_t panel, const Part& part,
                    const RowBlock& block) {
  const int64_t in_size = gemm.weights.in_size, part_size = part.end - part.first;
  if (gemm.inner != nullptr && part.end == in_size) prefetch_low_rank(gemm, panel, block.first, block.end);
  if (gemm.weights.blocks != nullptr) {
    const uint8_t* const from = (const uint8_t*)stored_panel<Weight>(gemm.weights, panel).start;
    return dispatch_blocks(gemm.weights.blocks[panel].type, [&](auto type) {
      constexpr int bits = FormatOf<type.value>::kBits;
      const PanelSizes<type.value> sizes(in_size);
      static thread_local ScratchMemory<float> numbers;
      const Groups groups = read_groups<type.value>(from, in_size, scratch(numbers, 2 * sizes.num_groups * kPanel));
      const uint8_t* const codes = from + sizes.codes;
      if (block.integer_row >= 0 && x.has_planes)
        return multiply_integers<kPlanes, bits>(gemm, x, panel, codes, groups, block);
      if (block.integer_row >= 0) return multiply_integers<1, bits>(gemm, x, panel, codes, groups, block);
      if (part_size == in_size && block.end - block.first <= Tiles<Activation<Weight>>::kRows)
        return multiply_blocks<bits>(gemm, panel, codes, groups, block);
      static thread_local ScratchMemory<Activation<Weight>> widened;
      Activation<Weight>* const to = scratch(widened, part_size * kPanel);
      widen_codes<bits>(codes, groups, part.first, part.end, to);
      multiply_tiles(gemm, panel, part, to, &groups, block);
    });
  }
  const Weight* weights = (const Weight*)gemm.weights.panels + (panel * in_size + part.first) * kPanel;
  if constexpr (std::is_same_v<Activation<Weight>, float> && !std::is_same_v<Weight, float>) {
    if (block.end - block.first > (kMinTilesToWiden - 1) * kTileRows) {
      static thread_local ScratchMemory<float> widened;
      float* to = scratch(widened, part_size * kPanel);
      for (int64_t i = 0; i < part_size * kPanel; i += kLanes) store(to + i, load(weights + i));
      return multiply_tiles(gemm, panel, part, to, nullptr, block);
    }
  }
  multiply_tiles(gemm, panel, part, weights, nullptr, block);
}

// A block times the panels [first, end).
template <typename Weight>
void multiply_panels(const Gemm<Weight>& gemm, const Int8Rows& x, int64_t first, int64_t end, const RowBlock& block) {
  const int64_t in_size = gemm.weights.in_size, num_rows = block.end - block.first;
  const auto at = [&](int64_t panel, int64_t input) {
    return gemm.weights.blocks != nullptr
               ? nullptr
               : stored_panel<Weight>(gemm.weights, panel).start + input * kPanel * int64_t(sizeof(Weight));
  };
  if (block.first_tile < 0) {
    for (int64_t panel = first; panel < end; ++panel)
      multiply_panel(gemm, x, panel, {0, in_size, nullptr, at(panel + 1, 0)}, block);
    return;
  }
  static thread_local ScratchMemory<float> all_sums;
  float* const sums = scratch(all_sums, (end - first) * num_rows * kPanel);
  for (int64_t input = 0, next; input < in_size; input = next) {
    next = std::min(input + kPartInputs, in_size);
    for (int64_t panel = first; panel < end; ++panel) {
      const char* const after = panel + 1 < end ? at(panel + 1, input) : next < in_size ? at(first, next) : at(end, 0);
      multiply_panel(gemm, x, panel, {input, next, sums + (panel - first) * num_rows * kPanel, after}, block);
    }
  }
}

// Memory for the normalized rows of x.
template <typename Element>
ScratchMemory<Element>& norm_scratch() {
  static ScratchMemory<Element> memory;
  return memory;
}

// Memory for rows of x in tiles.
template <typename Element>
ScratchMemory<Element>& tiles_scratch() {
  static ScratchMemory<Element> memory;
  return memory;
}

ScratchMemory<float>& group_sums_scratch() {
  static ScratchMemory<float> memory;
  return memory;
}

// The sums over groups of rows of x.
template <typename Weight>
const float* group_sums(const Gemm<Weight>& gemm) {
  const int64_t in_size = gemm.weights.in_size, row_size = group_sums_start(in_size, 0);
  float* const all = scratch(group_sums_scratch(), gemm.num_rows * row_size);
  Team::get().parallel_for(gemm.num_rows, kNormRows, [&](int64_t row) {
    float* to = all + row * row_size;
    const auto* const x = gemm.x + row * gemm.x_stride;
    for (int64_t i = 0; i < in_size / kGroupSizes[0]; ++i) {
      Floats total{};
      repeat<kGroupSizes[0] / kLanes>([&](auto v) TOKA_LAMBDA { total += load(x + i * kGroupSizes[0] + v * kLanes); });
      *to++ = sum(total);
    }
    const float* halves = all + row * row_size;
    for (const int64_t size : {kGroupSizes[1], kGroupSizes[2]}) {
      const float* const end = to;
      for (int64_t i = 0; i < in_size / size; ++i) *to++ = halves[2 * i] + halves[2 * i + 1];
      halves = end;
    }
  });
  return all;
}

// Memory for rows of x in 8 bits or in planes.
struct Int8Scratch {
  ScratchMemory<int8_t> codes;
  ScratchMemory<int16_t> pairs;
  ScratchMemory<float> scales, sums;
  ScratchMemory<int32_t> code_sums, half_sums;

  Int8Rows reserve(int64_t num_rows, bool has_planes, int64_t in_size) {
    const int64_t num_codes = num_rows * in_size * (has_planes ? kPlanes : 1);
    const int64_t num_blocks = num_rows * in_size / kInputBlock;
    return {scratch(codes, num_codes),
            kHasPairs ? scratch(pairs, num_codes) : nullptr,
            scratch(scales, num_blocks),
            scratch(sums, num_blocks),
            scratch(code_sums, num_codes / kInputBlock),
            scratch(half_sums, num_codes / kInputSum),
            in_size,
            has_planes};
  }
};

Int8Scratch& int8_scratch() {
  static Int8Scratch memory;
  return memory;
}

// Rows that a thread claims at a time to quantize them.
constexpr int64_t kQuantizedRows = 8;

// The rows of x in 8 bits. With weights of kI8, which no other type is mixed with, blocks are wide.
template <typename Element>
void quantize_row(const Element* x, int64_t in_size, bool is_wide, int8_t* codes, float* scales, float* sums,
                  int32_t* code_sums, int32_t* half_sums) {
  for (int64_t first = 0, count; first < in_size; first += count) {
    count = is_wide ? std::min(kWideBlock, in_size - first) : kInputBlock;
    const int64_t block = first / kInputBlock;
    const float scale = quantize(x + first, count, codes + first, code_sums + block, half_sums + first / kInputSum);
    for (int64_t b = block; b < block + count / kInputBlock; ++b) {
      scales[b] = scale;
      sums[b] = scale * float(code_sums[b]);
    }
  }
}

// Rows of x in 8 bits, or in planes. row_numbers [num_rows]: which.
template <typename Weight>
Int8Rows integer_rows(const Gemm<Weight>& gemm, bool has_planes, const int64_t* row_numbers, int64_t num_rows) {
  const int64_t in_size = gemm.weights.in_size, num_blocks = in_size / kInputBlock, planes = has_planes ? kPlanes : 1;
  const bool is_wide = gemm.weights.blocks[0].type == kI8;
  Int8Scratch& memory = int8_scratch();
  const Int8Rows rows = memory.reserve(num_rows, has_planes, in_size);
  Team::get().parallel_for(num_rows, kQuantizedRows, [&](int64_t row) {
    const auto* const x = gemm.x + row_numbers[row] * gemm.x_stride;
    int8_t* const codes = memory.codes.data() + row * planes * in_size;
    float *const scales = memory.scales.data() + row * num_blocks, *const sums = memory.sums.data() + row * num_blocks;
    int32_t* const code_sums = memory.code_sums.data() + row * planes * num_blocks;
    int32_t* const half_sums = memory.half_sums.data() + row * planes * in_size / kInputSum;
    if (has_planes)
      for (int64_t b = 0; b < num_blocks; ++b)
        split(x + b * kInputBlock, in_size, codes + b * kInputBlock, scales + b, sums + b, code_sums + b,
              half_sums + b * kInputBlock / kInputSum);
    else
      quantize_row(x, in_size, is_wide, codes, scales, sums, code_sums, half_sums);
    if constexpr (kHasPairs) {
      int16_t* const pairs = memory.pairs.data() + row * planes * in_size;
      for (int64_t i = 0; i < planes * in_size; i += 4) {
        pairs[i] = codes[i], pairs[i + 1] = codes[i + 2];
        pairs[i + 2] = codes[i + 1], pairs[i + 3] = codes[i + 3];
      }
    }
  });
  return rows;
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

// The inverse: rows [num_rows, in_size] replace those from `first_row` on.
template <typename Weight>
void pack_rows(const PackedWeights& weights, const Weight* rows, int64_t first_row, int64_t num_rows, Weight* panels) {
  constexpr int64_t kRows = 16;  // a thread claims so many at a time
  constexpr int64_t P = kPair<Weight>;
  const int64_t in_size = weights.in_size, width = weights.panel_width();
  Team::get().parallel_for(num_rows, kRows, [&](int64_t number) {
    const int64_t row = first_row + number, part = row / weights.out_size, index = row % weights.out_size;
    const int64_t output = part * width + index % width;
    const Weight* from = rows + number * in_size;
    Weight* to = panels + index / width * in_size * kPanel + output * P;
    for (int64_t i = 0; i < in_size; i += P, to += kPanel * P)
      for (int64_t j = 0; j < P; ++j) to[j] = from[i + j];
  });
}

// Quantized rows, of one type, in place of those from `first_row` on. rows: as a file has them.
template <BlockType type>
void pack_block_rows(const PackedWeights& weights, const uint8_t* rows, int64_t first_row, int64_t num_rows,
                     uint8_t* panels) {
  constexpr int64_t kRows = 16;  // a thread claims so many at a time
  const PanelSizes<type> sizes(weights.in_size);
  const int64_t width = weights.panel_width(), row_bytes = sizes.num_blocks * sizes.block_bytes;
  Team::get().parallel_for(num_rows, kRows, [&](int64_t number) {
    const int64_t row = first_row + number, part = row / weights.out_size, index = row % weights.out_size;
    const int64_t output = part * width + index % width;
    pack_blocks<type>(rows + number * row_bytes, weights.in_size, output,
                      panels + weights.blocks[index / width].offset);
  });
}

template <typename Weight>
void embed(const PackedWeights& weights, const int64_t* token_ids, int64_t num_tokens, Activation<Weight>* out) {
  constexpr int64_t kTokens = 16;  // a thread claims so many at a time
  constexpr int64_t P = kPair<Weight>;
  const int64_t in_size = weights.in_size;
  Team::get().parallel_for(num_tokens, kTokens, [&](int64_t index) {
    const int64_t token = token_ids[index];
    if (weights.blocks != nullptr) {
      const PanelBlocks& blocks = weights.blocks[token / kPanel];
      const uint8_t* const panel = (const uint8_t*)weights.panels + blocks.offset;
      return dispatch_blocks(blocks.type, [&](auto type) {
        read_output<type.value>(panel, in_size, token % kPanel, out + index * in_size);
      });
    }
    const Weight* from = (const Weight*)weights.panels + token / kPanel * in_size * kPanel + token % kPanel * P;
    Activation<Weight>* to = out + index * in_size;
    for (int64_t i = 0; i < in_size; i += P, from += kPanel * P)
      for (int64_t j = 0; j < P; ++j) convert(to + i + j, from[j]);
  });
}

// The rows of all groups in blocks, and which rows are multiplied in integers.
struct RowBlocks {
  std::vector<RowBlock> blocks;
  std::vector<int64_t> integer_rows;
  bool has_planes = false, has_codes = false;

  int64_t num_tiles = 0;  // of all blocks that are multiplied in parts

  void reserve(int64_t num_rows, int64_t num_groups, int64_t tile_rows) {
    blocks.reserve(num_groups + num_rows / tile_rows);
    integer_rows.reserve(num_rows);
  }

  template <typename Weight>
  void fill(const PackedWeights* weights, int64_t num_groups, const int64_t* starts, int64_t block_rows) {
    constexpr int kRows = Tiles<Weight>::kRows;
    blocks.clear(), integer_rows.clear();
    has_planes = has_codes = false;
    num_tiles = 0;
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t begin = starts[group], end = starts[group + 1];
      if (begin == end) continue;
      const bool in_planes = is_in_planes(weights[group], end - begin);
      const bool in_integers = in_planes || weights[group].is_int8;
      has_planes |= in_planes;
      has_codes |= is_by_codes(weights[group], end - begin);
      const bool in_parts = is_in_parts<Weight>(weights[group], end - begin);
      for (int64_t first = begin; first < end; first += block_rows) {
        blocks.push_back({group, first, std::min(first + block_rows, end),
                          in_integers ? int64_t(integer_rows.size()) + first - begin : -1, in_parts ? num_tiles : -1});
        if (in_parts) num_tiles += (blocks.back().end - first + kRows - 1) / kRows;
      }
      for (int64_t row = begin; in_integers && row < end; ++row) integer_rows.push_back(row);
    }
  }
};

RowBlocks& row_blocks() {
  static RowBlocks memory;
  return memory;
}

// The blocks' rows in tiles; null if no block is.
template <typename Weight>
const Activation<Weight>* tiled_rows(const Gemm<Weight>& gemm, const RowBlocks& rows, int64_t block_rows) {
  if constexpr (Tiles<Weight>::kAreTiled) {
    constexpr int kRows = Tiles<Weight>::kRows;
    if (rows.num_tiles == 0) return nullptr;
    const int64_t in_size = gemm.weights.in_size, block_tiles = (block_rows + kRows - 1) / kRows;
    Activation<Weight>* const tiles = scratch(tiles_scratch<Activation<Weight>>(), rows.num_tiles * kRows * in_size);
    Team::get().parallel_for(int64_t(rows.blocks.size()) * block_tiles, 1, [&](int64_t item) {
      const RowBlock& block = rows.blocks[item / block_tiles];
      const int64_t tile = item % block_tiles, first = block.first + tile * kRows;
      for (int64_t row = first; block.first_tile >= 0 && row < std::min(first + kRows, block.end); ++row)
        Tiles<Weight>::tile_row(gemm.x + row * gemm.x_stride, in_size, row - first,
                                tiles + (block.first_tile + tile) * kRows * in_size);
    });
    return tiles;
  }
  return nullptr;
}

}  // namespace

template <typename Weight>
void multiply_groups(const Gemm<Weight>& gemm, const Norm& norm, const PackedWeights* weights, int64_t num_groups,
                     const int64_t* starts) {
  typedef Activation<Weight> Element;
  const int64_t in_size = gemm.weights.in_size, num_rows = gemm.num_rows;
  if (num_rows == 0) return;
  const PhaseTimer timer(kGemms);
  const int64_t num_panels = gemm.weights.num_panels();
  const int64_t num_threads = Team::size();
  // Blocks are smaller if there would otherwise be too few work items for all threads to finish at the same time.
  const int64_t wanted_blocks = (4 * num_threads + num_panels - 1) / num_panels;
  const bool in_parts = is_in_parts<Weight>(gemm.weights, num_rows);
  const int64_t cached_rows = kRowBlockBytes / int64_t((in_parts ? kPartInputs : in_size) * sizeof(Element));
  constexpr int64_t kRows = Tiles<Weight>::kRows;
  const int64_t wanted_rows = std::min(cached_rows, (num_rows + wanted_blocks - 1) / wanted_blocks);
  const int64_t block_rows = std::max<int64_t>(1, (wanted_rows + kRows - 1) / kRows) * kRows;
  RowBlocks& rows = row_blocks();
  rows.fill<Weight>(weights, num_groups, starts, block_rows);

  const Element* x = gemm.x;
  int64_t x_stride = gemm.x_stride;
  if (norm.kind != kNoNorm) {
    Element* const normed = scratch(norm_scratch<Element>(), num_rows * in_size);
    Team::get().parallel_for(num_rows, kNormRows, [&](int64_t row) {
      normalize(norm, x + row * x_stride, in_size, normed + row * in_size);
    });
    x = normed;
    x_stride = in_size;
  }
  Gemm<Weight> normed{gemm.weights, x, x_stride, num_rows, gemm.residual, gemm.out, gemm.multiplier, gemm.softcap,
                      gemm.adapters};
  if (gemm.adapters.of_rows != nullptr) multiply_down(normed);
  const float* sums = nullptr;
  const Element* tiles = nullptr;
  const auto with = [&](const PackedWeights& own) {
    return Gemm<Weight>{
        own,           x,    x_stride, num_rows,     gemm.residual,    gemm.out, gemm.multiplier, gemm.softcap,
        gemm.adapters, sums, tiles,    normed.inner, normed.inner_size};
  };
  Int8Rows integers{};
  if (!rows.integer_rows.empty())
    integers =
        integer_rows(with(gemm.weights), rows.has_planes, rows.integer_rows.data(), int64_t(rows.integer_rows.size()));
  if (rows.has_codes) sums = group_sums(with(gemm.weights));
  tiles = tiled_rows(with(gemm.weights), rows, block_rows);
  // One list of all groups' work, so that threads share it whatever the rows of each.
  const int64_t num_blocks = int64_t(rows.blocks.size()), num_shares = 4 * num_threads;
  const int64_t together = in_parts ? std::clamp<int64_t>(num_blocks * num_panels / num_shares, 1, kPanelsTogether) : 1;
  const int64_t num_items = (num_panels + together - 1) / together;
  Team::get().parallel_for_ranges(num_blocks * num_items, [&](int64_t item) {
    const RowBlock& block = rows.blocks[item / num_items];
    const int64_t first = item % num_items * together;
    multiply_panels(with(weights[block.group]), integers, first, std::min(first + together, num_panels), block);
  });
}

template void multiply_groups(const Gemm<float>&, const Norm&, const PackedWeights*, int64_t, const int64_t*);
template void multiply_groups(const Gemm<bfloat16>&, const Norm&, const PackedWeights*, int64_t, const int64_t*);

template <typename Weight>
void multiply(const Gemm<Weight>& gemm, const Norm& norm) {
  const int64_t in_size = gemm.weights.in_size, out_size = gemm.weights.out_size;
  const int64_t most = is_in_parts<Weight>(gemm.weights, gemm.num_rows) ? kMaxTiledRows : gemm.num_rows;
  for (int64_t first = 0; first < gemm.num_rows; first += most) {
    const int64_t starts[] = {0, std::min(most, gemm.num_rows - first)};
    const auto* const residual = gemm.residual == nullptr ? nullptr : gemm.residual + first * out_size;
    multiply_groups<Weight>({gemm.weights, gemm.x + first * gemm.x_stride, gemm.x_stride, starts[1], residual,
                             gemm.out + first * out_size, gemm.multiplier, gemm.softcap, gemm.adapters.from(first)},
                            norm, &gemm.weights, 1, starts);
  }
}

template void multiply(const Gemm<float>&, const Norm&);
template void multiply(const Gemm<bfloat16>&, const Norm&);

template <typename Element>
void reserve_normed_rows(int64_t num_rows, int64_t in_size) {
  scratch(norm_scratch<Element>(), num_rows * in_size);
}

template void reserve_normed_rows<float>(int64_t, int64_t);
template void reserve_normed_rows<bfloat16>(int64_t, int64_t);

void reserve_rows(const PackedWeights& weights, int64_t num_rows, int64_t num_groups) {
  row_blocks().reserve(num_rows, num_groups, kTileRows);
  if (weights.is_int8) int8_scratch().reserve(num_rows, false, weights.in_size);
  if (is_in_planes(weights, std::min(num_rows, kMaxPlaneRows)))
    int8_scratch().reserve(std::min(num_rows, num_groups * kMaxPlaneRows), true, weights.in_size);
  if (is_by_codes(weights, num_rows)) scratch(group_sums_scratch(), num_rows * group_sums_start(weights.in_size, 0));
  if (Tiles<bfloat16>::kAreTiled && weights.weight_type == kBfloat16 && is_in_parts<bfloat16>(weights, num_rows)) {
    const int64_t at_once = num_groups == 1 ? std::min(num_rows, kMaxTiledRows) : num_rows;
    const int64_t num_tiles = num_groups + (at_once - 1) / Tiles<bfloat16>::kRows;
    scratch(tiles_scratch<Activation<bfloat16>>(), num_tiles * Tiles<bfloat16>::kRows * weights.in_size);
  }
}

// Ranks of an adapter are padded to a multiple of this.
TOKA_EXPORT int64_t toka_rank_multiple() { return kRankMultiple; }

// Allocates and touches the memory for rows times the down matrices of their adapters.
TOKA_EXPORT void toka_reserve_adapters(int64_t num_rows, int64_t num_ranks, int64_t is_bfloat16) {
  is_bfloat16 ? (void)scratch(inner_scratch<bfloat16>(), num_rows * num_ranks)
              : (void)scratch(inner_scratch<float>(), num_rows * num_ranks);
  adapter_rows().reserve(num_rows);
}

// Number of outputs of a panel.
TOKA_EXPORT int64_t toka_panel_size() { return kPanel; }

// Most rows that are kept in tiles; 0 if none are.
TOKA_EXPORT int64_t toka_max_tiled_rows() { return Tiles<bfloat16>::kAreTiled ? kMaxTiledRows : 0; }

TOKA_STRUCT_SIZE(Norm)
TOKA_STRUCT_SIZE(PackedWeights)
TOKA_STRUCT_SIZE(LowRank)

// unpacked [out_size, in_size], or [2 * out_size, in_size] with gates before ups -> panels [num_panels * kPanel *
// in_size] in the layout that gemm_tile.h describes.
TOKA_EXPORT void toka_pack(const PackedWeights* weights, const void* unpacked, void* panels) {
  dispatch_activation_type(weights->weight_type, [&](auto tag) {
    typedef TypeOf<decltype(tag)> Weight;
    pack(*weights, (const Weight*)unpacked, (Weight*)panels);
  });
}

// rows [num_rows, in_size] -> the rows from `first_row` on of what toka_pack has packed; the others stay.
TOKA_EXPORT void toka_pack_rows(const PackedWeights* weights, const void* rows, int64_t first_row, int64_t num_rows,
                                void* panels) {
  dispatch_activation_type(weights->weight_type, [&](auto tag) {
    typedef TypeOf<decltype(tag)> Weight;
    pack_rows(*weights, (const Weight*)rows, first_row, num_rows, (Weight*)panels);
  });
}

// rows: num_rows rows of blocks of one BlockType -> the rows from `first_row` on of quantized weights.
TOKA_EXPORT void toka_pack_blocks(const PackedWeights* weights, int64_t block_type, const void* rows, int64_t first_row,
                                  int64_t num_rows, void* panels) {
  dispatch_blocks(block_type, [&](auto type) {
    pack_block_rows<type.value>(*weights, (const uint8_t*)rows, first_row, num_rows, (uint8_t*)panels);
  });
}

// Bytes of a panel of in_size inputs in blocks of this type.
TOKA_EXPORT int64_t toka_block_panel_bytes(int64_t block_type, int64_t in_size) {
  return block_panel_bytes(block_type, in_size);
}

// out = x times weights, plus what adapters add and the bias, activated and gated as the weights say, and scaled as
// Gemm says. norm: of x, or null. adapters, row_adapters: of RowAdapters.
TOKA_EXPORT void toka_multiply(const PackedWeights* weights, const void* x, int64_t x_stride, int64_t num_rows,
                               const Norm* norm, double multiplier, double softcap, const LowRank* adapters,
                               const int32_t* row_adapters, void* out) {
  dispatch_activation_type(weights->weight_type, [&](auto tag) {
    typedef TypeOf<decltype(tag)> Weight;
    typedef Activation<Weight> Element;
    multiply<Weight>({*weights,
                      (const Element*)x,
                      x_stride,
                      num_rows,
                      nullptr,
                      (Element*)out,
                      float(multiplier),
                      float(softcap),
                      {adapters, row_adapters}},
                     norm == nullptr ? kUnnormed : *norm);
  });
}

// Rows `token_ids` of the packed weights -> out [num_tokens, in_size].
TOKA_EXPORT void toka_embed(const PackedWeights* weights, const int64_t* token_ids, int64_t num_tokens, void* out) {
  dispatch_activation_type(weights->weight_type, [&](auto tag) {
    typedef TypeOf<decltype(tag)> Weight;
    embed<Weight>(*weights, token_ids, num_tokens, (Activation<Weight>*)out);
  });
}
