// Memory that is reserved is given by the system page by page, when it is first touched.

#include <algorithm>
#include <cstdint>

#include "simd/simd.h"

namespace {

constexpr int64_t kPageBytes = 4096;      // the smallest of any system
constexpr int64_t kChunkBytes = 2 << 20;  // of one area that a thread takes at a time

// What is written meanwhile survives: each page gets an atomic "or" with zero, which no compiler may see to be zero.
void touch(char* page) {
  char zero = 0;
  asm volatile("" : "+r"(zero));
  __atomic_fetch_or(page, zero, __ATOMIC_RELAXED);
}

}  // namespace

// Touches every page of num_areas areas of area_bytes, one behind the other: a chunk of each area, then the next chunk of
// each. num_taken: chunks that were taken before; threads that share it share the work, and each returns when none is left.
TOKA_EXPORT void toka_touch(char* memory, int64_t num_areas, int64_t area_bytes, int64_t* num_taken) {
  const int64_t num_chunks = (area_bytes + kChunkBytes - 1) / kChunkBytes * num_areas;
  for (;;) {
    const int64_t chunk = __atomic_fetch_add(num_taken, 1, __ATOMIC_RELAXED);
    if (chunk >= num_chunks) return;
    char* area = memory + chunk % num_areas * area_bytes;
    const int64_t begin = chunk / num_areas * kChunkBytes, end = std::min(begin + kChunkBytes, area_bytes);
    for (int64_t place = begin; place < end; place += kPageBytes) touch(area + place);
    touch(area + end - 1);  // the last page may begin behind the last step
  }
}
