// Touches reserved memory in advance, because the system allocates each page at its first access.

#include <algorithm>
#include <cstdint>

#include "simd/simd.h"

namespace {

constexpr int64_t kPageBytes = 4096;      // the smallest page of any system
constexpr int64_t kChunkBytes = 2 << 20;  // of one area; a thread claims one chunk at a time

// An atomic "or" with zero: it writes to the page, but keeps the page's contents even if another thread changes them at
// the same time. The asm hides the zero from the compiler, which would otherwise remove the write.
void touch(char* page) {
  char zero = 0;
  asm volatile("" : "+r"(zero));
  __atomic_fetch_or(page, zero, __ATOMIC_RELAXED);
}

}  // namespace

// Touches every page of num_areas consecutive areas of area_bytes: a chunk of each area, then the next chunk of each.
// num_claimed: chunks claimed so far. Threads that pass the same counter divide the work; each returns when none is
// left.
TOKA_EXPORT void toka_touch(char* memory, int64_t num_areas, int64_t area_bytes, int64_t* num_claimed) {
  const int64_t num_chunks = (area_bytes + kChunkBytes - 1) / kChunkBytes * num_areas;
  for (;;) {
    const int64_t chunk = __atomic_fetch_add(num_claimed, 1, __ATOMIC_RELAXED);
    if (chunk >= num_chunks) return;
    char* area = memory + chunk % num_areas * area_bytes;
    const int64_t begin = chunk / num_areas * kChunkBytes, end = std::min(begin + kChunkBytes, area_bytes);
    for (int64_t offset = begin; offset < end; offset += kPageBytes) touch(area + offset);
    touch(area + end - 1);  // the last page may begin after the last offset
  }
}
