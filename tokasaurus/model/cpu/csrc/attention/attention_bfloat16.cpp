// Attention to a cache of bfloat16 numbers.

#include "attention/attention_layout.cpp.h"

template class LayoutAttention<bfloat16>;
template void attend_part(const Problem<bfloat16>&);
