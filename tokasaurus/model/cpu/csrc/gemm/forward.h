// The weights of one decoder layer, as Python passes them.
#pragma once

#include "gemm/gemm.h"

// Filled by Python: structs.PackedLayerStruct. The norms' weights are float32; query_norm and key_norm, [head_dim], are
// null if the model has none.
struct PackedLayer {
  PackedWeights qkv, out, gate_up, down;
  const float *attention_norm, *mlp_norm, *query_norm, *key_norm;
  int64_t num_query_heads, num_kv_heads, head_dim;
  double eps;
};
