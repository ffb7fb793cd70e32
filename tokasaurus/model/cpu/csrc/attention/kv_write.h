// Stores keys and values in the layout that the attention kernels read. For each KV head, a block holds its keys
// followed by its values: one contiguous read. Both come in groups of sixteen tokens, keys as [head size / E][16][E],
// values as [16 / E][head size][E], with E = kPair<Stored> (multiply_add.h).
#pragma once

#include "simd/multiply_add.h"

// One layer of the cache: [blocks][kv heads][keys, values][page size][head size].
template <typename Stored>
struct CacheLayer {
  static constexpr int64_t E = kPair<Stored>;

  Stored* cache;
  int64_t num_kv_heads, head_dim, page_size;

  // The key group of a token; its value group starts page_size * head_dim elements later.
  Stored* key_group(int64_t kv_index, int64_t head) const {
    const int64_t block = kv_index / page_size, offset = kv_index % page_size;
    return cache + ((block * num_kv_heads + head) * 2 * page_size + offset / 16 * 16) * head_dim;
  }

  // key and value: [kv heads][head size].
  template <typename Element>
  void write(int64_t kv_index, const Element* key, const Element* value) const {
    const int64_t offset = kv_index % page_size % 16;
    for (int64_t head = 0; head < num_kv_heads; ++head, key += head_dim, value += head_dim) {
      Stored* keys = key_group(kv_index, head);
      Stored* to = keys + offset * E;
      for (int64_t d = 0; d < head_dim; d += E)
        for (int64_t i = 0; i < E; ++i) convert(to + d * 16 + i, key[d + i]);
      // With E = 2, two neighbouring tokens share a pair: each writes its half.
      to = keys + (page_size + offset / E * E) * head_dim + offset % E;
      for (int64_t d = 0; d < head_dim; ++d) convert(to + d * E, value[d]);
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
    }
  }
};
