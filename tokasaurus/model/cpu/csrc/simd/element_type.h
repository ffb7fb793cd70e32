// Element types as Python names them, and templates called by them.
#pragma once

#include "simd/simd.h"

// ELEMENT_TYPES of library.py has them in this order.
enum ElementType : int64_t { kFloat32, kBfloat16, kFloat16 };

// body(a null pointer to the element type).
template <typename Body>
static inline void with_stored_type(int64_t type, const Body& body) {
  if (type == kBfloat16) return body((bfloat16*)nullptr);
  if (type == kFloat16) return body((float16*)nullptr);
  body((float*)nullptr);
}

// The same where float16 is not taken: activations and logits.
template <typename Body>
static inline void with_activation_type(int64_t type, const Body& body) {
  if (type == kBfloat16) return body((bfloat16*)nullptr);
  body((float*)nullptr);
}

template <typename Pointer>
using Pointee = std::remove_pointer_t<Pointer>;
