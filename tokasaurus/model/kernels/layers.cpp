// What a decoder layer computes before and behind its attention; token embedding, and single products.

#include "products.h"

// One layer as layer_kernels.PackedLayer holds it. Norms' weights are of the weights' type; the query and key norms,
// [head_dim], are null where the model has none.
struct PackedLayer {
  PackedWeights qkv, out, gate_up, down;
  const void *attention_norm, *mlp_norm, *query_norm, *key_norm;
  int64_t num_query_heads, num_kv_heads, head_dim;
  double eps;
};

namespace {

template <typename Element>
void multiply(const PackedWeights& weights, const Element* x, int64_t x_stride, int64_t num_rows,
              const void* norm_weight, double eps, const Element* residual, Element* out) {
  multiply(Product<Element>{weights, x, x_stride, num_rows, residual, out}, (const Element*)norm_weight, float(eps));
}

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

// heads [num_rows, query, key and value heads, head_dim]; cos_sin [num_rows, head_dim].
template <typename Element>
void before_attention(const PackedLayer& layer, const Element* hidden, int64_t num_rows, const float* cos_sin,
                      Element* heads) {
  constexpr int64_t kRows = 16;  // of one thread at a time
  multiply<Element>(layer.qkv, hidden, layer.qkv.in_size, num_rows, layer.attention_norm, layer.eps, nullptr, heads);
  const int64_t num_rotated = layer.num_query_heads + layer.num_kv_heads, head_dim = layer.head_dim;
  Team::get().share(num_rows, kRows, [&](int64_t row) {
    for (int64_t index = 0; index < num_rotated; ++index) {
      Element* head = heads + row * layer.qkv.out_size + index * head_dim;
      const void* norm = index < layer.num_query_heads ? layer.query_norm : layer.key_norm;
      if (norm != nullptr) rms_norm(head, (const Element*)norm, float(layer.eps), head_dim, head);
      rotate(head, head_dim, cos_sin + row * head_dim);
    }
  });
}

// attended [num_rows, query heads, head_dim], added by its projection to hidden, which then passes the feed-forward.
template <typename Element>
void after_attention(const PackedLayer& layer, const Element* attended, int64_t num_rows, Element* hidden) {
  static std::vector<Element> memory;
  const int64_t hidden_size = layer.out.out_size, inner_size = layer.gate_up.out_size;
  Element* inner = scratch(memory, num_rows * inner_size);
  multiply<Element>(layer.out, attended, layer.out.in_size, num_rows, nullptr, 0, hidden, hidden);
  multiply<Element>(layer.gate_up, hidden, hidden_size, num_rows, layer.mlp_norm, layer.eps, nullptr, inner);
  multiply<Element>(layer.down, inner, inner_size, num_rows, nullptr, 0, hidden, hidden);
}

template <typename Element>
void embed(const PackedWeights& weights, const int64_t* token_ids, int64_t num_tokens, Element* out) {
  constexpr int64_t kTokens = 16;  // of one thread at a time
  const int64_t in_size = weights.in_size, pair = kPair<Element>;
  Team::get().share(num_tokens, kTokens, [&](int64_t index) {
    const int64_t token = token_ids[index];
    const Element* from =
        (const Element*)weights.panels + token / kPanel * in_size * kPanel + token % kPanel * pair;
    Element* to = out + index * in_size;
    for (int64_t i = 0; i < in_size; i += pair, from += kPanel * pair)
      for (int64_t j = 0; j < pair; ++j) to[i + j] = from[j];
  });
}

}  // namespace

extern "C" {

// out = x, normed first where norm_weight is not null, times weights, plus bias; gated where the weights are.
void toka_multiply(const PackedWeights* weights, const void* x, int64_t x_stride, int64_t num_rows,
                   const void* norm_weight, double eps, void* out) {
  if (weights->is_bfloat16)
    multiply<bfloat16>(*weights, (const bfloat16*)x, x_stride, num_rows, norm_weight, eps, nullptr, (bfloat16*)out);
  else
    multiply<float>(*weights, (const float*)x, x_stride, num_rows, norm_weight, eps, nullptr, (float*)out);
}

// The rows `token_ids` of the weights that were packed -> out [num_tokens, in_size].
void toka_embed(const PackedWeights* weights, const int64_t* token_ids, int64_t num_tokens, void* out) {
  if (weights->is_bfloat16)
    embed(*weights, token_ids, num_tokens, (bfloat16*)out);
  else
    embed(*weights, token_ids, num_tokens, (float*)out);
}

void toka_before_attention(const PackedLayer* layer, const void* hidden, int64_t num_rows, const float* cos_sin,
                           void* heads) {
  if (layer->qkv.is_bfloat16)
    before_attention(*layer, (const bfloat16*)hidden, num_rows, cos_sin, (bfloat16*)heads);
  else
    before_attention(*layer, (const float*)hidden, num_rows, cos_sin, (float*)heads);
}

void toka_after_attention(const PackedLayer* layer, const void* attended, int64_t num_rows, void* hidden) {
  if (layer->qkv.is_bfloat16)
    after_attention(*layer, (const bfloat16*)attended, num_rows, (bfloat16*)hidden);
  else
    after_attention(*layer, (const float*)attended, num_rows, (float*)hidden);
}
}
