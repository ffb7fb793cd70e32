// What layers with states compute between their linear layers. Each state is read once and written once: a decode row
// updates it in place; a prompt's tokens pass one after another through a part of it that stays in the first cache.

#include "states/states.h"

#include <algorithm>
#include <cmath>

#include "simd/element_type.h"
#include "simd/multiply_add.h"
#include "simd/phases.h"
#include "simd/scratch.h"
#include "simd/simd_math.h"
#include "simd/threads.h"

namespace {

// Vectors of values that are computed at once: as many sums as registers hold, and for prompts, with a part of the
// state that the first cache holds.
constexpr int kDecodeVectors = kRegisters == 32 ? 8 : 4, kPromptVectors = 4;

constexpr float kLengthEps = 1e-6f;  // of the lengths by which Gated DeltaNet divides queries and keys

// Calls body(i, count) for each vector of [0, size): count is kLanes, but for the last one.
template <typename Body>
TOKA_INLINE void for_vectors(int64_t size, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) body(i, kLanes);
  if (i < size) body(i, int(size - i));
}

template <typename Element>
TOKA_INLINE Floats load_some(const Element* from, int count) {
  if (count == kLanes) return load(from);
  float lanes[kLanes] = {};
  for (int i = 0; i < count; ++i) lanes[i] = to_float(from[i]);
  return load(lanes);
}

template <typename Element>
TOKA_INLINE void store_some(Element* to, Floats x, int count) {
  if (count == kLanes) return store(to, x);
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < count; ++i) from_float(to + i, lanes[i]);
}

// NaN stays, since x is a factor.
TOKA_INLINE Floats silu(Floats x) { return x * sigmoid(x); }

TOKA_INLINE Floats softplus(Floats x) {
  const Floats e = exp_nonpositive(x < Floats{} ? x : -x);
  // 1 + e keeps few digits of a small e.
  const Floats series = e * (1.0f - e * (1.0f / 2 - e * (1.0f / 3 - e * (1.0f / 4 - e * (1.0f / 5 - e * (1.0f / 6))))));
  return max(x, Floats{}) + (e < broadcast(0.0625f) ? series : log_positive(1.0f + e));
}

// Where the parts of a token's features and of its convolved channels begin.
struct Places {
  int64_t channels, gate, rate, step;  // among features
  int64_t query, key, value;           // among channels
  int64_t num_features, width;         // width: of the output

  explicit Places(const StateLayer& layer) {
    const int64_t keys = layer.num_keys * layer.key_dim;
    width = layer.kind == kShortConv ? layer.num_channels : layer.num_heads * layer.value_dim;
    channels = gate = rate = step = query = key = value = 0;
    if (layer.kind == kGatedDelta) {
      key = keys, value = 2 * keys;
      gate = layer.num_channels, rate = gate + width, step = rate + layer.num_heads;
      num_features = step + layer.num_heads;
    } else if (layer.kind == kMamba2) {
      channels = width, key = width, query = width + keys;
      step = channels + layer.num_channels, num_features = step + layer.num_heads;
    } else {
      num_features = 3 * width;
    }
  }
};

// What a forward's tokens have in memory between the kernel's parts: [tokens, ...].
struct Work {
  float* convolved;  // channels
  float* decays;     // heads
  float* rates;      // heads: of learning
  float* products;   // heads of keys: of key and query
  float* outputs;    // width

  Work(const StateLayer& layer, const Places& places, int64_t num_tokens) {
    static ScratchMemory<float> memory;
    const int64_t channels = layer.kind == kShortConv ? 0 : layer.num_channels;
    const int64_t row = channels + 2 * layer.num_heads + layer.num_keys + (channels ? places.width : 0);
    convolved = scratch(memory, num_tokens * row);
    decays = convolved + num_tokens * channels;
    rates = decays + num_tokens * layer.num_heads;
    products = rates + num_tokens * layer.num_heads;
    outputs = products + num_tokens * layer.num_keys;
  }
};

// The convolution of one vector of channels over all tokens of a chain; its state moves on.
template <typename Element>
void convolve(const StateLayer& layer, const Places& places, const StateSegments& segments, int64_t chain,
              int64_t first, int count, float* memory, const Element* features, const Work& work, Element* out) {
  const int64_t size = layer.conv_size, channels = layer.num_channels;
  const int64_t offset = layer.num_heads * layer.key_dim * layer.value_dim + first;
  Floats window[kMaxConvSize] = {}, weights[kMaxConvSize];
  for (int64_t tap = 0; tap < size; ++tap) weights[tap] = load_some(layer.conv + tap * channels + first, count);
  const Floats bias = layer.conv_bias == nullptr ? Floats{} : load_some(layer.conv_bias + first, count);
  const int32_t begin = segments.chains[chain], end = segments.chains[chain + 1];
  if (const int32_t source = segments.sources[begin]; source >= 0)
    for (int64_t tap = 0; tap + 1 < size; ++tap)
      window[tap] = load_some(memory + source * layer.row_size + offset + tap * channels, count);
  float scales[kLanes];  // a vector may have channels of several parts
  for (int lane = 0; lane < kLanes; ++lane) {
    const int64_t channel = first + lane;
    const int part = channel < places.key ? 1 : channel < places.query ? 2 : 3;
    scales[lane] = layer.kind == kMamba2 ? layer.scales[part] : 1;
  }
  const Floats scale = load(scales);
  for (int32_t segment = begin; segment < end; ++segment) {
    const int64_t start = segments.starts[segment], stop = start + segments.num_tokens[segment];
    for (int64_t token = start; token < stop; ++token) {
      const Element* own = features + token * places.num_features;
      Floats x;
      if (layer.kind == kShortConv)
        x = load_some(own + first, count) * load_some(own + 2 * channels + first, count);
      else
        x = load_some(own + places.channels + first, count) * scale;
      window[size - 1] = x;
      Floats total = bias;
      for (int64_t tap = 0; tap < size; ++tap) total = multiply_add(total, window[tap], weights[tap]);
      for (int64_t tap = 0; tap + 1 < size; ++tap) window[tap] = window[tap + 1];
      if (layer.kind == kShortConv)
        store_some(out + token * channels + first, total * load_some(own + channels + first, count), count);
      else
        store_some(work.convolved + token * channels + first, silu(total), count);
    }
    float* target = memory + segments.targets[segment] * layer.row_size + offset;
    for (int64_t tap = 0; tap + 1 < size; ++tap) store_some(target + tap * channels, window[tap], count);
  }
}

float dot(const float* a, const float* b, int64_t size) {
  Floats total = {};
  for_vectors(size, [&](int64_t i, int count) {
    total = multiply_add(total, load_some(a + i, count), load_some(b + i, count));
  });
  return sum(total);
}

void scale_by(float* x, int64_t size, float factor) {
  for_vectors(size, [&](int64_t i, int count) { store_some(x + i, load_some(x + i, count) * factor, count); });
}

// A token's decays and rates, and its queries and keys as the recurrence wants them.
template <typename Element>
void prepare_token(const StateLayer& layer, const Places& places, int64_t token, const Element* features,
                   const Work& work) {
  const Element* own = features + token * places.num_features;
  float* channels = work.convolved + token * layer.num_channels;
  float *decays = work.decays + token * layer.num_heads, *rates = work.rates + token * layer.num_heads;
  const bool is_delta = layer.kind == kGatedDelta;
  const float scale = is_delta ? 1 : layer.scales[4];
  for_vectors(layer.num_heads, [&](int64_t i, int count) {
    Floats step = softplus(load_some(own + places.step + i, count) * scale + load_some(layer.step_bias + i, count));
    if (!is_delta) step = max(step, broadcast(float(layer.min_step)));
    store_some(decays + i, exp_nonpositive(-load_some(layer.rates + i, count) * step), count);
    store_some(rates + i, is_delta ? sigmoid(load_some(own + places.rate + i, count)) : step, count);
  });
  for (int64_t index = 0; index < layer.num_keys; ++index) {
    float* query = channels + places.query + index * layer.key_dim;
    float* key = channels + places.key + index * layer.key_dim;
    if (is_delta) {
      const float length = std::sqrt(float(layer.key_dim));
      scale_by(query, layer.key_dim, 1 / (std::sqrt(dot(query, query, layer.key_dim) + kLengthEps) * length));
      scale_by(key, layer.key_dim, 1 / std::sqrt(dot(key, key, layer.key_dim) + kLengthEps));
    }
    work.products[token * layer.num_keys + index] = dot(query, key, layer.key_dim);
  }
}

// One token of one head, for N vectors of its values. The state is read from `before` and written to `after`, whose
// rows, one for each number of the key, are so many numbers apart; both may be the same.
template <int N>
TOKA_INLINE void pass_token(const StateLayer& layer, const Work& work, const Places& places, int64_t token,
                            int64_t head, int64_t first, int last_count, const float* before, int64_t before_stride,
                            float* after, int64_t after_stride) {
  const int64_t index = head / (layer.num_heads / layer.num_keys), key_dim = layer.key_dim;
  const float* channels = work.convolved + token * layer.num_channels;
  const float *query = channels + places.query + index * key_dim, *key = channels + places.key + index * key_dim;
  const float* values = channels + places.value + head * layer.value_dim + first;
  const float decay = work.decays[token * layer.num_heads + head], rate = work.rates[token * layer.num_heads + head];
  Floats known[N] = {}, asked[N] = {};
  const bool is_delta = layer.kind == kGatedDelta;
  if (before != nullptr) {
    for (int64_t k = 0; k < key_dim; ++k) {
      const Floats of_query = broadcast(query[k]), of_key = broadcast(key[k]);
      const float* row = before + k * before_stride;
      repeat<N>([&](auto n) TOKA_LAMBDA {
        const Floats state = load(row + n * kLanes);
        asked[n] = multiply_add(asked[n], of_query, state);
        if (is_delta) known[n] = multiply_add(known[n], of_key, state);
      });
    }
  }
  const float product = work.products[token * layer.num_keys + index];
  Floats learned[N];
  float* outputs = work.outputs + token * places.width + head * layer.value_dim + first;
  repeat<N>([&](auto n) TOKA_LAMBDA {
    const int count = n == N - 1 ? last_count : kLanes;
    const Floats value = load_some(values + n * kLanes, count);
    learned[n] = (is_delta ? value - known[n] * decay : value) * rate;
    Floats output = asked[n] * decay + learned[n] * product;
    if (layer.skip != nullptr) output += value * layer.skip[head];
    store_some(outputs + n * kLanes, output, count);
  });
  const Floats decays = broadcast(decay);
  for (int64_t k = 0; k < key_dim; ++k) {
    const Floats of_key = broadcast(key[k]);
    const float* row = before + k * before_stride;
    repeat<N>([&](auto n) TOKA_LAMBDA {
      const Floats state = before == nullptr ? Floats{} : load(row + n * kLanes) * decays;
      store(after + k * after_stride + n * kLanes, multiply_add(state, of_key, learned[n]));
    });
  }
}

// The recurrence of N vectors of one head's values over all tokens of a chain.
template <int N>
void recur(const StateLayer& layer, const Work& work, const Places& places, const StateSegments& segments,
           int64_t chain, int64_t head, int64_t first, float* memory) {
  const int64_t key_dim = layer.key_dim, value_dim = layer.value_dim, offset = head * key_dim * value_dim + first;
  const int64_t width = std::min<int64_t>(N * kLanes, value_dim - first);
  const int32_t begin = segments.chains[chain], end = segments.chains[chain + 1], source = segments.sources[begin];
  const float* from = source < 0 ? nullptr : memory + source * layer.row_size + offset;
  if (end == begin + 1 && segments.num_tokens[begin] == 1 && width == N * kLanes) {
    float* to = memory + segments.targets[begin] * layer.row_size + offset;
    return pass_token<N>(layer, work, places, segments.starts[begin], head, first, kLanes, from, value_dim, to,
                         value_dim);
  }
  static thread_local ScratchMemory<float> own;
  float* state = scratch(own, key_dim * N * kLanes);
  std::fill(state, state + key_dim * N * kLanes, 0.0f);
  if (from != nullptr)
    for (int64_t k = 0; k < key_dim; ++k) std::copy_n(from + k * value_dim, width, state + k * N * kLanes);
  const int last_count = int(width - (N - 1) * kLanes);
  for (int32_t segment = begin; segment < end; ++segment) {
    const int64_t start = segments.starts[segment], stop = start + segments.num_tokens[segment];
    for (int64_t token = start; token < stop; ++token)
      pass_token<N>(layer, work, places, token, head, first, last_count, state, N * kLanes, state, N * kLanes);
    float* to = memory + segments.targets[segment] * layer.row_size + offset;
    for (int64_t k = 0; k < key_dim; ++k) std::copy_n(state + k * N * kLanes, width, to + k * value_dim);
  }
}

// Calls recur for the largest number of vectors, of N and its halves, that `count` fills or ends in.
template <int N>
void recur_some(int64_t count, const StateLayer& layer, const Work& work, const Places& places,
                const StateSegments& segments, int64_t chain, int64_t head, int64_t first, float* memory) {
  if constexpr (N > 1)
    if (count <= N / 2) return recur_some<N / 2>(count, layer, work, places, segments, chain, head, first, memory);
  if (count == N) return recur<N>(layer, work, places, segments, chain, head, first, memory);
  if constexpr (N > 1) {
    recur<N / 2>(layer, work, places, segments, chain, head, first, memory);
    recur_some<N / 2>(count - N / 2, layer, work, places, segments, chain, head, first + N / 2 * kLanes, memory);
  }
}

// A token's outputs, normalised and gated.
template <typename Element>
void finish_token(const StateLayer& layer, const Places& places, int64_t token, const Element* features,
                  const Work& work, Element* out) {
  const Element* gates = features + token * places.num_features + places.gate;
  float* outputs = work.outputs + token * places.width;
  Element* to = out + token * places.width;
  const bool is_mamba = layer.kind == kMamba2, gates_first = is_mamba && !layer.norm_before_gate;
  const float scale = is_mamba ? layer.scales[0] : 1;
  const int64_t size = is_mamba ? places.width / layer.num_keys : layer.value_dim;  // that is normalised together
  for (int64_t first = 0; first < places.width; first += size) {
    const auto gate = [&](int64_t i, int count)
                          TOKA_LAMBDA { return silu(load_some(gates + first + i, count) * scale); };
    const auto output = [&](int64_t i, int count) TOKA_LAMBDA {
      const Floats x = load_some(outputs + first + i, count);
      return gates_first ? x * gate(i, count) : x;
    };
    float factor = 1;
    if (layer.norm != nullptr) {
      Floats squares = {};
      for_vectors(size, [&](int64_t i, int count) {
        const Floats x = output(i, count);
        squares += x * x;
      });
      factor = 1 / std::sqrt(sum(squares) / float(size) + float(layer.eps));
    }
    const float* weights = layer.norm == nullptr ? nullptr : layer.norm + (is_mamba ? first : 0);
    for_vectors(size, [&](int64_t i, int count) {
      Floats x = output(i, count) * factor;
      if (weights != nullptr) x *= load_some(weights + i, count);
      store_some(to + first + i, gates_first ? x : x * gate(i, count), count);
    });
  }
}

template <typename Element>
void run_states(const StateLayer& layer, const StateSegments& segments, float* memory, const Element* features,
                int64_t num_rows, Element* out) {
  const Places places(layer);
  const int64_t num_chains = segments.num_chains, last = segments.chains[num_chains] - 1;
  const int64_t num_tokens = segments.starts[last] + segments.num_tokens[last];
  std::fill(out + num_tokens * places.width, out + num_rows * places.width, Element{});  // of padding
  const Work work(layer, places, num_tokens);
  constexpr int64_t kChannels = 16;  // vectors that a thread convolves at a time
  const int64_t num_vectors = (layer.num_channels + kLanes - 1) / kLanes;
  const int64_t num_parts = (num_vectors + kChannels - 1) / kChannels;
  Team::get().parallel_for(num_chains * num_parts, 1, [&](int64_t item) {
    const int64_t chain = item / num_parts, begin = item % num_parts * kChannels;
    for (int64_t vector = begin; vector < std::min(begin + kChannels, num_vectors); ++vector)
      convolve(layer, places, segments, chain, vector * kLanes,
               int(std::min<int64_t>(kLanes, layer.num_channels - vector * kLanes)), memory, features, work, out);
  });
  if (layer.kind == kShortConv) return;
  Team::get().parallel_for(num_tokens, 2, [&](int64_t token) { prepare_token(layer, places, token, features, work); });
  const int64_t value_vectors = (layer.value_dim + kLanes - 1) / kLanes;
  const bool is_decode = num_tokens == num_chains;
  const int64_t at_once = is_decode ? kDecodeVectors : kPromptVectors;
  const int64_t num_blocks = (value_vectors + at_once - 1) / at_once;
  Team::get().parallel_for(num_chains * layer.num_heads * num_blocks, 1, [&](int64_t item) {
    const int64_t block = item % num_blocks, head = item / num_blocks % layer.num_heads;
    const int64_t chain = item / num_blocks / layer.num_heads, first = block * at_once;
    const int64_t count = std::min(at_once, value_vectors - first);
    if (is_decode)
      recur_some<kDecodeVectors>(count, layer, work, places, segments, chain, head, first * kLanes, memory);
    else
      recur_some<kPromptVectors>(count, layer, work, places, segments, chain, head, first * kLanes, memory);
  });
  Team::get().parallel_for(num_tokens, 2,
                           [&](int64_t token) { finish_token(layer, places, token, features, work, out); });
}

}  // namespace

TOKA_STRUCT_SIZE(StateLayer)
TOKA_STRUCT_SIZE(StateSegments)

// features [num_rows, features] -> out [num_rows, width], 0 for rows of no segment. memory: states, [rows, row_size].
TOKA_EXPORT void toka_run_states(const StateLayer* layer, const StateSegments* segments, float* memory,
                                 int64_t activation_type, const void* features, int64_t num_rows, void* out) {
  const PhaseTimer timer(kHeads);
  dispatch_activation_type(activation_type, [&](auto tag) {
    typedef TypeOf<decltype(tag)> Element;
    run_states(*layer, *segments, memory, (const Element*)features, num_rows, (Element*)out);
  });
}
