// Keys and values of any rows into one layer of the cache.

#include "kv_write.h"

#include "element_type.h"

// key, value: [num_tokens, kv heads, head_dim] of activation_type, rows apart by the strides. cache: of cache_type.
TOKA_EXPORT void toka_write_kv(int64_t activation_type, int64_t cache_type, const void* key, const void* value,
                               int64_t key_stride, int64_t value_stride, const int64_t* kv_indices, int64_t num_tokens,
                               void* cache, int64_t num_kv_heads, int64_t head_dim, int64_t page_size) {
  with_stored_type(cache_type, [&](auto* stored) {
    with_activation_type(activation_type, [&](auto* element) {
      typedef Pointee<decltype(stored)> Stored;
      typedef Pointee<decltype(element)> Element;
      const CacheLayer<Stored> layer{(Stored*)cache, num_kv_heads, head_dim, page_size};
      for (int64_t token = 0; token < num_tokens; ++token)
        layer.write(kv_indices[token], (const Element*)key + token * key_stride,
                    (const Element*)value + token * value_stride);
    });
  });
}
