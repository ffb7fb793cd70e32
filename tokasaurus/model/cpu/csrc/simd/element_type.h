// Element types as Python numbers them, and the choice of a template's element type at run time.
#pragma once

#include "simd/simd.h"

// In the order of KV_CACHE_DTYPES in bindings.py.
enum ElementType : int64_t { kFloat32, kBfloat16, kFloat16 };

// Calls body with a null pointer to the element type.
template <typename Body>
static inline void with_stored_type(int64_t type, const Body& body) {
  if (type == kBfloat16) return body((bfloat16*)nullptr);
  if (type == kFloat16) return body((float16*)nullptr);
  body((float*)nullptr);
}

// The same for activations and logits, which are never float16.
template <typename Body>
static inline void with_activation_type(int64_t type, const Body& body) {
  if (type == kBfloat16) return body((bfloat16*)nullptr);
  body((float*)nullptr);
}

template <typename Pointer>
using Pointee = std::remove_pointer_t<Pointer>;
