// Memory that kernels keep between calls.
#pragma once

#include <cstdint>
#include <new>
#include <vector>

// Memory from the start of a cache line on: vectors, and rows of tiles, that cross from one line to the next take twice
// as long to load.
template <typename Element>
struct CacheLineAllocator {
  typedef Element value_type;
  static constexpr std::align_val_t kAlignment{64};

  CacheLineAllocator() = default;
  template <typename Other>
  CacheLineAllocator(const CacheLineAllocator<Other>&) {}

  Element* allocate(size_t count) { return (Element*)operator new(count * sizeof(Element), kAlignment); }
  void deallocate(Element* memory, size_t) { operator delete(memory, kAlignment); }

  template <typename Other>
  bool operator==(const CacheLineAllocator<Other>&) const {
    return true;
  }
  template <typename Other>
  bool operator!=(const CacheLineAllocator<Other>&) const {
    return false;
  }
};

template <typename Element>
using ScratchMemory = std::vector<Element, CacheLineAllocator<Element>>;

// At least `size` elements of `memory`, which grows as needed.
template <typename Element>
Element* scratch(ScratchMemory<Element>& memory, int64_t size) {
  if (int64_t(memory.size()) < size) memory.resize(size);
  return memory.data();
}
