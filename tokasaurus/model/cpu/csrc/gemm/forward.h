// One decoder layer, as Python passes it: its weights, and what it computes (LayerSpec in checkpoint/spec.py).
#pragma once

#include "gemm/experts.h"
#include "states/states.h"

// What the norms of queries and keys are over: a head, with the same weights for all or with weights of its own; or the
// heads together. HEAD_NORMS in bindings.py.
enum HeadNorms : int64_t { kOverHead, kByHead, kOverWidth };

// Filled by Python: bindings.PackedLayerStruct.
struct PackedLayer {
  PackedWeights qkv, out;
  PackedWeights gate_up, down;            // of the MLP; unused if there are experts
  const Experts* experts;                 // null: there are none
  Norm attention_norm, mlp_norm;          // of inputs
  Norm attention_out_norm, mlp_out_norm;  // of outputs, before they are added
  Norm query_norm, key_norm;
  int64_t head_norms;  // a HeadNorms
  int64_t num_query_heads, num_kv_heads, head_dim;
  int64_t query_rotary, rotary;  // indices of the tables of cosines and sines of queries and of keys; -1: none
  int64_t norms_after_rotary;
  int64_t is_parallel;         // attention and MLP have the same input
  double clip;                 // largest magnitude of queries, keys and values, before any norm; 0: any
  double residual_multiplier;  // of what is added
  // Of all adapters, as in RowAdapters; null: none ever adds to these outputs.
  const LowRank *qkv_adapters, *out_adapters, *gate_up_adapters, *down_adapters;
  // In place of attention, between qkv and out; null: there is attention. states: its memory, [rows, row_size].
  const StateLayer* state;
  float* states;
  const PackedWeights* gate;  // whose sigmoid multiplies what is attended; null: none
};
