#include "gemm/experts.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd/element_type.h"
#include "simd/phases.h"
#include "simd/simd_math.h"
#include "simd/threads.h"

namespace {

// Rows of experts that are computed at a time: with more, intermediate results would take gigabytes.
constexpr int64_t kMaxExpertRows = 8192;

// In place of a row, for a choice of another rank's expert.
constexpr int64_t kElsewhere = -1;

// Rows that a thread claims at a time.
constexpr int64_t kRows = 16;

// scores [count] of logits, which sum to 1. Both have space for whole vectors.
void softmax(const float* logits, int64_t count, float* scores) {
  float largest = -std::numeric_limits<float>::infinity(), total = 0;
  for (int64_t i = 0; i < count; ++i) largest = max(logits[i], largest);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats x = load(logits + i) - largest;
    store(scores + i, x == x ? exp_nonpositive(x) : x);  // NaN stays
  }
  for (int64_t i = 0; i < count; ++i) total += scores[i];
  for (int64_t i = 0; i < count; ++i) scores[i] /= total;
}

float sigmoid(float x) {
  const float small = std::exp(-std::fabs(x));
  return (x > 0 ? 1 : small) / (1 + small);
}

// The indices of the `count` largest of numbers [size] -> largest, in falling order; of equal ones the first.
void find_largest(const float* numbers, int64_t size, int64_t count, int64_t* largest) {
  for (int64_t i = 0; i < size; ++i) {
    if (i >= count && !(numbers[i] > numbers[largest[count - 1]])) continue;
    int64_t place = std::min(i, count - 1);
    for (; place > 0 && numbers[i] > numbers[largest[place - 1]]; --place) largest[place] = largest[place - 1];
    largest[place] = i;
  }
}

// Makes the scores [num_experts] of all groups but the best ones too small to be chosen.
void exclude_groups(const Experts& experts, float* scores) {
  constexpr float kExcluded = -std::numeric_limits<float>::infinity();
  static thread_local ScratchMemory<float> best_memory;
  static thread_local ScratchMemory<int64_t> chosen_memory;
  const int64_t size = experts.num_experts / experts.num_groups;
  float* const best = scratch(best_memory, 2 * experts.num_groups);
  for (int64_t group = 0; group < experts.num_groups; ++group) {
    float first = kExcluded, second = kExcluded;
    for (int64_t i = group * size; i < (group + 1) * size; ++i) {
      second = max(std::min(scores[i], first), second);
      first = max(scores[i], first);
    }
    best[group] = first + second;
  }
  int64_t* const chosen = scratch(chosen_memory, experts.num_chosen_groups);
  find_largest(best, experts.num_groups, experts.num_chosen_groups, chosen);
  float* const is_chosen = best + experts.num_groups;
  std::fill(is_chosen, is_chosen + experts.num_groups, 0.0f);
  for (int64_t i = 0; i < experts.num_chosen_groups; ++i) is_chosen[chosen[i]] = 1;
  for (int64_t i = 0; i < experts.num_experts; ++i)
    if (is_chosen[i / size] == 0) scores[i] = kExcluded;
}

// As choose, of kSparseMixer. left [num_experts]: the logits, of which the chosen ones become too small. NaN is chosen
// as 0, since it is no larger than what is too small; the weights stay NaN.
void mix_sparsely(const Experts& experts, const float* logits, float* left, int64_t* chosen, float* weights) {
  for (int64_t n = 0; n < experts.num_experts; ++n)
    if (std::isnan(logits[n])) left[n] = 0;
  for (int64_t i = 0; i < experts.num_chosen; ++i) {
    find_largest(left, experts.num_experts, 1, chosen + i);
    const float most = left[chosen[i]];
    float total = 0;
    for (int64_t n = 0; n < experts.num_experts; ++n) {
      const bool is_far = (most - logits[n]) / max(std::fabs(logits[n]), most) > 2 * float(experts.jitter);
      if (!is_far) total += std::isnan(logits[n]) ? logits[n] : std::exp(left[n] - most);
    }
    weights[i] = 1 / total;
    left[chosen[i]] = -std::numeric_limits<float>::infinity();
  }
}

// The experts of a row and their weights [num_chosen], from the router's logits [num_experts].
void choose(const Experts& experts, const float* logits, int64_t* chosen, float* weights) {
  static thread_local ScratchMemory<float> memory;
  const int64_t num_experts = experts.num_experts, num_chosen = experts.num_chosen;
  const int64_t padded = (num_experts + kLanes - 1) / kLanes * kLanes;
  float *const padded_logits = scratch(memory, 3 * padded), *const scores = padded_logits + padded,
               *const candidates = scores + padded;
  std::fill(padded_logits, scores, -std::numeric_limits<float>::infinity());
  std::copy(logits, logits + num_experts, padded_logits);
  if (experts.scores == kSparseMixer) return mix_sparsely(experts, logits, padded_logits, chosen, weights);
  if (experts.scores == kSoftmax)
    softmax(padded_logits, num_experts, scores);
  else
    for (int64_t i = 0; i < num_experts; ++i) scores[i] = experts.scores == kSigmoid ? sigmoid(logits[i]) : logits[i];
  for (int64_t i = 0; i < num_experts; ++i)
    candidates[i] = scores[i] + (experts.choice_bias == nullptr ? 0 : experts.choice_bias[i]);
  if (experts.num_groups > 1) exclude_groups(experts, candidates);
  find_largest(candidates, num_experts, num_chosen, chosen);
  for (int64_t i = 0; i < num_chosen; ++i) weights[i] = scores[chosen[i]];
  if (experts.scores == kSoftmaxOfChosen) {
    std::fill(padded_logits, scores, -std::numeric_limits<float>::infinity());
    std::copy(weights, weights + num_chosen, padded_logits);
    softmax(padded_logits, num_chosen, candidates);
    std::copy(candidates, candidates + num_chosen, weights);
  }
  if (experts.scores == kSigmoidOfChosen)
    for (int64_t i = 0; i < num_chosen; ++i) weights[i] = sigmoid(weights[i]);
  float total = 0;
  for (int64_t i = 0; i < num_chosen; ++i) total += weights[i];
  const float divisor = experts.normalizes ? max(float(experts.min_sum), total) : 1;
  for (int64_t i = 0; i < num_chosen; ++i) weights[i] = weights[i] / divisor * float(experts.scale);
}

// Memory that is kept between calls.
template <typename Element>
struct Memory {
  ScratchMemory<Element> normed, by_expert, features, shared;
  ScratchMemory<float> wide, logits, weights;
  ScratchMemory<int64_t> chosen, starts, places;

  static Memory& get() {
    static Memory memory;
    return memory;
  }
};

// Rows of one layer that are computed at a time.
template <typename Weight>
class Part {
  typedef Activation<Weight> Element;

 public:
  Part(const Experts& experts, int64_t num_rows)
      : experts_(experts),
        num_rows_(num_rows),
        size_(experts.gate_up->in_size),
        num_pairs_(num_rows * experts.num_chosen),
        memory_(Memory<Element>::get()) {
    const int64_t num_outputs = experts.num_experts + 1;
    scratch(memory_.normed, num_rows * size_);
    scratch(memory_.by_expert, num_pairs_ * size_);
    scratch(memory_.features, num_pairs_ * experts.gate_up->out_size);
    if (has_shared()) scratch(memory_.shared, num_rows * experts.shared_gate_up.out_size);
    if (!std::is_same_v<Element, float>) scratch(memory_.wide, num_rows * size_);
    scratch(memory_.logits, num_rows * num_outputs);
    scratch(memory_.weights, num_pairs_);
    scratch(memory_.chosen, num_pairs_);
    scratch(memory_.starts, num_outputs);
    scratch(memory_.places, num_pairs_);
  }

  // recorded: gets the router's choices, or null.
  void run(const Norm& norm, const Element* x, const Choices* given, int32_t* recorded, Element* out) {
    if (norm.kind != kNoNorm) x = normalized(norm, x);
    if (given == nullptr) route(x);
    if (recorded != nullptr) std::copy_n(memory_.chosen.data(), num_pairs_, recorded);
    const int64_t* const chosen = given == nullptr ? memory_.chosen.data() : given->experts;
    const float* const weights = given == nullptr ? memory_.weights.data() : given->weights;
    sort(chosen);
    gather(x, weights);
    // The outputs replace the inputs, which nothing needs any longer.
    Element *const rows = memory_.by_expert.data(), *const features = memory_.features.data();
    const auto multiply_all = [&](const PackedWeights* weights, const Element* from, Element* to) {
      const int64_t num_own = memory_.starts[experts_.num_experts];
      multiply_groups<Weight>({*weights, from, weights->in_size, num_own, nullptr, to}, kUnnormed, weights,
                              experts_.num_experts, memory_.starts.data());
    };
    multiply_all(experts_.gate_up, rows, features);
    multiply_all(experts_.down, features, rows);
    if (has_shared()) {
      const PackedWeights &enter = experts_.shared_gate_up, &leave = experts_.shared_down;
      multiply<Weight>({enter, x, size_, num_rows_, nullptr, memory_.shared.data()}, kUnnormed);
      multiply<Weight>({leave, memory_.shared.data(), leave.in_size, num_rows_, nullptr, out}, kUnnormed);
    }
    add(weights, out);
  }

 private:
  bool has_shared() const { return experts_.shared_down.panels != nullptr; }

  const Element* normalized(const Norm& norm, const Element* x) {
    const PhaseTimer timer(kGemms);
    Element* const to = memory_.normed.data();
    Team::get().parallel_for(num_rows_, kRows,
                             [&](int64_t row) { normalize(norm, x + row * size_, size_, to + row * size_); });
    return to;
  }

  // Fills `chosen` and `weights`. Logits are sums of float32, since rounded ones would choose other experts.
  void route(const Element* x) {
    const float* wide = (const float*)x;
    if constexpr (!std::is_same_v<Element, float>) {
      const PhaseTimer timer(kGemms);
      float* const to = memory_.wide.data();
      Team::get().parallel_for(num_rows_, kRows, [&](int64_t row) {
        for (int64_t i = row * size_; i < (row + 1) * size_; ++i) to[i] = to_float(x[i]);
      });
      wide = to;
    }
    const PackedWeights& router = experts_.router;
    multiply<float>({router, wide, size_, num_rows_, nullptr, memory_.logits.data()}, kUnnormed);
    const PhaseTimer timer(kGemms);
    Team::get().parallel_for(num_rows_, kRows, [&](int64_t row) {
      const int64_t first = row * experts_.num_chosen;
      choose(experts_, memory_.logits.data() + row * router.out_size, memory_.chosen.data() + first,
             memory_.weights.data() + first);
    });
  }

  // Fills `starts`, where each expert's rows begin, and `places`, the row of each pair of a row and one of its choices,
  // or kElsewhere.
  void sort(const int64_t* chosen) {
    const PhaseTimer timer(kGemms);
    int64_t* const starts = memory_.starts.data();
    std::fill(starts, starts + experts_.num_experts + 1, 0);
    const auto is_own = [&](int64_t expert) { return expert >= 0 && expert < experts_.num_experts; };
    for (int64_t pair = 0; pair < num_pairs_; ++pair)
      if (is_own(chosen[pair])) ++starts[chosen[pair] + 1];
    for (int64_t expert = 0; expert < experts_.num_experts; ++expert) starts[expert + 1] += starts[expert];
    for (int64_t pair = 0; pair < num_pairs_; ++pair)
      memory_.places[pair] = is_own(chosen[pair]) ? starts[chosen[pair]]++ : kElsewhere;
    // Each start has moved to the expert's end, which is the next one's start.
    std::copy_backward(starts, starts + experts_.num_experts, starts + experts_.num_experts + 1);
    starts[0] = 0;
  }

  void gather(const Element* x, const float* weights) {
    const PhaseTimer timer(kGemms);
    Team::get().parallel_for(num_rows_, kRows, [&](int64_t row) {
      for (int64_t pair = row * experts_.num_chosen; pair < (row + 1) * experts_.num_chosen; ++pair) {
        if (memory_.places[pair] == kElsewhere) continue;
        Element* const to = memory_.by_expert.data() + memory_.places[pair] * size_;
        std::copy(x + row * size_, x + (row + 1) * size_, to);
        if (!experts_.weighs_inputs) continue;
        for (int64_t i = 0; i < size_; ++i) from_float(to + i, to_float(to[i]) * weights[pair]);
      }
    });
  }

  // Adds the outputs of each row's experts. out has the shared expert's, if there is one.
  void add(const float* weights, Element* out) {
    const PhaseTimer timer(kGemms);
    const int64_t num_chosen = experts_.num_chosen, num_outputs = experts_.router.out_size;
    Team::get().parallel_for(num_rows_, kRows, [&](int64_t row) {
      const auto weight = [&](int64_t k) { return experts_.weighs_inputs ? 1 : weights[row * num_chosen + k]; };
      const int64_t* const places = memory_.places.data() + row * num_chosen;
      const float shared = experts_.gates_shared ? sigmoid(memory_.logits[(row + 1) * num_outputs - 1]) : 1;
      Element* const to = out + row * size_;
      int64_t i = 0;
      for (; i + kLanes <= size_; i += kLanes) {
        Floats total{};
        if (has_shared()) total = load(to + i) * shared;
        for (int64_t k = 0; k < num_chosen; ++k) {
          if (places[k] == kElsewhere) continue;
          total += load(memory_.by_expert.data() + places[k] * size_ + i) * weight(k);
        }
        store(to + i, total);
      }
      for (; i < size_; ++i) {
        float total = has_shared() ? to_float(to[i]) * shared : 0;
        for (int64_t k = 0; k < num_chosen; ++k) {
          if (places[k] == kElsewhere) continue;
          total += to_float(memory_.by_expert[places[k] * size_ + i]) * weight(k);
        }
        from_float(to + i, total);
      }
    });
  }

  const Experts& experts_;
  const int64_t num_rows_, size_, num_pairs_;
  Memory<Element>& memory_;
};

int64_t rows_of_part(const Experts& experts) { return std::max<int64_t>(1, kMaxExpertRows / experts.num_chosen); }

}  // namespace

template <typename Weight>
void run_experts(const Experts& experts, const Norm& norm, const Activation<Weight>* x, int64_t num_rows,
                 const Choices* given, Activation<Weight>* out) {
  const int64_t step = rows_of_part(experts), size = experts.gate_up->in_size, num_chosen = experts.num_chosen;
  for (int64_t first = 0; first < num_rows; first += step) {
    Choices own{};
    if (given != nullptr) own = {given->experts + first * num_chosen, given->weights + first * num_chosen};
    int32_t* const recorded =
        given != nullptr || experts.recorded == nullptr ? nullptr : experts.recorded + first * num_chosen;
    Part<Weight>(experts, std::min(step, num_rows - first))
        .run(norm, x + first * size, given == nullptr ? nullptr : &own, recorded, out + first * size);
  }
}

template void run_experts<float>(const Experts&, const Norm&, const float*, int64_t, const Choices*, float*);
template void run_experts<bfloat16>(const Experts&, const Norm&, const Activation<bfloat16>*, int64_t, const Choices*,
                                    Activation<bfloat16>*);

template <typename Weight>
void reserve_experts(const Experts& experts, int64_t num_rows) {
  const int64_t part_rows = std::min(num_rows, rows_of_part(experts)), num_pairs = part_rows * experts.num_chosen;
  Part<Weight>(experts, part_rows);
  for (const PackedWeights* weights : {experts.gate_up, experts.down})
    reserve_rows(*weights, num_pairs, experts.num_experts);
  if (experts.shared_down.panels == nullptr) return;
  for (const PackedWeights* weights : {&experts.shared_gate_up, &experts.shared_down})
    reserve_rows(*weights, part_rows);
}

template void reserve_experts<float>(const Experts&, int64_t);
template void reserve_experts<bfloat16>(const Experts&, int64_t);

TOKA_STRUCT_SIZE(Experts)

// Most rows of experts that are computed at a time.
TOKA_EXPORT int64_t toka_max_expert_rows() { return kMaxExpertRows; }

// x, out [num_rows, in_size], contiguous. norm, chosen: null if there is none; of experts that are given their choices,
// chosen and weights [num_rows, num_chosen].
TOKA_EXPORT void toka_run_experts(const Experts* experts, const Norm* norm, const void* x, int64_t num_rows,
                                  const int64_t* chosen, const float* weights, void* out) {
  dispatch_activation_type(experts->down->weight_type, [&](auto tag) {
    typedef TypeOf<decltype(tag)> Weight;
    typedef Activation<Weight> Element;
    const Choices given{chosen, weights};
    run_experts<Weight>(*experts, norm == nullptr ? kUnnormed : *norm, (const Element*)x, num_rows,
                        chosen == nullptr ? nullptr : &given, (Element*)out);
  });
}

// Allocates and touches the memory that calls of up to num_rows rows keep between calls.
TOKA_EXPORT void toka_reserve_experts(const Experts* experts, int64_t num_rows) {
  dispatch_activation_type(experts->down->weight_type,
                           [&](auto tag) { reserve_experts<TypeOf<decltype(tag)>>(*experts, num_rows); });
}
