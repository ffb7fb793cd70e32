// Gemm of any number of rows with packed weights, after an optional norm, followed by a bias, activation, gate or
// residual.
#pragma once

#include "gemm/gemm_tile.h"
#include "gemm/norm.h"
#include "simd/scratch.h"

enum ActivationFunction : int64_t { kIdentity, kSilu, kGelu, kGeluTanh, kRelu2 };  // ACTIVATIONS in bindings.py

// Where a panel of quantized weights is.
struct PanelBlocks {
  int64_t type, offset;  // a BlockType, and bytes from the start of all panels
};

// Packed weights. Filled by Python: structs.PackedWeightsStruct.
struct PackedWeights {
  int64_t weight_type;  // an ElementType, not float16; of quantized weights: kFloat32 for the dequantized model's bits
  int64_t in_size, out_size;
  int64_t is_gated;           // a panel has the gates of kPanel / 2 outputs, then their ups; out_size counts outputs
  const void* panels;         // see gemm_tile.h; padded with outputs of zeros to whole panels
  const float* bias;          // float32 [panels * kPanel] in the order of the panels, or null
  const PanelBlocks* blocks;  // of each panel, see blocks.h; null if the weights are not quantized
  int64_t is_int8;            // x is quantized too: see int8_tile.h. Only with blocks.
  int64_t activation;         // an ActivationFunction, of gates or, if there are none, of outputs
  // Of silu, unless the limit is 0: gates are at most so large, ups at most of this magnitude, and the output is
  // gate * sigmoid(alpha * gate) * (up + offset).
  double gate_limit, gate_alpha, up_offset;

  // Outputs per panel.
  int64_t panel_width() const { return is_gated ? kPanel / 2 : kPanel; }
  int64_t num_panels() const { return (out_size + panel_width() - 1) / panel_width(); }
};

// What an adapter adds to the outputs of a panel: each half has `count` ranks, from its first on.
struct LowRankPanel {
  int64_t offset;  // of its numbers, in `up`
  int64_t first[2], count;
};

// What one adapter adds to the outputs of packed weights, before the bias: (x times down) times up. Source: arXiv
// 2106.09685. Both matrices are of the type of the weights that they are added to. Filled by Python:
// bindings.LowRankStruct.
struct LowRank {
  // Of whole panels of ranks, and then of single vectors of them: [in_size / kPair][ranks][kPair].
  const void* down;
  int64_t num_ranks;           // a multiple of kRankMultiple, some of zeros
  const void* up;              // of each panel [count / kPair][kPanel][kPair]; null: nothing is added
  const LowRankPanel* panels;  // counts are even
};

// The adapters of rows. table: by their numbers, of which 0 adds nothing; of_rows [num_rows]; null: no row has one.
struct RowAdapters {
  const LowRank* table;
  const int32_t* of_rows;

  // Of the rows from `first` on.
  RowAdapters from(int64_t first) const { return {table, of_rows == nullptr ? nullptr : of_rows + first}; }
};

template <typename Weight>
struct Gemm {
  typedef Activation<Weight> Element;

  const PackedWeights& weights;
  const Element* x;  // [num_rows, in_size], rows x_stride elements apart
  int64_t x_stride, num_rows;
  const Element* residual;  // [num_rows, out_size], or null
  Element* out;             // [num_rows, out_size]; may be the residual
  float multiplier = 1;     // of outputs, before the residual is added
  float softcap = 0;        // they become softcap * tanh(output / softcap) first; 0: they do not
  RowAdapters adapters = {};
  const float* group_sums = nullptr;  // of x, as below: set by multiply_groups
  const Element* tiles = nullptr;     // x in tiles, if it is in parts
  const Element* inner = nullptr;     // x times the down matrices of the rows' adapters, [num_rows, inner_size]
  int64_t inner_size = 0;
};

// norm: applied to x first.
template <typename Weight>
void multiply(const Gemm<Weight>& gemm, const Norm& norm);

extern template void multiply(const Gemm<float>&, const Norm&);
extern template void multiply(const Gemm<bfloat16>&, const Norm&);

// Of x, the rows [starts[group], starts[group + 1]) times weights[group], for each of num_groups groups. gemm.weights
// is the first of the weights, which have the same sizes and options; a quantized weight's types may differ.
template <typename Weight>
void multiply_groups(const Gemm<Weight>& gemm, const Norm& norm, const PackedWeights* weights, int64_t num_groups,
                     const int64_t* starts);

extern template void multiply_groups(const Gemm<float>&, const Norm&, const PackedWeights*, int64_t, const int64_t*);
extern template void multiply_groups(const Gemm<bfloat16>&, const Norm&, const PackedWeights*, int64_t, const int64_t*);

// Allocates and touches the memory for normalized rows of x, [num_rows, in_size].
template <typename Element>
void reserve_normed_rows(int64_t num_rows, int64_t in_size);

extern template void reserve_normed_rows<float>(int64_t, int64_t);
extern template void reserve_normed_rows<bfloat16>(int64_t, int64_t);

// Allocates and touches the memory for num_rows rows of x in integers, or for their sums, if these weights want them.
// num_groups: most groups that the rows are in.
void reserve_rows(const PackedWeights& weights, int64_t num_rows, int64_t num_groups = 1);
