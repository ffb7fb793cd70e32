// Attention over a float32 KV cache.

#include "attention/attention_layout.cpp.h"

template class LayoutAttention<float>;
template void attend_part(const Problem<float>&);
