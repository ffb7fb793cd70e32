// Attention over a float16 KV cache.

#include "attention/attention_layout.cpp.h"

template class LayoutAttention<float16>;
template void attend_part(const Problem<float16>&);
