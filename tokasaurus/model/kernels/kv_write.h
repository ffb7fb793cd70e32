// Stores keys and values where the attention kernel expects them. A block holds, per KV head, its keys and then its
// values: one run of memory that is read in one go. Both come in groups of sixteen tokens, keys as
// [head size / E][16][E], values as [16 / E][head size][E], E being the elements of a word (attention_words.h).
#pragma once

#include "attention_words.h"

// One layer of the cache: [blocks][kv heads][keys, values][page size][head size].
template <typename Element>
struct CacheLayer {
  Element* cache;
  int64_t num_kv_heads, head_dim, page_size;

  // The group of keys that a token belongs to; its group of values lies page_size * head_dim behind.
  Element* key_group(int64_t place, int64_t head) const {
    const int64_t block = place / page_size, offset = place % page_size;
    return cache + ((block * num_kv_heads + head) * 2 * page_size + offset / 16 * 16) * head_dim;
  }

  // key and value: [kv heads][head size].
  void write(int64_t place, const Element* key, const Element* value) const {
    typedef typename Words<Element>::Word Word;
    constexpr int64_t E = Words<Element>::kElements;
    const int64_t offset = place % page_size % 16;
    for (int64_t head = 0; head < num_kv_heads; ++head, key += head_dim, value += head_dim) {
      Element* keys = key_group(place, head);
      Element* to = keys + offset * E;
      for (int64_t d = 0; d < head_dim; d += E) std::memcpy(to + d * 16, key + d, sizeof(Word));
      write_value(value, offset, keys + page_size * head_dim);
    }
  }

  // Asks for the memory that `write` will change: a line for each word of the key.
  void prefetch(int64_t place) const {
    constexpr int64_t kLine = 64 / sizeof(Element);
    const int64_t pair = place % page_size % 16 / Words<Element>::kElements * Words<Element>::kElements;
    for (int64_t head = 0; head < num_kv_heads; ++head) {
      const Element* keys = key_group(place, head);
      for (int64_t at = 0; at < 16 * head_dim; at += kLine) __builtin_prefetch(keys + at, 1);
      const Element* values = keys + (page_size + pair) * head_dim;
      for (int64_t at = 0; at < Words<Element>::kElements * head_dim; at += kLine) __builtin_prefetch(values + at, 1);
    }
  }

 private:
  void write_value(const float* from, int64_t offset, float* group) const {
    std::memcpy(group + offset * head_dim, from, head_dim * sizeof(float));
  }

  // Two tokens share a word: each replaces its half.
  void write_value(const bfloat16* from, int64_t offset, bfloat16* group) const {
    bfloat16* to = group + offset / 2 * 2 * head_dim + offset % 2;
    for (int64_t d = 0; d < head_dim; ++d) to[2 * d] = from[d];
  }
};
