// All decoder layers of one forward in one call: calling each part of each layer from Python takes as long as computing
// it where rows are few.

#include "attention_layout.h"
#include "kv_write.h"
#include "products.h"

// One layer as forward_kernels.PackedLayers holds it. Norms' weights are of the weights' type; the query and key norms,
// [head_dim], are null where the model has none.
struct PackedLayer {
  PackedWeights qkv, out, gate_up, down;
  const void *attention_norm, *mlp_norm, *query_norm, *key_norm;
  int64_t num_query_heads, num_kv_heads, head_dim;
  double eps;
};

namespace {

// cos_sin: [head_dim], cosines before sines.
template <typename Element>
void rotate(Element* head, int64_t head_dim, const float* cos_sin) {
  const int64_t half = head_dim / 2;
  int64_t i = 0;
  for (; i + 16 <= half; i += 16) {
    const f32x16 cos = load16(cos_sin + i), sin = load16(cos_sin + half + i);
    const f32x16 first = load16(head + i), second = load16(head + half + i);
    store_rounded(head + i, first * cos - second * sin);
    store_rounded(head + half + i, second * cos + first * sin);
  }
  for (; i < half; ++i) {
    const float first = to_float(head[i]), second = to_float(head[half + i]);
    from_float(head + i, first * cos_sin[i] - second * cos_sin[half + i]);
    from_float(head + half + i, second * cos_sin[i] + first * cos_sin[half + i]);
  }
}

// Norms and rotates queries and keys, and stores keys and values, of the rows that are no padding. heads [num_rows, query, key and value heads, head_dim];
// cos_sin [num_rows, head_dim].
template <typename Element>
void place_heads(const PackedLayer& layer, const CacheLayer<Element>& cache, const int64_t* token_places,
                 int64_t num_rows, const float* cos_sin, Element* heads) {
  constexpr int64_t kRows = 16;   // of one thread at a time
  constexpr int64_t kAhead = 2;  // rows whose places in the cache are on their way
  const PhaseTimer timer(kHeads);
  const int64_t head_dim = layer.head_dim, num_rotated = layer.num_query_heads + layer.num_kv_heads;
  Team::get().share(num_rows, kRows, [&](int64_t row) {
    if (row + kAhead < num_rows) cache.prefetch(token_places[row + kAhead]);
    Element* own = heads + row * layer.qkv.out_size;
    for (int64_t index = 0; index < num_rotated; ++index) {
      Element* head = own + index * head_dim;
      const void* norm = index < layer.num_query_heads ? layer.query_norm : layer.key_norm;
      if (norm != nullptr) rms_norm(head, (const Element*)norm, float(layer.eps), head_dim, head);
      rotate(head, head_dim, cos_sin + row * head_dim);
    }
    cache.write(token_places[row], own + layer.num_query_heads * head_dim, own + num_rotated * head_dim);
  });
}

template <typename Element>
void run_layers(const PackedLayer* layers, int64_t num_layers, const PagedForward& forward, int64_t num_rows,
                const float* cos_sin, Element* hidden) {
  const PackedLayer& first = layers[0];
  const Shape shape{first.num_query_heads, first.num_kv_heads, first.head_dim, forward.page_size};
  const int64_t hidden_size = first.out.out_size, query_size = first.out.in_size, inner_size = first.gate_up.out_size;
  static std::vector<Element> memory;
  Element* heads = scratch(memory, num_rows * (first.qkv.out_size + query_size + inner_size));
  Element* attended = heads + num_rows * first.qkv.out_size;
  Element* inner = attended + num_rows * query_size;
  LayoutAttention<Element> attention(forward, shape, heads, first.qkv.out_size, attended);
  std::fill(attended, inner, Element{});  // rows of padding are in no part
  for (int64_t index = 0; index < num_layers; ++index) {
    const PackedLayer& layer = layers[index];
    const CacheLayer<Element> cache{(Element*)forward.cache + index * forward.layer_size, shape.num_kv_heads,
                                    shape.head_dim, shape.page_size};
    multiply<Element>({layer.qkv, hidden, hidden_size, num_rows, nullptr, heads}, layer.attention_norm, layer.eps);
    // Every row's keys and values, before any row attends: a row may read blocks that another row of this forward fills.
    place_heads(layer, cache, forward.token_places, attention.num_rows(), cos_sin, heads);
    attention.run(index);
    multiply<Element>({layer.out, attended, query_size, num_rows, hidden, hidden}, nullptr, 0);
    multiply<Element>({layer.gate_up, hidden, hidden_size, num_rows, nullptr, inner}, layer.mlp_norm, layer.eps);
    multiply<Element>({layer.down, inner, inner_size, num_rows, hidden, hidden}, nullptr, 0);
  }
}

}  // namespace

extern "C" {

// hidden [num_rows, hidden size] through the layers, in place.
void toka_run_layers(const PackedLayer* layers, int64_t num_layers, const PagedForward* forward, int64_t num_rows,
                     const float* cos_sin, void* hidden) {
  if (layers->qkv.is_bfloat16)
    run_layers(layers, num_layers, *forward, num_rows, cos_sin, (bfloat16*)hidden);
  else
    run_layers(layers, num_layers, *forward, num_rows, cos_sin, (float*)hidden);
}
}
