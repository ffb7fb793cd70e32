// The feed-forward of a layer with experts (mixture of experts), of which a router chooses some for each row.
#pragma once

#include "gemm/gemm.h"

// What is made of the router's logits: probabilities of all experts; of the chosen ones, which have the largest logits;
// the sigmoid of each; arXiv 2409.12136, for each chosen one in turn its probability among those that were not chosen
// before and whose logits are nearly as large; or the sigmoid of each chosen one, which have the largest logits.
// ROUTER_SCORES in bindings.py.
enum RouterScores : int64_t { kSoftmax, kSoftmaxOfChosen, kSigmoid, kSparseMixer, kSigmoidOfChosen };

// Filled by Python: bindings.ExpertsStruct.
struct Experts {
  int64_t num_experts, num_chosen;
  const PackedWeights *gate_up, *down;  // [num_experts], of the same sizes and options
  // The router. Where the choices are given, only the numbers above are read.
  PackedWeights router;      // float32, an output for each expert; with gates_shared, one more
  int64_t scores;            // a RouterScores
  const float* choice_bias;  // [num_experts], added to scores where experts are chosen; or null
  // Groups of adjacent experts. A row's experts are chosen from its best groups: those whose two largest scores have
  // the largest sums.
  int64_t num_groups, num_chosen_groups;
  int64_t normalizes;                         // the weights of a row's experts are divided by their sum
  double min_sum;                             // and at least by this
  double scale;                               // of the weights
  double jitter;                              // with kSparseMixer, half of the relative distance of logits to leave out
  PackedWeights shared_gate_up, shared_down;  // of an expert of all rows; panels of null: there is none
  int64_t gates_shared;                       // its output is multiplied by the sigmoid of the router's last output
  int64_t weighs_inputs;  // a row's weights are factors of its experts' inputs, not of their outputs
  int32_t* recorded;      // [num_rows, num_chosen] of a call: gets the router's choices; or null
};

// Experts of rows that Python has chosen.
struct Choices {
  const int64_t* experts;  // [num_rows, num_chosen], none twice in a row; others than the num_experts add nothing
  const float* weights;    // likewise
};

// Of x [num_rows, in_size], normalized, each row's sum of its experts' outputs, each times its weight, and of the
// shared expert's -> out [num_rows, in_size], which is not x. Outputs are added in float32, in the order of a row's
// choices, and rounded once: a row's result does not depend on the others. Only with quantised weights whose results
// are bfloat16 it does, by the rounding of float32 sums: an expert's number of rows decides how it multiplies them. Of
// experts with the same score, the first are chosen. given: null if the router chooses.
template <typename Weight>
void run_experts(const Experts& experts, const Norm& norm, const Activation<Weight>* x, int64_t num_rows,
                 const Choices* given, Activation<Weight>* out);

extern template void run_experts<float>(const Experts&, const Norm&, const float*, int64_t, const Choices*, float*);
extern template void run_experts<bfloat16>(const Experts&, const Norm&, const Activation<bfloat16>*, int64_t,
                                           const Choices*, Activation<bfloat16>*);

// Allocates and touches the memory that run_experts keeps between calls, for up to num_rows rows.
template <typename Weight>
void reserve_experts(const Experts& experts, int64_t num_rows);

extern template void reserve_experts<float>(const Experts&, int64_t);
extern template void reserve_experts<bfloat16>(const Experts&, int64_t);
