// The multiply-add of gemm and attention: a vector of stored numbers (weights, or the KV cache) times one number of the
// other operand (x, queries, or softmax weights). All sums are float32.
//
// If the processor has an instruction that multiplies pairs of bfloat16 numbers and adds both products, stored bfloat16
// numbers are stored in pairs and the other operand is bfloat16 too. Otherwise, stored 16-bit numbers are widened when
// they are loaded and the other operand is float32.
#pragma once

#include "simd/simd.h"

// Stored numbers that lie together in a lane: those that it multiplies at a time. Codes of an int8 KV cache lie in
// fours, and are widened before they are multiplied.
template <typename Stored>
constexpr int kPair = std::is_same_v<Stored, int8_t>                          ? 4
                      : TOKA_BFLOAT16_DOT && std::is_same_v<Stored, bfloat16> ? 2
                                                                              : 1;

// The type of the other operand.
template <typename Stored>
using Activation = std::conditional_t<kPair<Stored> == 2, bfloat16, float>;

// A register of stored numbers, or of pairs of them, ready to be multiplied.
template <typename Stored>
using Operand = std::conditional_t<kPair<Stored> == 2, Ints, Floats>;

template <typename Stored>
static TOKA_INLINE Operand<Stored> load_operand(const Stored* from) {
  if constexpr (kPair<Stored> == 2)
    return load_vector<Ints>(from);
  else
    return load(from);
}

// Broadcasts one number of the other operand, or one pair, to every lane.
template <typename Stored>
static TOKA_INLINE Operand<Stored> broadcast_operand(const Activation<Stored>* x) {
  if constexpr (kPair<Stored> == 2) {
    int32_t both;
    std::memcpy(&both, x, sizeof both);
    return Ints{} + both;
  } else {
    return broadcast(*x);
  }
}

// Rounded once: GCC would round a product too where it thinks that a chain of sums is faster so, and a row's result
// would depend on the number of rows.
static TOKA_INLINE Floats multiply_add(Floats sum, Floats x, Floats stored) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)stored, (__m512)sum);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)stored, (__m256)sum);
#else
  return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)stored);
#endif
}

#if TOKA_BFLOAT16_DOT
static TOKA_INLINE Floats multiply_add(Floats sum, Ints x, Ints stored) {
#if defined(__AVX512BF16__)
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)stored);
#else
  return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)x, (bfloat16x8_t)stored);
#endif
}
#endif
