// Attention over an int8 KV cache.

#include "attention/attention_layout.cpp.h"

template class LayoutAttention<int8_t>;
template void attend_part(const Problem<int8_t>&);
