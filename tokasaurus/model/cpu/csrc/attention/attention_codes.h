// The two gemms of attention over a group of an int8 cache for a few queries, in integers: codes of the cache times
// bytes of the queries and of the weights.
//
// A query or a row of weights is a scale times integers of 16 bits, each a byte above another one: an error of 2^-16 of
// the largest number, where a code of the cache has one of 2^-8. Source of the products: gemm/int8_tile.h.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention/attention_tile.h"
#include "attention/int8_cache.h"
#include "simd/dot_four.h"

#if TOKA_INT8_DOT

// A query as integers: 256 * upper + lower, both signed.
struct CodedQuery {
  int8_t upper[kMaxHeadDim], lower[kMaxHeadDim];
  float scale;
  int32_t sum;  // 128 times that of the integers: codes are multiplied as code + 128, which has no sign

  // head_dim: a multiple of 16. If a number is not finite, the scale is not either.
  template <typename Element>
  void set(const Element* query, int64_t head_dim) {
    typedef int8_t Bytes __attribute__((vector_size(kLanes)));
    Floats most{}, nothing{};
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      const Floats numbers = load(query + d);
      most = max(numbers > 0.0f ? numbers : -numbers, most);
      nothing += numbers * 0.0f;
    }
    const float largest = max(most), inverse = largest < 1e-30f ? 0 : 127 * 256 / largest;
    scale = largest / (127 * 256) + ::sum(nothing);
    Ints total{};
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      const Floats scaled = load(query + d) * inverse;
      const Ints numbers = __builtin_convertvector(round_to_int(scaled == scaled ? scaled : Floats{}), Ints);
      const Ints above = (numbers + 128) >> 8;
      const Bytes high = __builtin_convertvector(above, Bytes),
                  low = __builtin_convertvector(numbers - above * 256, Bytes);
      std::memcpy(upper + d, &high, sizeof high);
      std::memcpy(lower + d, &low, sizeof low);
      total += numbers;
    }
    sum = int32_t(128 * ::sum(total));
  }
};

// scores[0..N)[kChunk], of a group's sixteen tokens. keys: codes [D / 4][16 tokens][4]; for each line, the
// corresponding one of `ahead` is prefetched. scales: of the keys. S as in score_groups.
template <int N, int S>
TOKA_NOINLINE static void score_codes(const CodedQuery* queries, const int8_t* keys, const int8_t* ahead,
                                      const bfloat16* scales, int64_t head_dim, float* scores) {
  const Ints signs = Ints{} + int32_t(0x80808080);
  const auto add_products = [&](int8_t (CodedQuery::*bytes)[kMaxHeadDim], bool prefetches,
                                Ints(&total)[N][kGroupVectors]) TOKA_LAMBDA {
    Ints sums[S][N][kGroupVectors] = {};
    for (int64_t d = 0; d < head_dim; d += 4 * S)
      repeat<S>([&](auto s) TOKA_LAMBDA {
        const int64_t from = d + 4 * s;
        Ints codes[kGroupVectors];
        repeat<kGroupVectors>(
            [&](auto j) TOKA_LAMBDA { codes[j] = load_vector<Ints>(keys + from * kGroup + 4 * kLanes * j) ^ signs; });
        if (prefetches) __builtin_prefetch(ahead + from * kGroup, 0, 2);
        repeat<N>([&](auto i) TOKA_LAMBDA {
          const Ints four = broadcast_four(queries[i].*bytes + from);
          repeat<kGroupVectors>([&](auto j) TOKA_LAMBDA { sums[s][i][j] = dot_four(sums[s][i][j], codes[j], four); });
        });
      });
    repeat<N>([&](auto i) TOKA_LAMBDA {
      repeat<kGroupVectors>([&](auto j) TOKA_LAMBDA {
        total[i][j] = sums[0][i][j];
        repeat<S - 1>([&](auto s) TOKA_LAMBDA { total[i][j] += sums[s + 1][i][j]; });
      });
    });
  };
  Ints upper[N][kGroupVectors], lower[N][kGroupVectors];
  add_products(&CodedQuery::upper, true, upper);
  add_products(&CodedQuery::lower, false, lower);
  repeat<N>([&](auto i) TOKA_LAMBDA {
    repeat<kGroupVectors>([&](auto j) TOKA_LAMBDA {
      // Each sum is at most 2^31 in magnitude before the 128s are taken off, and wraps around to what is right.
      const UInts sum = (UInts)upper[i][j] * 256 + (UInts)lower[i][j] - uint32_t(queries[i].sum);
      const Floats scale = load(scales + j * kLanes) * queries[i].scale;
      store(scores + i * kChunk + j * kLanes, to_floats((Ints)sum) * scale);
    });
  });
}

// A group's weights as integers: 256 * upper + lower, both without a sign.
struct CodedWeights {
  uint8_t upper[kGroup], lower[kGroup];
  float scale;

  // weights [kGroup], none below 0. scales: of the values; that of a token without weight may be anything, also NaN.
  void set(const float* weights, const bfloat16* scales) {
    Floats numbers[kGroupVectors], largest{};
    for (int j = 0; j < kGroupVectors; ++j) {
      numbers[j] = load(weights + j * kLanes) * load(scales + j * kLanes);
      largest = max(numbers[j], largest);
    }
    const float most = max(largest);
    scale = most / 65535;
    const float inverse = most < 1e-30f ? 0 : 1 / scale;
    for (int j = 0; j < kGroupVectors; ++j) {
      typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
      const Floats scaled = numbers[j] * inverse + 0.5f;
      const Ints number = __builtin_convertvector(scaled == scaled ? scaled : Floats{}, Ints);
      const Bytes high = __builtin_convertvector(number >> 8, Bytes),
                  low = __builtin_convertvector(number & 255, Bytes);
      std::memcpy(upper + j * kLanes, &high, sizeof high);
      std::memcpy(lower + j * kLanes, &low, sizeof low);
    }
  }
};

// output[0..N)[column..column + kLanes V) += weights times a group's values, codes [4][head_dim][4 tokens].
template <int N, int V>
TOKA_NOINLINE static void add_weighted_codes(const CodedWeights* weights, const int8_t* values, const int8_t* ahead,
                                             int64_t head_dim, int64_t column, float* output) {
  Ints upper[N][V] = {}, lower[N][V] = {};
  for (int four = 0; four < kGroup / 4; ++four) {
    const int64_t from = 4 * (four * head_dim + column);
    Ints codes[V];
    repeat<V>([&](auto j) TOKA_LAMBDA {
      codes[j] = load_vector<Ints>(values + from + 4 * kLanes * j);
      __builtin_prefetch(ahead + from + 4 * kLanes * j, 0, 2);
    });
    repeat<N>([&](auto i) TOKA_LAMBDA {
      const Ints high = broadcast_four(weights[i].upper + 4 * four), low = broadcast_four(weights[i].lower + 4 * four);
      repeat<V>([&](auto j) TOKA_LAMBDA {
        upper[i][j] = dot_four(upper[i][j], high, codes[j]);
        lower[i][j] = dot_four(lower[i][j], low, codes[j]);
      });
    });
  }
  repeat<N>([&](auto i) TOKA_LAMBDA {
    repeat<V>([&](auto j) TOKA_LAMBDA {
      float* const to = output + i * head_dim + column + kLanes * j;
      store(to, load(to) + to_floats(upper[i][j] * 256 + lower[i][j]) * weights[i].scale);
    });
  });
}

// output[0..N)[head_dim] += weights times a group's values.
template <int N>
static void add_weighted_codes(const CodedWeights* weights, const int8_t* values, const int8_t* ahead, int64_t head_dim,
                               float* output) {
  constexpr int kQueries = std::min(N, kValueQueries), kFit = kMaxSums / (2 * kQueries),
                V = kFit >= 4   ? 4
                    : kFit >= 2 ? 2
                                : 1;
  int64_t column = 0;
  for (; column + kLanes * V <= head_dim; column += kLanes * V)
    add_weighted_codes<kQueries, V>(weights, values, ahead, head_dim, column, output);
  for (; column < head_dim; column += kLanes)
    add_weighted_codes<kQueries, 1>(weights, values, ahead, head_dim, column, output);
  if constexpr (N > kQueries)
    add_weighted_codes<N - kQueries>(weights + kQueries, values, ahead, head_dim, output + kQueries * head_dim);
}

#endif
