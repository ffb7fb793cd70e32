// Sampling from rows of logits: what it takes.
#pragma once

#include "sampling/limits.h"
#include "sampling/logit_rules.h"
#include "sampling/token_masks.h"
#include "simd/simd.h"

// How one row is sampled: the fields of SamplingParams in messages/sampling.py, in its order. Filled by Python: a row
// of SAMPLING_DTYPE. temperature: 0 for greedy. Limits apply to rows that are not greedy.
struct SamplingParams {
  float temperature;
  Limits limits;
  Penalties penalties;
};

// Top-k logprobs of some rows, in descending order: ids and logprobs [rows with top-k logprobs, count]. index_of_row: a
// row's index in these, or -1 for rows without. Filled by Python: bindings.TopLogprobsStruct.
struct TopLogprobs {
  int64_t count;
  const int32_t* index_of_row;
  int32_t* ids;
  float* logprobs;
};

// logits [num_rows, vocab_size]; params [num_rows]; noise_keys [num_rows, 2]; rules and masks, or null -> tokens
// [num_rows] and, if not null, logprobs [num_rows] and top, both before rules, masks, temperature and limits, or after
// all of these in the rows of as_sampled [num_rows], unless it is null. top and as_sampled need
// logprobs. Rows with a logit that is NaN or positive infinity get token -1 and logprob NaN; their top is not written.
TOKA_EXPORT void toka_sample(int64_t logits_type, const void* logits, int64_t num_rows, int64_t vocab_size,
                             const SamplingParams* params, const int64_t* noise_keys, const LogitRules* rules,
                             const TokenMasks* masks, const uint8_t* as_sampled, int64_t* tokens, float* logprobs,
                             const TopLogprobs* top);
