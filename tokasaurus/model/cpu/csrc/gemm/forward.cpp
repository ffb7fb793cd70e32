// All decoder layers of one forward in one call: with few rows, calling each step of each layer from Python takes as
// long as computing it.

#include "gemm/forward.h"

#include <algorithm>
#include <cmath>

#include "attention/attention_layout.h"
#include "attention/kv_write.h"
#include "simd/element_type.h"
#include "simd/phases.h"
#include "simd/simd_math.h"
#include "simd/threads.h"

// In states.cpp.
extern "C" void toka_run_states(const StateLayer* layer, const StateSegments* segments, float* memory,
                                int64_t activation_type, const void* features, int64_t num_rows, void* out);

namespace {

// Rotary embedding of one head [head_dim], in place. cos_sin: [head_dim], cosines before sines.
template <typename Element>
void apply_rotary(Element* head, int64_t head_dim, const float* cos_sin) {
  const int64_t half = head_dim / 2;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Floats cos = load(cos_sin + i), sin = load(cos_sin + half + i);
    const Floats first = load(head + i), second = load(head + half + i);
    store(head + i, first * cos - second * sin);
    store(head + half + i, second * cos + first * sin);
  }
  for (; i < half; ++i) {
    const float first = to_float(head[i]), second = to_float(head[half + i]);
    from_float(head + i, first * cos_sin[i] - second * cos_sin[half + i]);
    from_float(head + half + i, second * cos_sin[i] + first * cos_sin[half + i]);
  }
}

template <typename Element>
bool all_finite(const Element* numbers, int64_t count) {
  Ints finite = ~Ints{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) finite &= is_finite(load(numbers + i));
  bool is_all = -sum(finite) == kLanes;
  for (; i < count; ++i) is_all &= std::isfinite(to_float(numbers[i]));
  return is_all;
}

// Limits the magnitude of all numbers. NaN stays.
template <typename Element>
void clip(Element* numbers, int64_t count, float limit) {
  for (int64_t i = 0; i < count; ++i) {
    const float number = to_float(numbers[i]);
    if (std::fabs(number) > limit) from_float(numbers + i, std::copysign(limit, number));
  }
}

// Applies a norm of queries or keys to heads [count, head_dim].
template <typename Element>
void normalize_heads(const PackedLayer& layer, Norm norm, Element* heads, int64_t count) {
  if (norm.kind == kNoNorm) return;
  const bool is_whole = layer.head_norms == kOverWidth;
  const int64_t size = is_whole ? count * layer.head_dim : layer.head_dim;
  for (int64_t index = 0; index < (is_whole ? 1 : count); ++index) {
    normalize(norm, heads + index * size, size, heads + index * size);
    if (layer.head_norms != kByHead) continue;
    if (norm.weight != nullptr) norm.weight += size;
    if (norm.bias != nullptr) norm.bias += size;
  }
}

// The tables of cosines and sines of all rows, [num_rows, num_tables, head_dim].
struct RotaryRows {
  const float* cos_sin;
  int64_t num_tables;
};

// Applies the norms and the rotary embedding to queries and keys, and stores keys and values, for all rows that are not
// padding. heads [num_rows, query, key and value heads, head_dim]; hidden [num_rows, hidden_size].
//
// The cache stays finite, because attention multiplies values of tokens that a row does not see by 0: a row whose keys
// or values are not finite stores zeros. Its hidden state becomes NaN and stays so, which ends its sequence.
template <typename Stored, typename Element>
void rotate_and_store_heads(const PackedLayer& layer, const CacheLayer<Stored>& cache, const int64_t* kv_indices,
                            int64_t num_rows, const RotaryRows& rotary, Element* heads, Element* hidden) {
  constexpr int64_t kRows = 16;  // a thread claims so many at a time
  constexpr int64_t kAhead = 2;  // how many rows ahead cache memory is prefetched
  const PhaseTimer timer(kHeads);
  const int64_t head_dim = layer.head_dim, num_rotated = layer.num_query_heads + layer.num_kv_heads;
  Team::get().parallel_for(num_rows, kRows, [&](int64_t row) {
    if (row + kAhead < num_rows) cache.prefetch(kv_indices[row + kAhead]);
    Element* own = heads + row * layer.qkv.out_size;
    Element* keys = own + layer.num_query_heads * head_dim;
    const auto normalize_all = [&] {
      normalize_heads(layer, layer.query_norm, own, layer.num_query_heads);
      normalize_heads(layer, layer.key_norm, keys, layer.num_kv_heads);
    };
    if (layer.clip != 0) clip(own, layer.qkv.out_size, float(layer.clip));
    if (!layer.norms_after_rotary) normalize_all();
    const auto rotate = [&](Element* first, int64_t count, int64_t table) {
      if (table < 0) return;
      const float* cos_sin = rotary.cos_sin + (row * rotary.num_tables + table) * head_dim;
      for (int64_t index = 0; index < count; ++index) apply_rotary(first + index * head_dim, head_dim, cos_sin);
    };
    rotate(own, layer.num_query_heads, layer.query_rotary);
    rotate(keys, layer.num_kv_heads, layer.rotary);
    if (layer.norms_after_rotary) normalize_all();
    const int64_t num_stored = 2 * layer.num_kv_heads * head_dim;
    if (!all_finite(keys, num_stored)) {
      std::fill(keys, keys + num_stored, Element{});
      from_float(hidden + row * layer.out.out_size, NAN);
    }
    cache.write(kv_indices[row], keys, own + num_rotated * head_dim);
  });
}

template <typename Element>
ScratchMemory<Element>& layer_scratch() {
  static ScratchMemory<Element> memory;
  return memory;
}

// Elements per row: the MLP's inner values, or the experts' output; before these, the gates of what is attended.
int64_t inner_size(const PackedLayer* layers, int64_t num_layers) {
  int64_t size = 0;
  for (const PackedLayer* layer = layers; layer < layers + num_layers; ++layer) {
    size = std::max(size, layer->experts == nullptr ? layer->gate_up.out_size : layer->out.out_size);
    if (layer->gate != nullptr) size = std::max(size, layer->gate->out_size);
  }
  return size;
}

// Elements per row: the heads, the attention output, the MLP's inner values, and an output to normalize, if any is.
struct RowSizes {
  int64_t heads = 0, attended = 0;

  RowSizes(const PackedLayer* layers, int64_t num_layers) {
    for (const PackedLayer* layer = layers; layer < layers + num_layers; ++layer) {
      heads = std::max(heads, layer->qkv.out_size);
      attended = std::max(attended, layer->out.in_size);
    }
  }
};

int64_t scratch_row_size(const PackedLayer* layers, int64_t num_layers) {
  const RowSizes sizes(layers, num_layers);
  const bool normalizes = std::any_of(layers, layers + num_layers, [](const PackedLayer& layer) {
    return layer.attention_out_norm.kind != kNoNorm || layer.mlp_out_norm.kind != kNoNorm;
  });
  return sizes.heads + sizes.attended + inner_size(layers, num_layers) + (normalizes ? layers->out.out_size : 0);
}

// Adds an output of attention or MLP [num_rows, size] to the hidden states, normalized and scaled as the layer says.
template <typename Element>
void add_rows(const PackedLayer& layer, const Norm& norm, int64_t num_rows, int64_t size, Element* output,
              Element* hidden) {
  constexpr int64_t kRows = 32;  // a thread claims so many at a time
  const float multiplier = layer.residual_multiplier;
  const PhaseTimer timer(kGemms);
  Team::get().parallel_for(num_rows, kRows, [&](int64_t row) {
    Element *own = output + row * size, *to = hidden + row * size;
    if (norm.kind != kNoNorm) normalize(norm, own, size, own);
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(to + i, rounded<Element>(load(own + i) * multiplier) + load(to + i));
    for (; i < size; ++i) from_float(to + i, rounded<Element>(to_float(own[i]) * multiplier) + to_float(to[i]));
  });
}

// Adds x times weights to the hidden states [num_rows, out_size], normalized and scaled as the layer says. output:
// memory for [num_rows, out_size].
template <typename Weight, typename Element>
void add_output(const PackedLayer& layer, const PackedWeights& weights, const RowAdapters& adapters, const Norm& norm,
                const Element* x, int64_t num_rows, Element* output, Element* hidden) {
  if (norm.kind == kNoNorm)
    return multiply<Weight>(
        {weights, x, weights.in_size, num_rows, hidden, hidden, float(layer.residual_multiplier), 0, adapters},
        kUnnormed);
  multiply<Weight>({weights, x, weights.in_size, num_rows, nullptr, output, 1, 0, adapters}, kUnnormed);
  add_rows(layer, norm, num_rows, weights.out_size, output, hidden);
}

// x [num_rows, size] times the sigmoid of the gates.
template <typename Element>
void apply_gates(const Element* gates, int64_t num_rows, int64_t size, Element* x) {
  constexpr int64_t kRows = 8;  // a thread claims so many at a time
  Team::get().parallel_for(num_rows, kRows, [&](int64_t row) {
    const Element* own = gates + row * size;
    Element* to = x + row * size;
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(to + i, load(to + i) * sigmoid(load(own + i)));
    for (; i < size; ++i) from_float(to + i, to_float(to[i]) / (1 + std::exp(-to_float(own[i]))));
  });
}

template <typename Weight, typename Stored>
void run_layers(const PackedLayer* layers, int64_t num_layers, const PagedForward& forward, int64_t num_rows,
                const RotaryRows& rotary, const int32_t* row_adapters, const StateSegments* segments,
                Activation<Weight>* hidden) {
  typedef Activation<Weight> Element;
  const PackedLayer& first =
      *std::find_if(layers, layers + num_layers, [](const PackedLayer& layer) { return layer.state == nullptr; });
  const RowSizes sizes(layers, num_layers);
  const Shape shape{first.num_query_heads, first.num_kv_heads, first.head_dim, forward.page_size};
  const int64_t hidden_size = first.out.out_size;
  Element* heads = scratch(layer_scratch<Element>(), num_rows * scratch_row_size(layers, num_layers));
  Element* attended = heads + num_rows * sizes.heads;
  Element* inner = attended + num_rows * sizes.attended;
  Element* output = inner + num_rows * inner_size(layers, num_layers);
  LayoutAttention<Stored> attention(forward, shape, kElementType<Element>, heads, first.qkv.out_size, attended);
  std::fill(attended, inner, Element{});                                // padding rows are in no part
  for (int64_t number = 0, index = 0; number < num_layers; ++number) {  // index: of those with attention
    const PackedLayer& layer = layers[number];
    const auto adapters = [&](const LowRank* table) {
      return RowAdapters{table, table == nullptr ? nullptr : row_adapters};
    };
    multiply<Weight>({layer.qkv, hidden, hidden_size, num_rows, nullptr, heads, 1, 0, adapters(layer.qkv_adapters)},
                     layer.attention_norm);
    if (layer.state != nullptr) {
      toka_run_states(layer.state, segments, layer.states, kElementType<Element>, heads, num_rows, attended);
    } else {
      const LayerScores& scores = forward.scores[index];
      const CacheLayer<Stored> cache{(Stored*)forward.cache + scores.place * forward.layer_size, shape.num_kv_heads,
                                     shape.head_dim, shape.page_size, scores.blocks};
      // Store every row's keys and values before any row attends: a row may read blocks that another row of this
      // forward fills.
      rotate_and_store_heads(layer, cache, forward.kv_indices, attention.num_rows(), rotary, heads, hidden);
      attention.run(index++);
    }
    if (layer.gate != nullptr) {
      multiply<Weight>({*layer.gate, hidden, hidden_size, num_rows, nullptr, inner, 1, 0, adapters(nullptr)},
                       layer.attention_norm);
      apply_gates(inner, num_rows, layer.gate->out_size, attended);
    }
    const auto enter_mlp = [&] {
      if (layer.experts != nullptr)
        return run_experts<Weight>(*layer.experts, layer.mlp_norm, hidden, num_rows, nullptr, inner);
      multiply<Weight>(
          {layer.gate_up, hidden, hidden_size, num_rows, nullptr, inner, 1, 0, adapters(layer.gate_up_adapters)},
          layer.mlp_norm);
    };
    if (layer.is_parallel) enter_mlp();
    add_output<Weight>(layer, layer.out, adapters(layer.out_adapters), layer.attention_out_norm, attended, num_rows,
                       output, hidden);
    if (!layer.is_parallel) enter_mlp();
    if (layer.experts != nullptr)
      add_rows(layer, layer.mlp_out_norm, num_rows, hidden_size, inner, hidden);
    else
      add_output<Weight>(layer, layer.down, adapters(layer.down_adapters), layer.mlp_out_norm, inner, num_rows, output,
                         hidden);
  }
}

}  // namespace

TOKA_STRUCT_SIZE(PackedLayer)

// Runs hidden [num_rows, hidden size] through the layers, in place. cos_sin [num_rows, num_tables, head_dim].
// row_adapters [num_rows]: as in RowAdapters, or null. segments: of layers with states, or null. One has attention.
TOKA_EXPORT void toka_run_layers(const PackedLayer* layers, int64_t num_layers, const PagedForward* forward,
                                 int64_t num_rows, const float* cos_sin, int64_t num_tables,
                                 const int32_t* row_adapters, const StateSegments* segments, void* hidden) {
  dispatch_cache_type(forward->cache_type, [&](auto cache_tag) {
    dispatch_activation_type(layers->qkv.weight_type, [&](auto weight_tag) {
      typedef TypeOf<decltype(cache_tag)> Stored;
      typedef TypeOf<decltype(weight_tag)> Weight;
      run_layers<Weight, Stored>(layers, num_layers, *forward, num_rows, {cos_sin, num_tables}, row_adapters, segments,
                                 (Activation<Weight>*)hidden);
    });
  });
}

// Allocates and touches the memory that forwards of up to num_rows rows through these layers keep between calls.
TOKA_EXPORT void toka_reserve_forward(const PackedLayer* layers, int64_t num_layers, int64_t num_rows) {
  dispatch_activation_type(layers->qkv.weight_type, [&](auto tag) {
    typedef TypeOf<decltype(tag)> Weight;
    typedef Activation<Weight> Element;
    scratch(layer_scratch<Element>(), num_rows * scratch_row_size(layers, num_layers));
    reserve_normed_rows<Element>(num_rows, layers->qkv.in_size);
    for (const PackedLayer* layer = layers; layer < layers + num_layers; ++layer) {
      for (const PackedWeights* weights : {&layer->qkv, &layer->out}) reserve_rows(*weights, num_rows);
      if (layer->experts != nullptr) {
        reserve_experts<Weight>(*layer->experts, num_rows);
        continue;
      }
      for (const PackedWeights* weights : {&layer->gate_up, &layer->down}) reserve_rows(*weights, num_rows);
    }
  });
}
