// The vector types and operations that all kernels use. A vector has the size of a register: GCC 12 keeps longer ones
// in memory. Operations are written in the compilers' portable vector types, and with the processor's intrinsics where
// a compiler makes slow code of those.
//
// Loading: load, to_float. Storing: store, from_float. Between element types: convert, rounded. Over all lanes: sum,
// max, any_greater. See simd_math.h for exp and log, and multiply_add.h for multiply-adds.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// kLanes: floats per register. kRegisters: number of vector registers.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__ARM_NEON)
constexpr int kLanes = 4, kRegisters = 32;
#else
#error "no supported vector instructions: see build.py for the compiler flags"
#endif

// Whether one instruction multiplies pairs of bfloat16 numbers and adds both products to a float32 sum.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define TOKA_BFLOAT16_DOT 1
#else
#define TOKA_BFLOAT16_DOT 0
#endif

#define TOKA_INLINE inline __attribute__((always_inline))
#define TOKA_LAMBDA __attribute__((always_inline))
#define TOKA_NOINLINE __attribute__((noinline))

constexpr int kCacheLineBytes = 64;

// Marks a function that Python calls. All other functions are hidden: two builds of the library in one process must not
// use each other's functions and variables.
#define TOKA_EXPORT extern "C" __attribute__((visibility("default")))

// Exports the size of a struct that Python fills: check_struct_sizes in bindings.py compares it with Python's.
#define TOKA_STRUCT_SIZE(name) \
  TOKA_EXPORT int64_t toka_size_of_##name() { return sizeof(name); }

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UInts __attribute__((vector_size(4 * kLanes)));
typedef uint16_t UShorts __attribute__((vector_size(2 * kLanes)));

struct bfloat16 {
  uint16_t bits;
};

struct float16 {
  uint16_t bits;
};

// Calls body(i) for i = 0 ... N - 1, each i a constant: an array that is indexed only by constants stays in registers.
template <int N, int I = 0, typename Body>
static TOKA_INLINE void repeat(const Body& body) {
  if constexpr (I < N) {
    body(std::integral_constant<int, I>{});
    repeat<N, I + 1>(body);
  }
}

// x in every lane.
static TOKA_INLINE Floats broadcast(float x) { return x - Floats{}; }

static TOKA_INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }

template <typename Vector>
static TOKA_INLINE Vector load_vector(const void* from) {
  Vector x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

static TOKA_INLINE Floats load(const float* from) { return load_vector<Floats>(from); }

static TOKA_INLINE Floats load(const bfloat16* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#elif defined(__AVX2__)
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
#else
  return (Floats)(__builtin_convertvector(load_vector<UShorts>(from), UInts) << 16);
#endif
}

static inline float to_float(float x) { return x; }

// The number with these bits.
static inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline float to_float(bfloat16 x) { return from_bits(uint32_t(x.bits) << 16); }

static inline float to_float(float16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  __fp16 value;
  std::memcpy(&value, &x, sizeof value);
  return value;
#endif
}

static TOKA_INLINE Floats load(const float16* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  return (Floats)vcvt_f32_f16(load_vector<float16x4_t>(from));
#endif
}

static inline void from_float(float* to, float x) { *to = x; }

// Rounds to the nearest, ties to even. NaN stays NaN.
static inline void from_float(bfloat16* to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x)
    to->bits = uint16_t((bits >> 16) | 0x40);
  else
    to->bits = uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// Rounds in the same way. Numbers that are too large become the largest finite one: an infinity in the KV cache would
// turn the output of every row that attends to it into NaN.
static inline void from_float(float16* to, float x) {
  constexpr float kLargest = 65504;
  x = x > kLargest ? kLargest : x;
  x = x < -kLargest ? -kLargest : x;
#if defined(__F16C__)
  to->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  const __fp16 value = x;
  std::memcpy(to, &value, sizeof value);
#endif
}

static TOKA_INLINE void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

static TOKA_INLINE void store(bfloat16* to, Floats x) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
  const UInts bits = (UInts)x;
  const UInts rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, quiet = (bits >> 16) | 0x40;
  const UShorts converted = __builtin_convertvector(x != x ? quiet : rounded, UShorts);
  std::memcpy(to, &converted, sizeof converted);
#endif
}

// Converts `from` to another element type.
template <typename To, typename From>
static TOKA_INLINE void convert(To* to, const From& from) {
  if constexpr (std::is_same_v<To, From>)
    *to = from;
  else
    from_float(to, to_float(from));
}

// x as if it were stored as an Element and loaded again.
template <typename Element>
static TOKA_INLINE Floats rounded(Floats x) {
  if constexpr (std::is_same_v<Element, float>) return x;
  Element stored[kLanes];
  store(stored, x);
  return load(stored);
}

template <typename Element>
static TOKA_INLINE float rounded(float x) {
  Element stored;
  from_float(&stored, x);
  return to_float(stored);
}

// The sum of all lanes. Adding halves keeps the chain of dependent operations short.
static TOKA_INLINE float sum(Floats x) {
  float lanes[kLanes];
  std::memcpy(lanes, &x, sizeof x);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// Of each lane: neither NaN nor infinity.
static TOKA_INLINE Ints is_finite(Floats x) { return ((Ints)x & 0x7FFFFFFF) < 0x7F800000; }

// b if one is NaN.
static TOKA_INLINE float max(float a, float b) { return a > b ? a : b; }

static TOKA_INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }

// The largest lane.
static TOKA_INLINE float max(Floats x) {
  float lanes[kLanes];
  std::memcpy(lanes, &x, sizeof x);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] = max(lanes[lane], lanes[lane + half]);
  return lanes[0];
}

static TOKA_INLINE int32_t max(Ints x) {
  int32_t lanes[kLanes];
  std::memcpy(lanes, &x, sizeof x);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane)
      lanes[lane] = lanes[lane] > lanes[lane + half] ? lanes[lane] : lanes[lane + half];
  return lanes[0];
}

// Whether any lane is greater than the limit.
static TOKA_INLINE bool any_greater(Floats x, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#elif defined(__AVX__)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(limit), _CMP_GT_OQ)) != 0;
#else
  return max(x) > limit;
#endif
}

// Fits into 32 bits.
static TOKA_INLINE int64_t sum(Ints x) {
  int32_t lanes[kLanes];
  std::memcpy(lanes, &x, sizeof x);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}
