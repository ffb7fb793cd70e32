// Attention over a bfloat16 KV cache.

#include "attention/attention_layout.cpp.h"

template class LayoutAttention<bfloat16>;
template void attend_part(const Problem<bfloat16>&);
