// Keys and values of any rows into one layer of the cache.

#include "kv_write.h"

namespace {

template <typename Element>
void write_kv(const CacheLayer<Element>& layer, const Element* key, const Element* value, int64_t key_stride,
              int64_t value_stride, const int64_t* token_places, int64_t num_tokens) {
  for (int64_t token = 0; token < num_tokens; ++token)
    layer.write(token_places[token], key + token * key_stride, value + token * value_stride);
}

}  // namespace

extern "C" {

void toka_write_kv(int64_t is_bfloat16, const void* key, const void* value, int64_t key_stride, int64_t value_stride,
                   const int64_t* token_places, int64_t num_tokens, void* cache, int64_t num_kv_heads,
                   int64_t head_dim, int64_t page_size) {
  if (is_bfloat16)
    write_kv(CacheLayer<bfloat16>{(bfloat16*)cache, num_kv_heads, head_dim, page_size}, (const bfloat16*)key,
             (const bfloat16*)value, key_stride, value_stride, token_places, num_tokens);
  else
    write_kv(CacheLayer<float>{(float*)cache, num_kv_heads, head_dim, page_size}, (const float*)key,
             (const float*)value, key_stride, value_stride, token_places, num_tokens);
}
}
