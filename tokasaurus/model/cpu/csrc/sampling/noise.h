// The noise of sampling: a hash of (sequence, position, token id). sampling/noise.py defines it.
#pragma once

#include <cstdint>

#include "simd/simd_math.h"

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

static inline uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// The two keys of the token to draw at a position, as position_keys. sequence_key: from sequence_keys.
static inline void set_position_keys(uint64_t sequence_key, int64_t position, int64_t keys[2]) {
  const uint64_t mixed = mix64(sequence_key + (uint64_t(position) + 1) * kGolden);
  keys[0] = int64_t(mixed & 0xFFFFFFFFu);
  keys[1] = int64_t(mixed >> 32);
}

constexpr float kLargestNoise = 22.88f;  // -log(2^-33)

static inline UInts mix32(UInts x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

static inline Floats uniform(UInts token_ids, uint32_t first_key, uint32_t second_key) {
  const UInts hashed = mix32(mix32(token_ids * 0x9E3779B1u + first_key) ^ second_key);
  return (__builtin_convertvector(hashed, Floats) + 0.5f) * 0x1p-32f;
}

static inline Floats gumbel(UInts token_ids, uint32_t first_key, uint32_t second_key) {
  const Floats u = uniform(token_ids, first_key, second_key);
  // log1p(-u) from the log of the rounded 1 - u, corrected for that rounding (Kahan).
  const Floats one_minus_u = 1.0f - u, rounded_u = 1.0f - one_minus_u;
  const Floats smallest = broadcast(0x1p-126f);
  Floats exponential = -log_positive(max(one_minus_u, smallest)) * u / max(rounded_u, smallest);
  exponential = rounded_u > 0.0f ? exponential : u;
  return -log_positive(exponential);
}

// An upper bound of each token's noise, from the bits of its uniform u: the noise is at most -log(u), and the bits read
// as an integer give a lower bound of log2(u).
static inline Floats gumbel_upper_bound(UInts token_ids, uint32_t first_key, uint32_t second_key) {
  const Ints bits = (Ints)uniform(token_ids, first_key, second_key);
  return (127 * kLn2 + 1e-3f) - __builtin_convertvector(bits, Floats) * (kLn2 * 0x1p-23f);
}
