// Stores keys and values where the attention kernel expects them. A block holds, per KV head, its keys and then its
// values: one run of memory that is read in one go. Both come in groups of sixteen tokens, keys as
// [head size / E][16][E], values as [16 / E][head size][E], E being the elements of a word (attention_words.h).

#include "attention_words.h"

namespace {

inline void write_value(const float* from, int64_t offset, int64_t head_dim, float* group) {
  std::memcpy(group + offset * head_dim, from, head_dim * sizeof(float));
}

// Two tokens share a word: each replaces its half.
inline void write_value(const bfloat16* from, int64_t offset, int64_t head_dim, bfloat16* group) {
  bfloat16* to = group + offset / 2 * 2 * head_dim + offset % 2;
  for (int64_t d = 0; d < head_dim; ++d) to[2 * d] = from[d];
}

template <typename Element>
void write_kv(const Element* key, const Element* value, int64_t key_stride, int64_t value_stride,
              const int64_t* token_places, int64_t num_tokens, int64_t num_kv_heads, int64_t head_dim,
              int64_t page_size, Element* cache) {
  typedef typename Words<Element>::Word Word;
  constexpr int64_t kElements = Words<Element>::kElements;
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int64_t block = token_places[token] / page_size;
    const int64_t offset = token_places[token] % page_size;
    for (int64_t head = 0; head < num_kv_heads; ++head) {
      Element* keys = cache + ((block * num_kv_heads + head) * 2 * page_size + offset / 16 * 16) * head_dim;
      const Element* from = key + token * key_stride + head * head_dim;
      Element* to = keys + offset % 16 * kElements;
      for (int64_t d = 0; d < head_dim; d += kElements) std::memcpy(to + d * 16, from + d, sizeof(Word));
      write_value(value + token * value_stride + head * head_dim, offset % 16, head_dim, keys + page_size * head_dim);
    }
  }
}

}  // namespace

extern "C" {

void toka_write_kv(int64_t is_bfloat16, const void* key, const void* value, int64_t key_stride, int64_t value_stride,
                   const int64_t* token_places, int64_t num_tokens, void* cache, int64_t num_kv_heads,
                   int64_t head_dim, int64_t page_size) {
  if (is_bfloat16)
    write_kv((const bfloat16*)key, (const bfloat16*)value, key_stride, value_stride, token_places, num_tokens,
             num_kv_heads, head_dim, page_size, (bfloat16*)cache);
  else
    write_kv((const float*)key, (const float*)value, key_stride, value_stride, token_places, num_tokens, num_kv_heads,
             head_dim, page_size, (float*)cache);
}
}
