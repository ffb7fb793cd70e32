// Attention to a cache of float32 numbers.

#include "attention/attention_layout.cpp.h"

template class LayoutAttention<float>;
template void attend_part(const Problem<float>&);
