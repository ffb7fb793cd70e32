// Matrix products of any number of rows by packed weights, with an RMS norm before, and a bias, gate or residual behind.
#pragma once

#include <vector>

#include "gemm/gemm_tile.h"

// Weights as layer_kernels.PackedWeights holds them. panels: see gemm_tile.h; padded by outputs of zeros to whole panels.
// is_gated: the first half of a panel holds the gates of kPanel / 2 outputs, the second half their ups, and out_size
// counts the outputs. bias: float32 [panels * kPanel] in the order of the panels, or null.
struct PackedWeights {
  int64_t is_bfloat16, in_size, out_size, is_gated;
  const void* panels;
  const float* bias;

  // Outputs that one panel gives.
  int64_t panel_width() const { return is_gated ? kPanel / 2 : kPanel; }
  int64_t num_panels() const { return (out_size + panel_width() - 1) / panel_width(); }
};

template <typename Weight>
struct Gemm {
  typedef Activation<Weight> Element;

  const PackedWeights& weights;
  const Element* x;  // [num_rows, in_size], rows x_stride elements apart
  int64_t x_stride, num_rows;
  const Element* residual;  // [num_rows, out_size], or null
  Element* out;             // [num_rows, out_size]; may be the residual
};

// norm_weight: float32 [in_size], of a norm that x passes first, or null.
template <typename Weight>
void multiply(const Gemm<Weight>& gemm, const float* norm_weight, double eps);

extern template void multiply(const Gemm<float>&, const float*, double);
extern template void multiply(const Gemm<bfloat16>&, const float*, double);

// Gets the memory for the normed rows of x, num_rows of in_size, and touches it.
template <typename Element>
void reserve_normed_rows(int64_t num_rows, int64_t in_size);

extern template void reserve_normed_rows<float>(int64_t, int64_t);
extern template void reserve_normed_rows<bfloat16>(int64_t, int64_t);

// Memory that is kept from call to call, and grows as needed.
template <typename Element>
Element* scratch(std::vector<Element>& memory, int64_t size) {
  if (int64_t(memory.size()) < size) memory.resize(size);
  return memory.data();
}
