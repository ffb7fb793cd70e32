// A layer with a state of fixed size (StateSpec in checkpoint/spec.py), as Python passes it: what is between its two
// linear layers.
#pragma once

#include "simd/simd.h"

enum StateKind : int64_t { kGatedDelta, kShortConv, kMamba2 };  // STATE_KINDS in bindings.py

// Filled by Python: bindings.StateLayerStruct. A rank's share: features of a token are [q, k, v | gate | rate | step]
// of Gated DeltaNet, [before, after, x] of a short convolution, [gate | x, b, c | step] of Mamba 2. A token's b is a
// key, its c a query.
struct StateLayer {
  int64_t kind;                   // a StateKind
  int64_t num_heads, num_keys;    // heads of values; of keys and queries, each for as many adjacent heads of values
  int64_t key_dim, value_dim;     // 0 of a short convolution
  int64_t num_channels;           // of the convolution
  int64_t conv_size;              // tokens that it sees
  const float *conv, *conv_bias;  // [conv_size, channels]; [channels] or null
  const float *rates, *step_bias, *skip;  // [heads]: of decay; added to steps; of x that is added to outputs, or null
  const float* norm;                      // of outputs, [value_dim] or, of Mamba 2, [heads, value_dim]; null: none
  double eps, min_step;
  int64_t norm_before_gate;
  float scales[5];   // of Mamba 2's features: gate, x, b, c, step
  int64_t row_size;  // numbers of a state: [heads, key_dim, value_dim], then [conv_size - 1, channels]
};

constexpr int64_t kMaxConvSize = 8;

// Filled by Python: bindings.StateSegmentsStruct. See Segments in decoder/state_rows.py; -1 is a source of zeros.
struct StateSegments {
  int64_t num_chains;
  const int32_t *starts, *num_tokens, *sources, *targets;  // of each segment
  const int32_t* chains;                                   // [num_chains + 1]
};
