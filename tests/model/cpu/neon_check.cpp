// Compares a kernel library with plain loops in double precision. Without Python, so that it also runs on an emulated
// processor. Prints a line for each check, and returns 1 if one fails.
//
// All inputs are multiples of 1/64 up to 2, which every element type represents exactly: only the kernels round.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "attention/attention_layout.h"
#include "gemm/blocks.h"
#include "gemm/forward.h"
#include "sampling/sampling.h"
#include "simd/element_type.h"
#include "states/states.h"

using std::vector;

// What the library exports beside sampling.h.
extern "C" {
int64_t toka_has_bfloat16_arithmetic();
void toka_set_num_threads(int64_t num_threads);
void toka_pack(const PackedWeights* weights, const void* plain, void* panels);
void toka_pack_blocks(const PackedWeights* weights, int64_t block_type, const void* rows, int64_t first_row,
                      int64_t num_rows, void* panels);
int64_t toka_block_panel_bytes(int64_t block_type, int64_t in_size);
void toka_multiply(const PackedWeights* weights, const void* x, int64_t x_stride, int64_t num_rows, const Norm* norm,
                   double multiplier, double softcap, const LowRank* adapters, const int32_t* row_adapters, void* out);
void toka_run_experts(const Experts* experts, const Norm* norm, const void* x, int64_t num_rows, const int64_t* chosen,
                      const float* weights, void* out);
void toka_embed(const PackedWeights* weights, const int64_t* token_ids, int64_t num_tokens, void* out);
void toka_write_kv(int64_t activation_type, int64_t cache_type, const void* key, const void* value, int64_t key_stride,
                   int64_t value_stride, const int64_t* kv_indices, int64_t num_tokens, void* cache,
                   const int32_t* blocks, int64_t num_kv_heads, int64_t head_dim, int64_t page_size);
void toka_attend(int64_t activation_type, int64_t cache_type, const void* query, int64_t query_row_stride, void* output,
                 float* lse, const void* cache, const PagedPart* part, int64_t num_heads, int64_t num_kv_heads,
                 int64_t head_dim, int64_t page_size, const LayerScores* scores);
void toka_merge(int64_t output_type, const float* first, const float* first_lse, const float* second,
                const float* second_lse, void* output, int64_t count, int64_t head_dim);
void toka_run_layers(const PackedLayer* layers, int64_t num_layers, const PagedForward* forward, int64_t num_rows,
                     const float* cos_sin, int64_t num_tables, const int32_t* row_adapters,
                     const StateSegments* segments, void* hidden);
void toka_run_states(const StateLayer* layer, const StateSegments* segments, float* memory, int64_t activation_type,
                     const void* features, int64_t num_rows, void* out);
}

namespace {

const char* const kNames[] = {"float32", "bfloat16", "float16", "int8"};  // in the order of ElementType

std::mt19937 generator(1);
bool has_failed = false;

vector<double> random_values(int64_t size) {
  vector<double> values(size);
  for (double& value : values) value = (double(generator() % 257) - 128) / 64;
  return values;
}

template <typename Element>
vector<Element> as(const vector<double>& values) {
  vector<Element> elements(values.size());
  for (size_t i = 0; i < values.size(); ++i) from_float(&elements[i], float(values[i]));
  return elements;
}

// tolerance: largest error allowed, relative to the largest expected value.
template <typename Element>
void compare(const std::string& name, const vector<Element>& found, const vector<double>& expected, double tolerance) {
  double error = 0, largest = 1e-30;
  for (double value : expected) largest = std::max(largest, std::abs(value));
  bool is_right = found.size() == expected.size();
  for (size_t i = 0; i < std::min(found.size(), expected.size()); ++i) {
    const double difference = std::abs(to_float(found[i]) - expected[i]);
    is_right = is_right && difference <= tolerance * largest;  // NaN is not
    error = std::max(error, difference);
  }
  has_failed = has_failed || !is_right;
  std::printf("%s %s: error %.2g of %.3g\n", is_right ? "ok" : "WRONG", name.c_str(), error, largest);
}

// All but one in a hundred are the nearest numbers to those expected, and those their neighbours. If weights had been
// rounded, one in four would not be.
void check_nearest(const std::string& name, const vector<bfloat16>& found, const vector<double>& expected) {
  const vector<bfloat16> nearest = as<bfloat16>(expected);
  size_t num_others = 0;
  bool is_right = found.size() == expected.size();
  for (size_t i = 0; i < found.size(); ++i) {
    num_others += found[i].bits != nearest[i].bits;
    is_right = is_right && std::abs(found[i].bits - nearest[i].bits) <= 1;
  }
  is_right = is_right && num_others * 100 <= found.size();
  has_failed = has_failed || !is_right;
  std::printf("%s %s: %zu of %zu are not the nearest\n", is_right ? "ok" : "WRONG", name.c_str(), num_others,
              found.size());
}

// Tolerance for the rounding of kernels that compute with this type.
template <typename Element>
constexpr double kTolerance = std::is_same_v<Element, bfloat16> ? 0.01 : 1e-5;

// --- Gemm

vector<double> normed(const vector<double>& x, const vector<double>& weight, double eps) {
  const size_t size = weight.size();
  vector<double> to(x.size());
  for (size_t first = 0; first < x.size(); first += size) {
    double squares = 0;
    for (size_t i = 0; i < size; ++i) squares += x[first + i] * x[first + i];
    for (size_t i = 0; i < size; ++i) to[first + i] = x[first + i] / std::sqrt(squares / size + eps) * weight[i];
  }
  return to;
}

// Weights [out, in], or [2 * out, in] with gates before ups, as given and as packed by the library.
template <typename Weight>
struct Matrix {
  int64_t in_size, out_size;
  bool is_gated;
  vector<double> plain, bias;
  vector<Weight> panels = {};
  vector<float> packed_bias = {};
  PackedWeights packed = {};

  Matrix(int64_t in_size, int64_t out_size, bool is_gated, bool has_bias, double scale)
      : in_size(in_size),
        out_size(out_size),
        is_gated(is_gated),
        plain(random_values((1 + is_gated) * out_size * in_size)) {
    for (double& value : plain) value *= scale;
    packed = {kElementType<Weight>, in_size, out_size, is_gated, nullptr, nullptr};
    panels.resize(packed.num_panels() * kPanel * in_size);
    packed.panels = panels.data();
    packed.activation = is_gated ? kSilu : kIdentity;
    if (has_bias) {
      bias = random_values(out_size);
      packed_bias = as<float>(bias);
      packed_bias.resize(packed.num_panels() * kPanel);
      packed.bias = packed_bias.data();
    }
    toka_pack(&packed, as<Weight>(plain).data(), panels.data());
  }

  double activated(double x) const {
    if (packed.activation == kSilu) return x / (1 + std::exp(-x));
    if (packed.activation == kGelu) return x * (1 + std::erf(x / std::sqrt(2.0))) / 2;
    if (packed.activation == kGeluTanh)
      return x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))) / 2;
    return packed.activation == kRelu2 ? std::max(0.0, x) * std::max(0.0, x) : x;
  }

  vector<double> times(const vector<double>& x) const {
    const int64_t num_rows = x.size() / in_size;
    vector<double> to(num_rows * out_size);
    for (int64_t row = 0; row < num_rows; ++row)
      for (int64_t output = 0; output < out_size; ++output) {
        double sums[2] = {};
        for (int half = 0; half < 1 + is_gated; ++half)
          for (int64_t i = 0; i < in_size; ++i)
            sums[half] += x[row * in_size + i] * plain[(half * out_size + output) * in_size + i];
        if (!bias.empty()) sums[0] += bias[output];
        to[row * out_size + output] = activated(sums[0]) * (is_gated ? sums[1] : 1);
      }
    return to;
  }
};

template <typename Weight>
void check_gemm() {
  typedef Activation<Weight> Element;
  constexpr int64_t kIn = 96, kOut = 130;
  const std::string weights = kNames[kElementType<Weight>];
  const vector<double> norm = random_values(kIn);
  const vector<float> norm_weight = as<float>(norm);
  const Norm packed_norm{kRmsNorm, norm_weight.data(), nullptr, 1e-5};
  for (int64_t num_rows : {1, 2, 5, 6, 7, 12, 13, 64}) {
    const vector<double> x = random_values(num_rows * kIn);
    for (const bool is_gated : {false, true})
      for (const bool is_normed : {false, true}) {
        const Matrix<Weight> matrix(kIn, kOut, is_gated, !is_gated, 1.0 / 16);
        vector<Element> out(num_rows * kOut);
        toka_multiply(&matrix.packed, as<Element>(x).data(), kIn, num_rows, is_normed ? &packed_norm : nullptr, 1, 0,
                      nullptr, nullptr, out.data());
        const std::string name = weights + (is_gated ? " gated" : " plain") + (is_normed ? " after a norm" : "");
        compare(name + ", rows: " + std::to_string(num_rows), out, matrix.times(is_normed ? normed(x, norm, 1e-5) : x),
                kTolerance<Element>);
      }
  }
  for (const int64_t activation : {kGelu, kGeluTanh, kRelu2}) {
    Matrix<Weight> matrix(kIn, kOut, false, true, 1.0 / 16);
    matrix.packed.activation = activation;
    const vector<double> x = random_values(5 * kIn);
    vector<Element> out(5 * kOut);
    toka_multiply(&matrix.packed, as<Element>(x).data(), kIn, 5, nullptr, 1, 0, nullptr, nullptr, out.data());
    vector<double> expected = matrix.times(x);
    compare(weights + " with activation " + std::to_string(activation), out, expected, kTolerance<Element>);
    toka_multiply(&matrix.packed, as<Element>(x).data(), kIn, 5, nullptr, 0.5, 3, nullptr, nullptr, out.data());
    for (double& value : expected) value = 3 * std::tanh(value * 0.5 / 3);
    compare(weights + " scaled and capped, activation " + std::to_string(activation), out, expected,
            kTolerance<Element>);
  }
  const Matrix<Weight> matrix(kIn, kOut, false, false, 1);
  const vector<int64_t> ids = {0, 129, 5, 64};
  vector<Element> rows(ids.size() * kIn);
  toka_embed(&matrix.packed, ids.data(), ids.size(), rows.data());
  vector<double> expected;
  for (int64_t id : ids)
    expected.insert(expected.end(), matrix.plain.begin() + id * kIn, matrix.plain.begin() + (id + 1) * kIn);
  compare(weights + " embedding", rows, expected, 0);
}

// An adapter's matrices [ranks, in] and [out, ranks], as given and as the kernels read them.
template <typename Weight>
struct Adapter {
  int64_t num_ranks;
  vector<double> down, up;
  vector<Weight> packed_down = {}, packed_up = {};
  vector<LowRankPanel> panels = {};
  LowRank packed = {};

  Adapter(int64_t num_ranks, int64_t in_size, int64_t out_size)
      : num_ranks(num_ranks), down(random_values(num_ranks * in_size)), up(random_values(out_size * num_ranks)) {
    constexpr int64_t P = kPair<Weight>;
    const int64_t whole = num_ranks / kPanel * kPanel;
    vector<double> numbers;
    for (int64_t first = 0, width; first < num_ranks; first += width) {
      width = first < whole ? kPanel : kLanes;
      for (int64_t in = 0; in < in_size; in += P)
        for (int64_t rank = first; rank < first + width; ++rank)
          for (int64_t i = in; i < in + P; ++i) numbers.push_back(down[rank * in_size + i]);
    }
    packed_down = as<Weight>(numbers);
    numbers.clear();
    for (int64_t first = 0; first < out_size; first += kPanel) {
      panels.push_back({int64_t(numbers.size()), {0, 0}, num_ranks});
      for (int64_t rank = 0; rank < num_ranks; rank += P)
        for (int64_t output = first; output < first + kPanel; ++output)
          for (int64_t i = rank; i < rank + P; ++i)
            numbers.push_back(output < out_size ? up[output * num_ranks + i] : 0);
    }
    packed_up = as<Weight>(numbers);
    packed = {packed_down.data(), num_ranks, packed_up.data(), panels.data()};
  }

  // to [out] += what it adds for x [in].
  void add(const double* x, int64_t in_size, double* to, int64_t out_size) const {
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      double inner = 0;
      for (int64_t i = 0; i < in_size; ++i) inner += x[i] * down[rank * in_size + i];
      for (int64_t output = 0; output < out_size; ++output) to[output] += inner * up[output * num_ranks + rank];
    }
  }
};

// Rows of adapters with other numbers of ranks, and of none, in one gemm.
template <typename Weight>
void check_adapters() {
  typedef Activation<Weight> Element;
  constexpr int64_t kIn = 96, kOut = 130;
  const Matrix<Weight> matrix(kIn, kOut, false, true, 1.0 / 16);
  const Adapter<Weight> whole(kPanel, kIn, kOut), half(kPanel / 2, kIn, kOut), more(kPanel + kLanes, kIn, kOut);
  const LowRank table[] = {{}, whole.packed, half.packed, more.packed};
  const vector<vector<int32_t>> runs = {{1}, {2}, {1, 1, 2, 2, 2, 0, 2}, {3, 2, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2}};
  for (const vector<int32_t>& of_rows : runs) {
    const int64_t num_rows = of_rows.size();
    const vector<double> x = random_values(num_rows * kIn);
    vector<Element> out(num_rows * kOut);
    toka_multiply(&matrix.packed, as<Element>(x).data(), kIn, num_rows, nullptr, 1, 0, table, of_rows.data(),
                  out.data());
    vector<double> expected = matrix.times(x);
    const Adapter<Weight>* const adapters[] = {nullptr, &whole, &half, &more};
    for (int64_t row = 0; row < num_rows; ++row)
      if (of_rows[row] != 0) adapters[of_rows[row]]->add(&x[row * kIn], kIn, &expected[row * kOut], kOut);
    compare(std::string(kNames[kElementType<Weight>]) + " with adapters, rows: " + std::to_string(num_rows), out,
            expected, kTolerance<Element>);
  }
}

// Gemms with blocks in integers. plain: the weights.
void check_int8(PackedWeights blocks, int64_t type, const vector<float>& plain) {
  const int64_t in_size = blocks.in_size, out_size = blocks.out_size, part = type == kI8 ? 128 : 32;
  blocks.is_int8 = 1;
  for (int64_t num_rows : {1, 5, 40}) {
    vector<float> x = as<float>(random_values(num_rows * in_size));
    for (size_t i = 0; i < x.size(); ++i) x[i] += 0.01f * std::sin(i);  // no code is in the middle of two integers
    vector<double> quantized(x.size()), expected;
    for (size_t first = 0; first < x.size(); first += part) {
      float most = 0;
      for (int64_t i = 0; i < part; ++i) most = std::max(most, std::fabs(x[first + i]));
      for (int64_t i = 0; i < part; ++i)
        quantized[first + i] = std::nearbyint(x[first + i] * (127 / most)) * double(most / 127);
    }
    for (int64_t row = 0; row < num_rows; ++row)
      for (int64_t output = 0; output < out_size; ++output) {
        double total = 0;
        for (int64_t i = 0; i < in_size; ++i) total += quantized[row * in_size + i] * plain[output * in_size + i];
        expected.push_back(total);
      }
    vector<float> found(num_rows * out_size);
    toka_multiply(&blocks, x.data(), in_size, num_rows, nullptr, 1, 0, nullptr, nullptr, found.data());
    compare("blocks of type " + std::to_string(type) + " in integers, rows: " + std::to_string(num_rows), found,
            expected, 1e-4);
  }
}

// Rows of x times the weights, summed in doubles. Both as toka_multiply takes them.
template <typename Element>
vector<double> products(const vector<Element>& x, const vector<float>& weights, int64_t in_size) {
  vector<double> found;
  for (size_t row = 0; row < x.size(); row += in_size)
    for (size_t output = 0; output < weights.size(); output += in_size) {
      double total = 0;
      for (int64_t i = 0; i < in_size; ++i) total += double(to_float(x[row + i])) * weights[output + i];
      found.push_back(total);
    }
  return found;
}

// Gemms with blocks equal those with the weights that toka_embed reads from them, which is plain scalar code: weights
// are not rounded to bfloat16.
template <typename Weight>
void check_blocks() {
  typedef Activation<Weight> Element;
  constexpr int64_t kIn = 512, kOut = 45;
  for (int64_t type = kQ4_0; type <= kMXFP4; ++type) {
    vector<PanelBlocks> places;
    PackedWeights blocks = {kElementType<Weight>, kIn, kOut, 0, nullptr, nullptr};
    const int64_t panel_bytes = toka_block_panel_bytes(type, kIn), num_panels = blocks.num_panels();
    for (int64_t panel = 0; panel < num_panels; ++panel) places.push_back({type, panel * panel_bytes});
    vector<uint8_t> panels(num_panels * panel_bytes);
    blocks.panels = panels.data();
    blocks.blocks = places.data();
    vector<uint8_t> rows;
    dispatch_blocks(type, [&](auto constant) {
      typedef FormatOf<constant.value> F;
      const PanelSizes<constant.value> sizes(kIn);
      rows.resize(kOut * sizes.num_blocks * sizes.block_bytes);
      for (uint8_t& byte : rows) byte = generator();
      for (size_t block = 0; block < rows.size(); block += sizes.block_bytes)
        for (int number = 0; number < F::kNumbers; ++number) {  // from 1/64 to 1/16, of either sign
          const uint16_t bits = 0x2400 + generator() % 0x800 + (generator() % 2 << 15);
          const float value = to_float(float16{bits});
          if (constant.value == kMXFP4)
            rows[block] = 120 + generator() % 4;  // an exponent
          else if (std::is_same_v<typename F::GroupNumber, float>)
            std::memcpy(&rows[block + 4 * number], &value, sizeof value);
          else
            std::memcpy(&rows[block + (constant.value == kQ6_K ? 208 : 2 * number)], &bits, sizeof bits);
        }
    });
    toka_pack_blocks(&blocks, type, rows.data(), 0, kOut, panels.data());
    vector<int64_t> ids(kOut);
    for (int64_t i = 0; i < kOut; ++i) ids[i] = i;
    PackedWeights unrounded = blocks;
    unrounded.weight_type = kFloat32;
    vector<float> plain(kOut * kIn);
    toka_embed(&unrounded, ids.data(), kOut, plain.data());
    PackedWeights whole = {kFloat32, kIn, kOut, 0, nullptr, nullptr};
    vector<float> plain_panels(num_panels * kPanel * kIn);
    whole.panels = plain_panels.data();
    toka_pack(&whole, plain.data(), plain_panels.data());
    for (int64_t num_rows : {1, 6, 7, 40}) {
      const vector<Element> x = as<Element>(random_values(num_rows * kIn));
      vector<Element> found(num_rows * kOut);
      toka_multiply(&blocks, x.data(), kIn, num_rows, nullptr, 1, 0, nullptr, nullptr, found.data());
      const vector<double> expected = products(x, plain, kIn);
      const std::string name = std::string(kNames[kElementType<Weight>]) + " blocks of type " + std::to_string(type) +
                               ", rows: " + std::to_string(num_rows);
      if constexpr (std::is_same_v<Element, bfloat16>)
        check_nearest(name, found, expected);
      else
        compare(name, found, expected, 3e-6);
      if constexpr (std::is_same_v<Weight, float>) {
        vector<float> same(found.size());
        toka_multiply(&whole, x.data(), kIn, num_rows, nullptr, 1, 0, nullptr, nullptr, same.data());
        compare(name + ", as those of packed weights", found, vector<double>(same.begin(), same.end()), 0);
      }
    }
    if constexpr (std::is_same_v<Weight, float>) check_int8(blocks, type, plain);
  }
}

// --- Attention

constexpr int64_t kHeads = 6, kKvHeads = 2, kHeadDim = 32, kPage = 16;

const LayerScores kUsualScores{1 / std::sqrt(double(kHeadDim)), 0, 0}, kLimitedScores{0.4, 2, 21};

// Attention of one query [kHeads, kHeadDim] over the first `length` keys and values, each [tokens, kKvHeads, kHeadDim].
void attend_plainly(const double* query, const double* key, const double* value, int64_t length,
                    const LayerScores& scores, double* output, double* lse) {
  const int64_t first = scores.window == 0 ? 0 : std::max<int64_t>(0, length - scores.window);
  for (int64_t head = 0; head < kHeads; ++head) {
    const int64_t kv_head = head / (kHeads / kKvHeads);
    vector<double> weights(length);
    double total = 0;
    for (int64_t token = first; token < length; ++token) {
      double score = 0;
      for (int64_t d = 0; d < kHeadDim; ++d)
        score += query[head * kHeadDim + d] * key[(token * kKvHeads + kv_head) * kHeadDim + d];
      score *= scores.scale;
      if (scores.softcap != 0) score = scores.softcap * std::tanh(score / scores.softcap);
      total += weights[token] = std::exp(score);
    }
    lse[head] = std::log(total);
    for (int64_t d = 0; d < kHeadDim; ++d) {
      double sum = 0;
      for (int64_t token = first; token < length; ++token)
        sum += weights[token] * value[(token * kKvHeads + kv_head) * kHeadDim + d];
      output[head * kHeadDim + d] = sum / total;
    }
  }
}

// What a cache keeps of [tokens, KV heads, kHeadDim].
template <typename Stored>
vector<double> kept(vector<double> values) {
  if (!std::is_same_v<Stored, int8_t>) return values;
  for (auto first = values.begin(); first != values.end(); first += kHeadDim) {
    float scale = 0;
    for (int i = 0; i < kHeadDim; ++i) scale = std::max(scale, float(std::abs(first[i])) / 127);
    uint32_t bits;
    std::memcpy(&bits, &scale, sizeof bits);
    scale = from_bits((bits + 0xFFFF) & 0xFFFF0000);
    for (int i = 0; i < kHeadDim; ++i) first[i] = std::nearbyint(float(first[i]) / scale) * scale;
  }
  return values;
}

// Elements of num_blocks blocks.
template <typename Stored>
int64_t cache_size(int64_t num_blocks) {
  return num_blocks * kKvHeads * kPage * (2 * kHeadDim + kScaleElements<Stored>);
}

// Each sequence has one row, or several, at its end; its blocks are in arbitrary order.
template <typename Stored, typename Element>
void check_attention(const LayerScores& scores) {
  const vector<int32_t> lengths = {300, 37, 70, 1}, num_rows = {1, 5, 40, 1};
  constexpr int64_t kTableWidth = 19;
  vector<int32_t> table(lengths.size() * kTableWidth), blocks(table.size()), starts = {0};
  for (size_t i = 0; i < table.size(); ++i) table[i] = int32_t(i * 7 % table.size());
  // A layer with a window has blocks of its own.
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = int32_t(blocks.size() - 1 - i);
  LayerScores own_scores = scores;
  if (scores.window != 0) own_scores.blocks = blocks.data();
  vector<Stored> cache(cache_size<Stored>(table.size()));
  vector<double> queries, expected, expected_lse;
  for (size_t segment = 0; segment < lengths.size(); ++segment) {
    const int64_t length = lengths[segment], size = kKvHeads * kHeadDim;
    const vector<double> key = random_values(length * size), value = random_values(length * size);
    vector<int64_t> kv_indices;
    for (int64_t token = 0; token < length; ++token)
      kv_indices.push_back(table[segment * kTableWidth + token / kPage] * kPage + token % kPage);
    toka_write_kv(kElementType<Element>, kElementType<Stored>, as<Element>(key).data(), as<Element>(value).data(), size,
                  size, kv_indices.data(), length, cache.data(), own_scores.blocks, kKvHeads, kHeadDim, kPage);
    for (int64_t row = 0; row < num_rows[segment]; ++row) {
      const vector<double> query = random_values(kHeads * kHeadDim);
      queries.insert(queries.end(), query.begin(), query.end());
      vector<double> output(query.size()), lse(kHeads);
      attend_plainly(query.data(), kept<Stored>(key).data(), kept<Stored>(value).data(),
                     length - num_rows[segment] + 1 + row, scores, output.data(), lse.data());
      expected.insert(expected.end(), output.begin(), output.end());
      expected_lse.insert(expected_lse.end(), lse.begin(), lse.end());
    }
    starts.push_back(starts.back() + num_rows[segment]);
  }
  const int64_t total = starts.back(), num_segments = lengths.size();
  const PagedPart part{0, total, num_segments, starts.data(), table.data(), kTableWidth, lengths.data(), 1, 0, nullptr};
  vector<Element> output(expected.size());
  vector<float> lse(expected_lse.size());
  toka_attend(kElementType<Element>, kElementType<Stored>, as<Element>(queries).data(), kHeads * kHeadDim,
              output.data(), lse.data(), cache.data(), &part, kHeads, kKvHeads, kHeadDim, kPage, &own_scores);
  const std::string name = std::string(scores.window == 0 ? "attention of " : "attention in a window of ") +
                           kNames[kElementType<Element>] + " to " + kNames[kElementType<Stored>];
  compare(name, output, expected, std::max(kTolerance<Element>, kTolerance<QueryOperand<Stored>>));
  compare(name + ", lse", lse, expected_lse, kTolerance<QueryOperand<Stored>>);
}

template <typename Element>
void check_merge() {
  const int64_t count = 3000;
  const vector<double> first = random_values(count * kHeadDim), second = random_values(count * kHeadDim);
  const vector<double> first_lse = random_values(count), second_lse = random_values(count);
  vector<double> expected(first.size());
  for (int64_t i = 0; i < count * kHeadDim; ++i) {
    const double a = std::exp(first_lse[i / kHeadDim]), b = std::exp(second_lse[i / kHeadDim]);
    expected[i] = (a * first[i] + b * second[i]) / (a + b);
  }
  vector<Element> output(first.size());
  toka_merge(kElementType<Element>, as<float>(first).data(), as<float>(first_lse).data(), as<float>(second).data(),
             as<float>(second_lse).data(), output.data(), count, kHeadDim);
  compare(std::string("merge to ") + kNames[kElementType<Element>], output, expected, kTolerance<Element>);
}

// Two of seven experts for each row, by the sigmoids of a router, and a shared expert.
template <typename Weight>
void check_experts() {
  typedef Activation<Weight> Element;
  constexpr int64_t kExperts = 7, kChosen = 2, kIn = 96, kInner = 46, kRows = 40;
  vector<Matrix<Weight>> gate_up, down;
  vector<PackedWeights> packed_gate_up, packed_down;
  gate_up.reserve(kExperts + 1), down.reserve(kExperts + 1);  // weights point into them
  for (int64_t expert = 0; expert <= kExperts; ++expert) {
    gate_up.emplace_back(kIn, kInner, true, false, 1.0 / 16);
    down.emplace_back(kInner, kIn, false, true, 1.0 / 16);
    packed_gate_up.push_back(gate_up.back().packed);
    packed_down.push_back(down.back().packed);
  }
  const Matrix<float> router(kIn, kExperts, false, false, 1.0 / 16);
  const vector<double> x = random_values(kRows * kIn), logits = router.times(x);
  vector<double> expected = down[kExperts].times(gate_up[kExperts].times(x));
  for (int64_t row = 0; row < kRows; ++row) {
    const double* const own = &logits[row * kExperts];
    const vector<double> input(&x[row * kIn], &x[row * kIn] + kIn);
    const int64_t first = std::max_element(own, own + kExperts) - own;
    int64_t second = first == 0 ? 1 : 0;
    for (int64_t expert = 0; expert < kExperts; ++expert)
      if (expert != first && own[expert] > own[second]) second = expert;
    for (const int64_t expert : {first, second}) {
      const vector<double> output = down[expert].times(gate_up[expert].times(input));
      for (int64_t i = 0; i < kIn; ++i) expected[row * kIn + i] += output[i] / (1 + std::exp(-own[expert]));
    }
  }
  Experts experts{};
  experts.num_experts = kExperts, experts.num_chosen = kChosen;
  experts.gate_up = packed_gate_up.data(), experts.down = packed_down.data();
  experts.router = router.packed, experts.scores = kSigmoid, experts.scale = 1;
  experts.shared_gate_up = packed_gate_up[kExperts], experts.shared_down = packed_down[kExperts];
  for (const int64_t num_rows : {int64_t(1), kRows}) {
    vector<Element> found(num_rows * kIn);
    toka_run_experts(&experts, nullptr, as<Element>(x).data(), num_rows, nullptr, nullptr, found.data());
    compare(std::string("experts of ") + kNames[kElementType<Weight>] + ", rows: " + std::to_string(num_rows), found,
            vector<double>(expected.begin(), expected.begin() + num_rows * kIn), 4 * kTolerance<Element>);
  }
}

// --- A whole layer

// Applies the norm and the rotary embedding to heads [rows, count, kHeadDim]; row i is at position i.
vector<double> rotated(const vector<double>& heads, int64_t count, const vector<double>& norm, double eps,
                       const vector<double>& cos_sin) {
  vector<double> to = normed(heads, norm, eps);
  for (size_t head = 0; head < to.size() / kHeadDim; ++head) {
    const double *cos = &cos_sin[head / count * kHeadDim], *sin = cos + kHeadDim / 2;
    double *first = &to[head * kHeadDim], *second = first + kHeadDim / 2;
    for (int64_t i = 0; i < kHeadDim / 2; ++i) {
      const double a = first[i], b = second[i];
      first[i] = a * cos[i] - b * sin[i];
      second[i] = b * cos[i] + a * sin[i];
    }
  }
  return to;
}

// Columns [begin, end) of rows of row_size.
vector<double> columns(const vector<double>& rows, int64_t row_size, int64_t begin, int64_t end) {
  vector<double> to;
  for (size_t first = 0; first < rows.size(); first += row_size)
    to.insert(to.end(), rows.begin() + first + begin, rows.begin() + first + end);
  return to;
}

vector<double> sum(vector<double> a, const vector<double>& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

template <typename Weight, typename Stored>
void check_layer(bool has_out_norms) {
  typedef Activation<Weight> Element;
  constexpr int64_t kRows = 20, kHidden = 96, kInner = 160, kQuery = kHeads * kHeadDim, kKv = kKvHeads * kHeadDim;
  constexpr int64_t kRow = kQuery + 2 * kKv;
  constexpr double kEps = 1e-5;
  const Matrix<Weight> qkv(kHidden, kRow, false, true, 1.0 / 16), out(kQuery, kHidden, false, false, 1.0 / 16);
  const Matrix<Weight> gate_up(kHidden, kInner, true, false, 1.0 / 16), down(kInner, kHidden, false, false, 1.0 / 16);
  const vector<double> norm = random_values(kHidden), mlp_norm = random_values(kHidden);
  const vector<double> query_norm = random_values(kHeadDim), key_norm = random_values(kHeadDim);
  const vector<double> hidden = random_values(kRows * kHidden);
  vector<double> cos_sin;
  for (int64_t row = 0; row < kRows; ++row)
    for (int64_t i = 0; i < kHeadDim; ++i) {
      const double angle = row * std::pow(100.0, -2.0 * (i % (kHeadDim / 2)) / kHeadDim);
      cos_sin.push_back(i < kHeadDim / 2 ? std::cos(angle) : std::sin(angle));
    }

  const vector<double> heads = qkv.times(normed(hidden, norm, kEps));
  const vector<double> query = rotated(columns(heads, kRow, 0, kQuery), kHeads, query_norm, kEps, cos_sin);
  const vector<double> key = rotated(columns(heads, kRow, kQuery, kQuery + kKv), kKvHeads, key_norm, kEps, cos_sin);
  const vector<double> value = columns(heads, kRow, kQuery + kKv, kRow);
  vector<double> attended(kRows * kQuery), lse(kHeads);
  for (int64_t row = 0; row < kRows; ++row)
    attend_plainly(&query[row * kQuery], key.data(), value.data(), row + 1, kLimitedScores, &attended[row * kQuery],
                   lse.data());
  const auto added = [&](vector<double> output) {
    if (!has_out_norms) return output;
    output = normed(output, norm, kEps);
    for (double& value : output) value *= 0.5;
    return output;
  };
  const vector<double> middle = sum(hidden, added(out.times(attended)));
  const vector<double> expected = sum(middle, added(down.times(gate_up.times(normed(middle, mlp_norm, kEps)))));

  vector<Stored> cache(cache_size<Stored>(4));
  const vector<int32_t> table = {3, 1}, starts = {0, kRows}, lengths = {kRows};
  vector<int64_t> kv_indices;
  for (int64_t row = 0; row < kRows; ++row) kv_indices.push_back(table[row / kPage] * kPage + row % kPage);
  const PagedPart part{0, kRows, 1, starts.data(), table.data(), 2, lengths.data(), 1, 0, nullptr};
  const PagedForward forward{
      kElementType<Stored>, cache.data(), int64_t(cache.size()), kPage, kv_indices.data(), &part, 1, nullptr,
      &kLimitedScores};
  const vector<float> norms[] = {as<float>(norm), as<float>(mlp_norm), as<float>(query_norm), as<float>(key_norm)};
  const auto rms = [&](int number) { return Norm{kRmsNorm, norms[number].data(), nullptr, kEps}; };
  const Norm out_norm = has_out_norms ? rms(0) : kUnnormed;
  const PackedLayer layer{qkv.packed,  out.packed, gate_up.packed,
                          down.packed, nullptr,    rms(0),
                          rms(1),      out_norm,   out_norm,
                          rms(2),      rms(3),     kOverHead,
                          kHeads,      kKvHeads,   kHeadDim,
                          0,           0,          0,
                          0,           0,          has_out_norms ? 0.5 : 1};
  vector<Element> found = as<Element>(hidden);
  toka_run_layers(&layer, 1, &forward, kRows, as<float>(cos_sin).data(), 1, nullptr, nullptr, found.data());
  // Intermediate results are rounded a dozen times; the cache rounds keys and values.
  const bool is_coarse = std::is_same_v<Element, bfloat16> || std::is_same_v<Stored, int8_t>;
  const double tolerance = is_coarse ? 0.03 : std::is_same_v<Stored, float> ? 1e-5 : 0.01;
  compare(std::string("a layer of ") + kNames[kElementType<Weight>] + " with a cache of " +
              kNames[kElementType<Stored>] + (has_out_norms ? " and norms of outputs" : ""),
          found, expected, tolerance);
}

// --- Sampling

uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

// As gumbel_noise in sampling/noise.py defines it.
double gumbel(uint32_t token, const int64_t* keys) {
  const uint32_t hash = mixed(mixed(token * 0x9E3779B1u + uint32_t(keys[0])) ^ uint32_t(keys[1]));
  return -std::log(-std::log1p(-(hash + 0.5) * 0x1p-32));
}

template <typename Element>
void check_sampling() {
  constexpr int64_t kRows = 40, kVocab = 1003;
  vector<double> logits = random_values(kRows * kVocab), expected_tokens, expected_logprobs;
  vector<SamplingParams> params(kRows);
  vector<int64_t> keys;
  for (int64_t row = 0; row < kRows; ++row) {
    logits[row * kVocab + generator() % kVocab] = 3;  // a unique largest logit
    params[row].temperature = row % 4 == 0 ? 0 : row % 4 == 1 ? 0.7f : 1;
    params[row].limits.top_p = 1;
    params[row].limits.top_k = row % 4 == 3;  // only the most probable token
    keys.push_back(generator());
    keys.push_back(generator());
    const bool is_greedy = row % 4 == 0 || row % 4 == 3;
    double total = 0, best = -INFINITY;
    int64_t best_token = 0;
    for (int64_t token = 0; token < kVocab; ++token) {
      const double logit = logits[row * kVocab + token];
      total += std::exp(logit);
      const double value =
          is_greedy ? logit : logit / params[row].temperature + gumbel(uint32_t(token), &keys[2 * row]);
      if (value > best) best = value, best_token = token;
    }
    expected_tokens.push_back(best_token);
    expected_logprobs.push_back(logits[row * kVocab + best_token] - std::log(total));
  }
  vector<int64_t> tokens(kRows);
  vector<float> logprobs(kRows);
  toka_sample(kElementType<Element>, as<Element>(logits).data(), kRows, kVocab, params.data(), keys.data(), nullptr,
              nullptr, nullptr, tokens.data(), logprobs.data(), nullptr);
  const std::string name = std::string("sampling from ") + kNames[kElementType<Element>];
  compare(name + ", tokens", vector<float>(tokens.begin(), tokens.end()), expected_tokens, 0);
  compare(name + ", logprobs", logprobs, expected_logprobs, 1e-6);
}

double silu(double x) { return x / (1 + std::exp(-x)); }

// A layer with a state: a decode row from row 1 to row 1, and a prompt of 5 tokens from zeros, whose state after 3 of
// them goes to row 3, and at the end to row 2.
template <typename Element>
void check_states(StateKind kind) {
  constexpr int64_t kHeads = 4, kKeys = 2, kKeyDim = 6, kSize = 3, kTokens = 6, kRows = 4;
  const int64_t value_dim = kLanes + 3, inner = kHeads * value_dim, keys = kKeys * kKeyDim;
  const bool is_conv = kind == kShortConv, is_delta = kind == kGatedDelta;
  const int64_t channels = is_conv ? inner : inner + 2 * keys;
  const int64_t num_features = is_conv    ? 3 * inner
                               : is_delta ? channels + inner + 2 * kHeads
                                          : inner + channels + kHeads;
  const int64_t num_recurrent = is_conv ? 0 : kHeads * kKeyDim * value_dim;
  const int64_t row_size = num_recurrent + (kSize - 1) * channels;
  const vector<double> conv = random_values(kSize * channels), bias = random_values(channels);
  const vector<double> step_bias = random_values(kHeads), skip = random_values(kHeads), norm = random_values(inner);
  vector<double> rates = random_values(kHeads), memory = random_values(kRows * row_size);
  for (double& rate : rates) rate = std::abs(rate);
  const vector<double> features = random_values(kTokens * num_features);
  const auto stored = as<Element>(features);
  const auto own_conv = as<float>(conv), own_bias = as<float>(bias), own_step = as<float>(step_bias);
  const auto own_skip = as<float>(skip), own_norm = as<float>(norm), own_rates = as<float>(rates);
  StateLayer layer{};
  layer.kind = kind, layer.num_channels = channels, layer.conv_size = kSize, layer.row_size = row_size;
  layer.conv = own_conv.data(), layer.conv_bias = own_bias.data(), layer.eps = 0.5;
  for (float& scale : layer.scales) scale = 1;
  if (!is_conv) {
    layer.num_heads = kHeads, layer.num_keys = kKeys, layer.key_dim = kKeyDim, layer.value_dim = value_dim;
    layer.rates = own_rates.data(), layer.step_bias = own_step.data(), layer.norm = own_norm.data();
    layer.skip = is_delta ? nullptr : own_skip.data();
  }
  const int32_t starts[] = {0, 1, 4}, counts[] = {1, 3, 2}, sources[] = {1, -1, 3}, targets[] = {1, 3, 2};
  const int32_t chains[] = {0, 1, 3};
  const StateSegments segments{2, starts, counts, sources, targets, chains};
  auto own_memory = as<float>(memory);
  vector<Element> out(kTokens * inner);
  toka_run_states(&layer, &segments, own_memory.data(), kElementType<Element>, stored.data(), kTokens, out.data());

  vector<double> expected(kTokens * inner);
  for (int segment = 0; segment < 3; ++segment) {
    vector<double> state(row_size);
    if (sources[segment] >= 0) std::copy_n(memory.begin() + sources[segment] * row_size, row_size, state.begin());
    for (int64_t token = starts[segment]; token < starts[segment] + counts[segment]; ++token) {
      const double* own = features.data() + token * num_features;
      double *tail = state.data() + num_recurrent, *to = expected.data() + token * inner;
      vector<double> passed(channels);
      for (int64_t c = 0; c < channels; ++c) {
        const double x = is_conv ? own[c] * own[2 * channels + c] : own[(is_delta ? 0 : inner) + c];
        double total = bias[c] + conv[(kSize - 1) * channels + c] * x;
        for (int64_t tap = 0; tap + 1 < kSize; ++tap) total += conv[tap * channels + c] * tail[tap * channels + c];
        for (int64_t tap = 0; tap + 2 < kSize; ++tap) tail[tap * channels + c] = tail[(tap + 1) * channels + c];
        tail[(kSize - 2) * channels + c] = x;
        passed[c] = is_conv ? own[channels + c] * total : silu(total);
      }
      if (is_conv) {
        std::copy_n(passed.begin(), inner, to);
        continue;
      }
      const double* gates = own + (is_delta ? channels : 0);
      const double* steps = own + num_features - kHeads;
      for (int64_t head = 0; head < kHeads; ++head) {
        const int64_t index = head / (kHeads / kKeys);
        double* query = passed.data() + (is_delta ? 0 : inner + keys) + index * kKeyDim;
        double* key = passed.data() + (is_delta ? keys : inner) + index * kKeyDim;
        const double* value = passed.data() + (is_delta ? 2 * keys : 0) + head * value_dim;
        double key_square = 1e-6, query_square = 1e-6;
        for (int64_t k = 0; k < kKeyDim; ++k) key_square += key[k] * key[k], query_square += query[k] * query[k];
        const double key_scale = is_delta ? 1 / std::sqrt(key_square) : 1;
        const double query_scale = is_delta ? 1 / std::sqrt(query_square * kKeyDim) : 1;
        const double step = std::log1p(std::exp(steps[head] + step_bias[head])), decay = std::exp(-rates[head] * step);
        const double rate = is_delta ? 1 / (1 + std::exp(-own[num_features - 2 * kHeads + head])) : step;
        for (int64_t v = 0; v < value_dim; ++v) {
          double* column = state.data() + head * kKeyDim * value_dim + v;
          double known = 0, output = is_delta ? 0 : skip[head] * value[v];
          for (int64_t k = 0; k < kKeyDim; ++k) known += column[k * value_dim] * decay * key[k] * key_scale;
          const double learned = (is_delta ? value[v] - known : value[v]) * rate;
          for (int64_t k = 0; k < kKeyDim; ++k) {
            column[k * value_dim] = column[k * value_dim] * decay + key[k] * key_scale * learned;
            output += column[k * value_dim] * query[k] * query_scale;
          }
          to[head * value_dim + v] = output * (is_delta ? 1 : silu(gates[head * value_dim + v]));
        }
      }
      const int64_t size = is_delta ? value_dim : inner / kKeys;
      for (int64_t first = 0; first < inner; first += size) {
        double square = 0;
        for (int64_t i = 0; i < size; ++i) square += to[first + i] * to[first + i];
        for (int64_t i = 0; i < size; ++i) {
          to[first + i] *= norm[is_delta ? i : first + i] / std::sqrt(square / size + 0.5);
          if (is_delta) to[first + i] *= silu(gates[first + i]);
        }
      }
    }
    std::copy(state.begin(), state.end(), memory.begin() + targets[segment] * row_size);
  }
  const std::string name = "states " + std::to_string(kind) + ", " + kNames[kElementType<Element>];
  compare(name, out, expected, std::is_same_v<Element, float> ? 1e-5 : 1e-2);
  compare(name + " (memory)", own_memory, memory, 1e-5);
}

}  // namespace

int main() {
  toka_set_num_threads(2);
  std::printf("dot products of bfloat16: %s\n", toka_has_bfloat16_arithmetic() ? "yes" : "no");
  check_gemm<float>();
  check_gemm<bfloat16>();
  check_blocks<float>();
  check_blocks<bfloat16>();
  check_experts<float>();
  check_experts<bfloat16>();
  for (const LayerScores& scores : {kUsualScores, kLimitedScores}) {
    check_attention<float, float>(scores);
    check_attention<bfloat16, float>(scores);
    check_attention<float16, float>(scores);
    check_attention<bfloat16, bfloat16>(scores);
    check_attention<int8_t, float>(scores);
    check_attention<int8_t, bfloat16>(scores);
  }
  check_merge<float>();
  check_merge<bfloat16>();
  for (const bool has_out_norms : {false, true}) {
    check_layer<float, float>(has_out_norms);
    check_layer<float, float16>(has_out_norms);
    check_layer<bfloat16, bfloat16>(has_out_norms);
    check_layer<float, int8_t>(has_out_norms);
  }
  check_sampling<float>();
  check_sampling<bfloat16>();
  check_adapters<float>();
  check_adapters<bfloat16>();
  for (const StateKind kind : {kGatedDelta, kShortConv, kMamba2}) {
    check_states<float>(kind);
    check_states<bfloat16>(kind);
  }
  return has_failed;
}
