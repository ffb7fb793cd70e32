// Dot products of four bytes in each lane, summed in 32 bits.
#pragma once

#include "simd/simd.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_MATMUL_INT8)
#define TOKA_INT8_DOT 1
#else
#define TOKA_INT8_DOT 0
#endif

static TOKA_INLINE Ints broadcast_four(const void* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof four);
  return Ints{} + four;
}

#if TOKA_INT8_DOT || !defined(__AVX2__)

// Of each lane: sum + the products of its four unsigned bytes with four signed ones.
static TOKA_INLINE Ints dot_four(Ints sum, Ints codes, Ints x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return (Ints)vusdotq_s32((int32x4_t)sum, (uint8x16_t)codes, (int8x16_t)x);
#else
  for (int i = 0; i < 4; ++i) sum += (Ints)((UInts)codes >> 8 * i & 255) * (x << (24 - 8 * i) >> 24);
  return sum;
#endif
}

#endif
