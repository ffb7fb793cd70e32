// Quantized weights: the blocks of checkpoints, and panels of their weights.
//
// A block has some adjacent inputs of one output. Its weights are scale * (code - kOffset) + min, where each group of
// kGroup inputs has a scale and a min of its own. In types with two levels, these are integers that the block's scale
// and min multiply; the min is then subtracted. Source of the types with Q: https://github.com/ggml-org/ggml
// (ggml-common.h), and of MXFP4's blocks. Those with I: checkpoint/block_types.py.
//
// A panel has first the numbers, each [kPanel]: with two levels, the scale and the min of each block, float16; then
// the scale and the min of each group (int8 with two levels, else float16 or float32). Then, from a multiple of 64
// bytes on, the codes, unsigned: [inputs / 4][kPanel][4] bytes; or, of 4 bits, [inputs / 8][kPanel][4] bytes with the
// first four inputs in the low bits and the next four in the high bits. So each 32 bits have inputs of one output, as
// the instructions of multiply_codes want them. Codes of 6 bits are in sixteens: two times [kPanel][4] bytes of their
// low 4 bits, as above, then [kPanel][4] bytes of their high 2 bits, of which the first four inputs' are the lowest.
#pragma once

#include <algorithm>

#include "gemm/gemm_tile.h"

// The codes that Python passes: BLOCK_TYPES in bindings.py.
enum BlockType : int64_t {
  kPlain = 0,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kI4_32,
  kI4_64,
  kI4_128,
  kI8,
  kMXFP4
};

// A block of a GGUF file, unpacked.
struct Block {
  uint8_t codes[256];
  float16 scale, min;
  int8_t group_scales[16], group_mins[16];  // with two levels
};

// Number: the type of a group's scale and min in a panel. size: inputs of a block, 0 for all; bytes: of a block as
// Python passes it, without its codes if it has all inputs. bits: of a code in a panel.
template <typename Number, int size, int bytes, int group, int bits, bool has_min, int offset = 0>
struct Format {
  typedef Number GroupNumber;
  static constexpr int kSize = size, kBytes = bytes, kGroup = group, kBits = bits, kOffset = offset;
  static constexpr bool kHasMin = has_min, kTwoLevels = std::is_same_v<Number, int8_t>;
  static constexpr int kNumbers = has_min ? 2 : 1;  // a scale, and perhaps a min
};

template <BlockType type>
struct FormatOf;
template <>
struct FormatOf<kQ4_0> : Format<float16, 32, 18, 32, 4, false, 8> {};
template <>
struct FormatOf<kQ4_1> : Format<float16, 32, 20, 32, 4, true> {};
template <>
struct FormatOf<kQ5_0> : Format<float16, 32, 22, 32, 6, false, 16> {};
template <>
struct FormatOf<kQ5_1> : Format<float16, 32, 24, 32, 6, true> {};
template <>
struct FormatOf<kQ8_0> : Format<float16, 32, 34, 32, 8, false, 128> {};
template <>
struct FormatOf<kQ4_K> : Format<int8_t, 256, 144, 32, 4, true> {};
template <>
struct FormatOf<kQ5_K> : Format<int8_t, 256, 176, 32, 6, true> {};
template <>
struct FormatOf<kQ6_K> : Format<int8_t, 256, 210, 16, 6, false, 32> {};
template <>
struct FormatOf<kI4_32> : Format<float, 32, 24, 32, 4, true> {};
template <>
struct FormatOf<kI4_64> : Format<float, 64, 40, 64, 4, true> {};
template <>
struct FormatOf<kI4_128> : Format<float, 128, 72, 128, 4, true> {};
template <>
struct FormatOf<kI8> : Format<float, 0, 4, 0, 8, false, 128> {};

// With the codes as integers, each twice its number; half the number's scale is of those.
template <>
struct FormatOf<kMXFP4> : Format<float, 32, 17, 32, 6, false, 16> {};

// Calls body(std::integral_constant<BlockType, type>{}). Precondition: the type is none of kPlain.
template <int64_t type = kQ4_0, typename Body>
void dispatch_blocks(int64_t wanted, const Body& body) {
  if constexpr (type < kMXFP4)
    if (wanted != type) return dispatch_blocks<type + 1>(wanted, body);
  body(std::integral_constant<BlockType, BlockType(type)>{});
}

// The sizes of blocks and of their panel.
template <BlockType type>
struct PanelSizes {
  typedef FormatOf<type> F;
  int64_t block_inputs, block_bytes, group_inputs, num_blocks, num_groups;
  int64_t groups, codes, end;  // where these start in a panel: the numbers of groups, and the codes; bytes in all

  explicit PanelSizes(int64_t in_size) {
    block_inputs = F::kSize == 0 ? in_size : F::kSize;
    block_bytes = F::kSize == 0 ? F::kBytes + in_size : F::kBytes;
    group_inputs = F::kGroup == 0 ? in_size : F::kGroup;
    num_blocks = in_size / block_inputs;
    num_groups = in_size / group_inputs;
    groups = F::kTwoLevels ? num_blocks * F::kNumbers * kPanel * sizeof(float16) : 0;
    codes = groups + num_groups * F::kNumbers * kPanel * sizeof(typename F::GroupNumber);
    codes = (codes + 63) / 64 * 64;
    end = codes + in_size * kPanel * F::kBits / 8;
  }
};

// The 8 scales and mins of 6 bits each in 12 bytes: the first four pairs in the low bits of 8 bytes, the others in 4
// bytes and the high bits of those 8.
inline void unpack_scales(const uint8_t* from, Block& block) {
  for (int i = 0; i < 4; ++i) {
    block.group_scales[i] = from[i] & 63;
    block.group_mins[i] = from[i + 4] & 63;
    block.group_scales[i + 4] = (from[i + 8] & 15) | (from[i] >> 6 << 4);
    block.group_mins[i + 4] = (from[i + 8] >> 4) | (from[i + 4] >> 6 << 4);
  }
}

// A block of a GGUF file.
template <BlockType type>
void unpack_block(const uint8_t* from, Block& block) {
  const auto read = [&](float16* to, int offset) { std::memcpy(to, from + offset, sizeof *to); };
  if constexpr (type == kQ4_0 || type == kQ4_1 || type == kQ5_0 || type == kQ5_1) {
    constexpr bool kHasMin = FormatOf<type>::kHasMin, kHasFive = type == kQ5_0 || type == kQ5_1;
    read(&block.scale, 0);
    if (kHasMin) read(&block.min, 2);
    const uint8_t* const fifth = from + (kHasMin ? 4 : 2);  // one bit of each code
    const uint8_t* const low = fifth + (kHasFive ? 4 : 0);
    const auto high = [&](int i) { return kHasFive ? (fifth[i / 8] >> i % 8 & 1) << 4 : 0; };
    for (int i = 0; i < 16; ++i) {
      block.codes[i] = (low[i] & 15) | high(i);
      block.codes[i + 16] = (low[i] >> 4) | high(i + 16);
    }
  } else if constexpr (type == kQ8_0) {
    read(&block.scale, 0);
    for (int i = 0; i < 32; ++i) block.codes[i] = from[2 + i] ^ 0x80;  // signed there
  } else if constexpr (type == kQ4_K || type == kQ5_K) {
    read(&block.scale, 0);
    read(&block.min, 2);
    unpack_scales(from + 4, block);
    const uint8_t* const fifth = from + 16;  // bit g of byte i is of input i of group g
    const uint8_t* const low = fifth + (type == kQ5_K ? 32 : 0);
    const auto high = [&](int group, int i) { return type == kQ5_K ? (fifth[i] >> group & 1) << 4 : 0; };
    for (int pair = 0; pair < 4; ++pair)
      for (int i = 0; i < 32; ++i) {
        const uint8_t both = low[pair * 32 + i];
        block.codes[pair * 64 + i] = (both & 15) | high(2 * pair, i);
        block.codes[pair * 64 + 32 + i] = (both >> 4) | high(2 * pair + 1, i);
      }
  } else {
    static_assert(type == kQ6_K);
    for (int half = 0; half < 2; ++half)
      for (int i = 0; i < 32; ++i) {
        const uint8_t *const low = from + half * 64 + i, high = from[128 + half * 32 + i];
        uint8_t* const to = block.codes + half * 128 + i;
        to[0] = (low[0] & 15) | (high & 3) << 4;
        to[32] = (low[32] & 15) | (high >> 2 & 3) << 4;
        to[64] = (low[0] >> 4) | (high >> 4 & 3) << 4;
        to[96] = (low[32] >> 4) | (high >> 6) << 4;
      }
    std::memcpy(block.group_scales, from + 192, 16);
    read(&block.scale, 208);
  }
}

// Inputs whose codes are together in a panel, and their bytes.
template <int bits>
constexpr int kCodesTogether = bits == 8   ? 4
                               : bits == 4 ? 8
                                           : 16;
template <int bits>
constexpr int kBytesTogether = kCodesTogether<bits> * kPanel * bits / 8;

// Where 4 bits of a code are in a panel, and its high 2 bits if it has 6.
struct CodePlace {
  int64_t low, high;  // bytes
  int low_shift, high_shift;
};

template <int bits>
CodePlace code_place(int64_t i, int64_t output) {
  const int64_t number = i % kCodesTogether<bits>, start = i / kCodesTogether<bits> * kBytesTogether<bits>;
  const auto word = [&](int64_t index) { return start + (index * kPanel + output) * 4 + i % 4; };
  return {word(number / 8), word(2), int(number % 8 / 4 * 4), int(number / 4 * 2)};
}

// Puts the code of input i of output `output` among those of a panel.
template <int bits>
void put_code(uint8_t* codes, int64_t i, int64_t output, uint8_t code) {
  const CodePlace place = code_place<bits>(i, output);
  const auto put = [](uint8_t& byte, int mask, int shift, int value) {
    byte = (byte & ~(mask << shift)) | (value & mask) << shift;
  };
  if constexpr (bits == 8) {
    codes[place.low] = code;
  } else {
    put(codes[place.low], 15, place.low_shift, code);
    if constexpr (bits == 6) put(codes[place.high], 3, place.high_shift, code >> 4);
  }
}

template <int bits>
int get_code(const uint8_t* codes, int64_t i, int64_t output) {
  const CodePlace place = code_place<bits>(i, output);
  if constexpr (bits == 8) return codes[place.low];
  const int low = codes[place.low] >> place.low_shift & 15;
  if constexpr (bits == 4) return low;
  return low | (codes[place.high] >> place.high_shift & 3) << 4;
}

// The blocks of one output, as Python passes them -> output `output` of a panel.
template <BlockType type>
void pack_blocks(const uint8_t* from, int64_t in_size, int64_t output, uint8_t* panel) {
  typedef FormatOf<type> F;
  typedef typename F::GroupNumber Number;
  const PanelSizes<type> sizes(in_size);
  uint8_t* const codes = panel + sizes.codes;
  const auto put = [&](uint8_t* numbers, int64_t index, auto number) {
    std::memcpy(numbers + (index * kPanel + output) * sizeof number, &number, sizeof number);
  };
  const auto put_group = [&](int64_t group, Number scale, Number min) {
    put(panel + sizes.groups, group * F::kNumbers, scale);
    if (F::kHasMin) put(panel + sizes.groups, group * F::kNumbers + 1, min);
  };
  for (int64_t b = 0; b < sizes.num_blocks; ++b, from += sizes.block_bytes) {
    const int64_t first = b * sizes.block_inputs;
    if constexpr (type == kMXFP4) {
      // Numbers of 4 bits: a sign, 2 bits of exponent and 1 of mantissa. Source: OCP Microscaling Formats 1.0.
      constexpr int kTwice[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
      put_group(b, std::ldexp(1.0f, from[0] - 128), 0);
      for (int i = 0; i < F::kSize; ++i) {
        const int code = from[1 + i % 16] >> i / 16 * 4 & 15;
        put_code<F::kBits>(codes, first + i, output, uint8_t(kTwice[code] + F::kOffset));
      }
    } else if constexpr (std::is_same_v<Number, float>) {
      float scale, min = 0;
      std::memcpy(&scale, from, sizeof scale);
      if (F::kHasMin) std::memcpy(&min, from + sizeof scale, sizeof min);
      put_group(b, scale, min);
      const uint8_t* const own = from + F::kNumbers * sizeof(float);
      for (int64_t i = 0; i < sizes.block_inputs; ++i)
        put_code<F::kBits>(codes, first + i, output, F::kBits == 8 ? own[i] : own[i / 2] >> i % 2 * 4 & 15);
    } else {
      Block block;
      unpack_block<type>(from, block);
      if constexpr (F::kTwoLevels) {
        put(panel, b * F::kNumbers, block.scale);
        if (F::kHasMin) put(panel, b * F::kNumbers + 1, block.min);
        constexpr int kGroups = F::kSize / F::kGroup;
        for (int g = 0; g < kGroups; ++g) put_group(b * kGroups + g, block.group_scales[g], block.group_mins[g]);
      } else {
        put_group(b, block.scale, block.min);
      }
      for (int i = 0; i < F::kSize; ++i) put_code<F::kBits>(codes, first + i, output, block.codes[i]);
    }
  }
}

// Inputs that are widened at a time for a single tile, so that they stay in the first-level cache; and the most that
// are multiplied by a scale together. Groups have a part of it, or all inputs.
constexpr int64_t kWidenedInputs = 256;

// The groups of a panel: weight = scale * code + min.
struct Groups {
  float *scales, *mins;  // [groups][kPanel]; the offset's share is in the min
  int64_t inputs;        // of a group
  int offset;            // of codes
  bool has_min;          // besides the offset's share
  bool has_all;          // a single group has all inputs

  // Of the inputs from `first` on, a multiple of kWidenedInputs.
  Scales scales_from(int64_t first) const {
    return {scales + first / inputs * kPanel, std::min(inputs, kWidenedInputs), has_all ? 0 : kPanel};
  }
};

static TOKA_INLINE Floats load_numbers(const float16* from) { return load(from); }
static TOKA_INLINE Floats load_numbers(const float* from) { return load(from); }
static TOKA_INLINE Floats load_numbers(const int8_t* from) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  return __builtin_convertvector(__builtin_convertvector(load_vector<Bytes>(from), Ints), Floats);
#endif
}

// Reads the numbers of a panel's groups into `numbers`, which has space for two floats [kPanel] a group.
template <BlockType type>
Groups read_groups(const uint8_t* panel, int64_t in_size, float* numbers) {
  typedef FormatOf<type> F;
  const PanelSizes<type> sizes(in_size);
  const auto* const stored = (const typename F::GroupNumber*)(panel + sizes.groups);
  const int64_t block_groups = sizes.num_groups / sizes.num_blocks;
  Groups groups{numbers,      numbers + sizes.num_groups * kPanel, sizes.group_inputs, F::kOffset, F::kHasMin,
                F::kSize == 0};
  for (int64_t g = 0; g < sizes.num_groups; ++g) {
    const auto* const own = stored + g * F::kNumbers * kPanel;
    const float16* const outer = (const float16*)panel + g / block_groups * F::kNumbers * kPanel;
    repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA {
      Floats scale = load_numbers(own + v * kLanes);
      if constexpr (F::kTwoLevels) scale *= load(outer + v * kLanes);
      store(groups.scales + g * kPanel + v * kLanes, scale);
      Floats min = scale * float(-F::kOffset);  // exact: an offset is a power of two
      if constexpr (F::kHasMin) min = load_numbers(own + kPanel + v * kLanes);
      if constexpr (F::kHasMin && F::kTwoLevels) min *= -load(outer + kPanel + v * kLanes);
      store(groups.mins + g * kPanel + v * kLanes, min);
    });
  }
  return groups;
}

// Whether a panel of codes becomes one of integers, which bfloat16 has exactly, and sums are multiplied by the scales:
// weights, rounded to bfloat16, would be others than the stored ones.
template <typename Element>
constexpr bool kIsScaledLater = std::is_same_v<Element, bfloat16>;

// Stores the weights, or codes, of two adjacent inputs for kLanes outputs, in a panel of plain weights.
template <typename Element>
static TOKA_INLINE void store_two(Element* to, Floats first, Floats second) {
  if constexpr (kIsScaledLater<Element>) {
    const UInts both = (UInts)first >> 16 | ((UInts)second & 0xFFFF0000u);
    std::memcpy(to, &both, sizeof both);
  } else {
    store(to, first);
    store(to + kPanel, second);
  }
}

// How far ahead codes are prefetched: what is computed between two reads of memory, and the memory's latency.
constexpr int64_t kAheadBytes = 8192;

// Of kLanes outputs, the codes of four inputs, a byte each. quarter: which four of those that are together at `from`.
template <int bits>
static TOKA_INLINE Ints four_codes(const uint8_t* from, int vector, int quarter) {
  const auto word = [&](int index)
                        TOKA_LAMBDA { return load_vector<UInts>(from + (index * kPanel + vector * kLanes) * 4); };
  if constexpr (bits == 8) return (Ints)word(quarter);
  const UInts low = word(quarter / 2) >> quarter % 2 * 4 & 0x0F0F0F0Fu;
  if constexpr (bits == 4) return (Ints)low;
  const UInts high = quarter < 2 ? word(2) << (4 - 2 * quarter) : word(2) >> (2 * quarter - 4);
  return (Ints)(low | (high & 0x30303030u));
}

// The inputs [first, end) of a panel of codes -> the same part of a panel of plain weights, in float32, or of codes
// less their offset, in bfloat16. first and end: multiples of 32, or the last input.
template <int bits, typename Element>
TOKA_NOINLINE void widen_codes(const uint8_t* codes, const Groups& groups, int64_t first, int64_t end, Element* to) {
  constexpr int kVectorElements = kLanes * kPair<Element>, kTogether = kCodesTogether<bits>;
  codes += first / kTogether * kBytesTogether<bits>;
  while (first < end) {
    const int64_t group = first / groups.inputs, group_end = std::min(end, (group + 1) * groups.inputs);
    Floats scale[kPanelVectors], min[kPanelVectors];
    repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA {
      scale[v] = load(groups.scales + group * kPanel + v * kLanes);
      min[v] = load(groups.mins + group * kPanel + v * kLanes);
    });
    for (; first < group_end; first += kTogether, codes += kBytesTogether<bits>, to += kTogether * kPanel) {
      repeat<kBytesTogether<bits> / kCacheLineBytes>(
          [&](auto line) TOKA_LAMBDA { __builtin_prefetch(codes + kAheadBytes + line * kCacheLineBytes, 0, 2); });
      repeat<kPanelVectors>([&](auto v) TOKA_LAMBDA {
        repeat<kTogether / 4>([&](auto quarter) TOKA_LAMBDA {
          const UInts all = (UInts)four_codes<bits>(codes, v, quarter);
          const auto weight = [&](auto i) TOKA_LAMBDA {
            const Ints code = (Ints)(all >> 8 * i & 255);
            if constexpr (kIsScaledLater<Element>) return to_floats(code - groups.offset);
            return to_floats(code) * scale[v] + min[v];
          };
          repeat<2>([&](auto i) TOKA_LAMBDA {
            store_two(to + (quarter * 4 + i * 2) * kPanel + v * kVectorElements,
                      weight(std::integral_constant<int, 2 * i>{}), weight(std::integral_constant<int, 2 * i + 1>{}));
          });
        });
      });
    }
  }
}

// The weights [in_size] of output `output` of a panel of blocks.
template <BlockType type, typename Element>
void read_output(const uint8_t* panel, int64_t in_size, int64_t output, Element* to) {
  typedef FormatOf<type> F;
  const PanelSizes<type> sizes(in_size);
  const auto number = [&](const auto* numbers, int64_t index) {
    const auto stored = numbers[index * kPanel + output];
    if constexpr (std::is_same_v<decltype(stored), const int8_t>)
      return float(stored);
    else
      return to_float(stored);
  };
  const auto* const groups = (const typename F::GroupNumber*)(panel + sizes.groups);
  const float16* const outer = (const float16*)panel;
  const int64_t block_groups = sizes.num_groups / sizes.num_blocks;
  for (int64_t g = 0; g < sizes.num_groups; ++g) {
    float scale = number(groups, g * F::kNumbers), min = 0;
    if (F::kHasMin) min = number(groups, g * F::kNumbers + 1);
    if constexpr (F::kTwoLevels) {
      scale *= number(outer, g / block_groups * F::kNumbers);
      if (F::kHasMin) min *= -number(outer, g / block_groups * F::kNumbers + 1);
    }
    for (int64_t i = g * sizes.group_inputs; i < (g + 1) * sizes.group_inputs; ++i) {
      const int code = get_code<F::kBits>(panel + sizes.codes, i, output);
      from_float(to + i, float(code - F::kOffset) * scale + min);
    }
  }
}
