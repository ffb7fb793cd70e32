// Numbers of an int8 KV cache: x = scale * code, codes from -127 to 127, with a scale for each token and KV head, of
// keys and of values. Codes lie in fours whatever the processor, so that a 32-bit lane has four of one token's keys, or
// of four tokens' values.
#pragma once

#include "simd/element_type.h"
#include "simd/multiply_add.h"
#include "simd/simd_math.h"

constexpr int kMaxHeadDim = 256;

// Elements of a token and KV head beside its keys and values: two scales of 16 bits.
template <typename Stored>
constexpr int64_t kScaleElements = std::is_same_v<Stored, int8_t> ? 4 : 0;

// Rounds x [count], a multiple of 16, to codes; returns their scale. The scale is the largest magnitude / 127, rounded
// up to 16 bits so that no code exceeds 127. Magnitudes below 1e-30 count as zeros.
template <typename Element>
static inline bfloat16 quantize_numbers(const Element* x, int64_t count, int8_t* codes) {
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  Floats most{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats part = load(x + i);
    most = max(part > 0.0f ? part : -part, most);
  }
  const float largest = max(most) / 127;
  if (largest < 1e-30f) {
    std::memset(codes, 0, count);
    return {};
  }
  uint32_t bits;
  std::memcpy(&bits, &largest, sizeof bits);
  const bfloat16 scale{uint16_t((bits + 0xFFFF) >> 16)};
  const Floats divisor = broadcast(to_float(scale));
  for (int64_t i = 0; i < count; i += kLanes) {
    const Bytes narrow =
        __builtin_convertvector(__builtin_convertvector(round_to_int(load(x + i) / divisor), Ints), Bytes);
    std::memcpy(codes + i, &narrow, sizeof narrow);
  }
  return scale;
}

// Codes [num_rows][width][4], width a multiple of 16, as operands of another type (multiply_add.h): of a type with
// pairs [num_rows * 2][width][2], else [num_rows * 4][width]. For each line, prefetches the corresponding line of
// `ahead`.
template <typename Wide>
static inline void widen_codes(const int8_t* from, const int8_t* ahead, int64_t num_rows, int64_t width, Wide* to) {
  constexpr int E = kPair<Wide>;
  for (int64_t row = 0; row < num_rows; ++row, to += 4 * width) {
    for (int64_t i = 0; i < width; i += kLanes, from += 4 * kLanes, ahead += 4 * kLanes) {
      __builtin_prefetch(ahead, 0, 2);
      const Ints four = load_vector<Ints>(from);
      repeat<4 / E>([&](auto part) TOKA_LAMBDA {
        const auto number = [&](auto index)
                                TOKA_LAMBDA { return __builtin_convertvector(four << (24 - 8 * index) >> 24, Floats); };
        if constexpr (E == 2) {  // eight bits are exact in the upper half of a float
          const auto first = std::integral_constant<int, 2 * part>{},
                     second = std::integral_constant<int, 2 * part + 1>{};
          const UInts pair = ((UInts)number(first) >> 16) | ((UInts)number(second) & 0xFFFF0000);
          std::memcpy(to + (part * width + i) * 2, &pair, sizeof pair);
        } else {
          store(to + part * width + i, number(part));
        }
      });
    }
  }
}
