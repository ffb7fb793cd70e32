// Attention to a cache of float16 numbers.

#include "attention/attention_layout.cpp.h"

template class LayoutAttention<float16>;
template void attend_part(const Problem<float16>&);
