// A whole decode step in one call: from the slots' last tokens to the next ones. With few rows, the many small
// operations around the layers took a seventh of a step's time when Python called each of them: the weights have driven
// its code and data from the processor's cache by then.

#include <algorithm>

#include "attention/attention_layout.h"
#include "gemm/forward.h"
#include "sampling/noise.h"
#include "sampling/sampling.h"
#include "simd/element_type.h"

// In gemm.cpp and forward.cpp.
extern "C" {
void toka_embed(const PackedWeights* weights, const int64_t* token_ids, int64_t num_tokens, void* out);
void toka_run_layers(const PackedLayer* layers, int64_t num_layers, const PagedForward* forward, int64_t num_rows,
                     const float* cos_sin, int64_t num_tables, const int32_t* row_adapters,
                     const StateSegments* segments, void* hidden);
void toka_multiply(const PackedWeights* weights, const void* x, int64_t x_stride, int64_t num_rows, const Norm* norm,
                   double multiplier, double softcap, const LowRank* adapters, const int32_t* row_adapters, void* out);
}

// Filled by Python: DecodeStepStruct.
struct DecodeStep {
  // The model
  int64_t activation_type, num_layers, head_dim, num_tables;
  const PackedLayer* layers;
  const PackedWeights *embedding, *head;  // embedding: null if it is not packed
  const void* embedding_rows;             // [vocabulary, hidden size], in the type of the layers' weights, if it is not
  double embedding_scale;
  Norm final_norm;
  double logit_scale, logit_softcap;
  const float* cos_sin_of_position;  // [positions, num_tables, head_dim]
  // All slots: see SlotTable. cached_tokens: SlotRules.tokens.
  int32_t* positions;
  const int32_t* block_tables;
  int64_t table_width;
  int64_t* last_tokens;
  int32_t* cached_tokens;
  const uint64_t* sequence_keys;
  // The rows. forward: over kv_indices and kv_lengths below.
  int64_t num_rows;
  const int32_t* slots;
  const int32_t* row_adapters;    // [num_rows], as in RowAdapters, or null
  const StateSegments* segments;  // of layers with states, or null
  const SamplingParams* sampling_params;
  const PagedForward* forward;
  // Memory that a step fills
  int64_t *token_ids, *kv_indices, *noise_keys;  // noise_keys: [num_rows, 2]
  int32_t* kv_lengths;
  float* cos_sin;  // [num_rows, num_tables, head_dim]
  void *hidden, *logits;
  int64_t* sampled;  // -1 for a row that is not finite
};

TOKA_STRUCT_SIZE(DecodeStep)

namespace {

// What build_batch in execution/device_batch.py does for a row of any step: its position, kv index and noise keys, and
// its slot moves on.
void prepare_row(const DecodeStep& step, int64_t row) {
  const int32_t slot = step.slots[row], position = step.positions[slot], length = position + 1;
  const int64_t page_size = step.forward->page_size;
  const int32_t block = step.block_tables[slot * step.table_width + position / page_size];
  const int64_t kv_index = block * page_size + position % page_size;
  const int64_t token = step.last_tokens[slot];
  step.positions[slot] = length;
  step.kv_lengths[row] = length;
  step.kv_indices[row] = kv_index;
  step.token_ids[row] = token;
  step.cached_tokens[kv_index] = int32_t(token);
  set_position_keys(step.sequence_keys[slot], length, step.noise_keys + 2 * row);
  const int64_t size = step.num_tables * step.head_dim;
  const float* cos_sin = step.cos_sin_of_position + position * size;
  std::copy(cos_sin, cos_sin + size, step.cos_sin + row * size);
}

template <typename Weight>
void embed_plain(const DecodeStep& step) {
  typedef Activation<Weight> Element;
  const int64_t hidden_size = step.head->in_size;
  for (int64_t row = 0; row < step.num_rows; ++row) {
    const Weight* weights = (const Weight*)step.embedding_rows + step.token_ids[row] * hidden_size;
    Element* out = (Element*)step.hidden + row * hidden_size;
    for (int64_t i = 0; i < hidden_size; ++i)
      from_float(out + i, rounded<Weight>(to_float(weights[i]) * float(step.embedding_scale)));
  }
}

template <typename Weight>
void embed_packed(const DecodeStep& step) {
  toka_embed(step.embedding, step.token_ids, step.num_rows, step.hidden);
  if (step.embedding_scale == 1) return;
  Activation<Weight>* const hidden = (Activation<Weight>*)step.hidden;
  for (int64_t i = 0; i < step.num_rows * step.head->in_size; ++i)
    from_float(hidden + i, to_float(hidden[i]) * float(step.embedding_scale));
}

void embed(const DecodeStep& step) {
  dispatch_activation_type(step.layers->qkv.weight_type, [&](auto tag) {
    typedef TypeOf<decltype(tag)> Weight;
    step.embedding == nullptr ? embed_plain<Weight>(step) : embed_packed<Weight>(step);
  });
}

}  // namespace

// Runs one decode step of rows that no rule, mask or prefix group concerns and that want no logprobs. Moves their slots
// to the next position, and stores the sampled tokens as their last ones.
TOKA_EXPORT void toka_decode_step(const DecodeStep* pointer) {
  const DecodeStep& step = *pointer;
  for (int64_t row = 0; row < step.num_rows; ++row) prepare_row(step, row);
  embed(step);
  toka_run_layers(step.layers, step.num_layers, step.forward, step.num_rows, step.cos_sin, step.num_tables,
                  step.row_adapters, step.segments, step.hidden);
  toka_multiply(step.head, step.hidden, step.head->in_size, step.num_rows, &step.final_norm, step.logit_scale,
                step.logit_softcap, nullptr, nullptr, step.logits);
  toka_sample(step.activation_type, step.logits, step.num_rows, step.head->out_size, step.sampling_params,
              step.noise_keys, nullptr, nullptr, nullptr, step.sampled, nullptr, nullptr);
  // Later steps may embed it before the manager ends the sequence.
  for (int64_t row = 0; row < step.num_rows; ++row)
    step.last_tokens[step.slots[row]] = std::max<int64_t>(0, step.sampled[row]);
}
