// The element types of tensors from Python, and the choice of a template's element type at run time.
#pragma once

#include "simd/simd.h"

// The codes that Python passes: ELEMENT_CODES in bindings.py.
enum ElementType : int64_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kInt8 = 3 };

// The code of a C++ type.
template <typename Element>
constexpr ElementType kElementType = kFloat32;
template <>
inline constexpr ElementType kElementType<bfloat16> = kBfloat16;
template <>
inline constexpr ElementType kElementType<float16> = kFloat16;
template <>
inline constexpr ElementType kElementType<int8_t> = kInt8;

// Passes a type as an argument; TypeOf reads it back.
template <typename T>
struct Tag {
  typedef T Type;
};

template <typename SomeTag>
using TypeOf = typename SomeTag::Type;

// Calls body(Tag<Element>{}) for the one of the given types that has this code. Precondition: one of them has it.
template <typename First, typename... Others, typename Body>
static inline void dispatch_element(int64_t code, const Body& body) {
  if constexpr (sizeof...(Others) > 0)
    if (code != kElementType<First>) return dispatch_element<Others...>(code, body);
  body(Tag<First>{});
}

// For KV caches.
template <typename Body>
static inline void dispatch_cache_type(int64_t code, const Body& body) {
  dispatch_element<float, bfloat16, float16, int8_t>(code, body);
}

// For weights, activations and logits, which are never float16 or int8.
template <typename Body>
static inline void dispatch_activation_type(int64_t code, const Body& body) {
  dispatch_element<float, bfloat16>(code, body);
}
