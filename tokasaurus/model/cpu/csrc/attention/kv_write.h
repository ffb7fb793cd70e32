// Stores keys and values in the layout that the attention kernels read. For each KV head, a block holds its keys
// followed by its values: one contiguous read. Both come in groups of sixteen tokens, keys as [head size / E][16][E],
// values as [16 / E][head size][E], with E = kPair<Stored> (multiply_add.h). In an int8 cache, the scales follow: for
// each group, sixteen bfloat16 of keys and sixteen of values, a cache line.
#pragma once

#include "attention/int8_cache.h"
#include "simd/multiply_add.h"

// One layer of the cache: [blocks][kv heads][keys, values, scales].
template <typename Stored>
struct CacheLayer {
  static constexpr int64_t E = kPair<Stored>;

  Stored* cache;
  int64_t num_kv_heads, head_dim, page_size;
  const int32_t* blocks;  // as in LayerScores

  // What a block stores for a KV head.
  Stored* block_of(int64_t kv_index, int64_t head) const {
    const int64_t size = page_size * (2 * head_dim + kScaleElements<Stored>), block = kv_index / page_size;
    return cache + ((blocks == nullptr ? block : blocks[block]) * num_kv_heads + head) * size;
  }

  // The key group of a token; its value group starts page_size * head_dim elements later.
  Stored* key_group(int64_t kv_index, int64_t head) const {
    return block_of(kv_index, head) + kv_index % page_size / 16 * 16 * head_dim;
  }

  // The scale of a token's key in an int8 cache; that of its value is 16 numbers later.
  bfloat16* scale(int64_t kv_index, int64_t head) const {
    const int64_t offset = kv_index % page_size;
    return (bfloat16*)(block_of(kv_index, head) + 2 * page_size * head_dim) + offset / 16 * 32 + offset % 16;
  }

  // key and value: [kv heads][head size].
  template <typename Element>
  void write(int64_t kv_index, const Element* key, const Element* value) const {
    const int64_t offset = kv_index % page_size % 16;
    for (int64_t head = 0; head < num_kv_heads; ++head, key += head_dim, value += head_dim) {
      Stored* keys = key_group(kv_index, head);
      Stored* to = keys + offset * E;
      // With E = 2 or 4, so many neighbouring tokens share a lane of values: each writes its part.
      Stored* to_values = keys + (page_size + offset / E * E) * head_dim + offset % E;
      if constexpr (std::is_same_v<Stored, int8_t>) {
        alignas(64) int8_t codes[kMaxHeadDim];
        bfloat16* const scales = scale(kv_index, head);
        scales[0] = quantize_numbers(key, head_dim, codes);
        for (int64_t d = 0; d < head_dim; d += E) std::memcpy(to + d * 16, codes + d, E);
        scales[16] = quantize_numbers(value, head_dim, codes);
        for (int64_t d = 0; d < head_dim; ++d) to_values[d * E] = codes[d];
      } else {
        for (int64_t d = 0; d < head_dim; d += E)
          for (int64_t i = 0; i < E; ++i) convert(to + d * 16 + i, key[d + i]);
        for (int64_t d = 0; d < head_dim; ++d) convert(to_values + d * E, value[d]);
      }
    }
  }

  // Prefetches the cache lines that `write` will change.
  void prefetch(int64_t kv_index) const {
    constexpr int64_t kLine = kCacheLineBytes / sizeof(Stored);
    const int64_t first = kv_index % page_size % 16 / E * E;
    for (int64_t head = 0; head < num_kv_heads; ++head) {
      const Stored* keys = key_group(kv_index, head);
      for (int64_t at = 0; at < 16 * head_dim; at += kLine) __builtin_prefetch(keys + at, 1);
      const Stored* values = keys + (page_size + first) * head_dim;
      for (int64_t at = 0; at < E * head_dim; at += kLine) __builtin_prefetch(values + at, 1);
      if constexpr (std::is_same_v<Stored, int8_t>) __builtin_prefetch(scale(kv_index, head), 1);
    }
  }
};
