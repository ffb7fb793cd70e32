// Applies biases and penalties to rows of logits. messages/forward.py and messages/sampling.py define them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "simd/simd.h"

// The rules of A rows. Filled by Python: bindings.LogitRulesStruct, from RuledRows in sampling/rules.py.
// rule_of_row: a row's index among the A, or -1 if it has no rule.
struct LogitRules {
  const int32_t* rule_of_row;
  const int32_t* tokens;
  const int32_t* block_tables;  // [A, table_width]
  const int32_t* lengths;
  const int32_t* num_request_tokens;
  const int64_t* bias_starts;
  const int32_t* bias_ids;
  const float* bias_values;
  int64_t page_size, table_width;
};

// The penalties of one row: fields of SamplingParams, in its order.
struct Penalties {
  float presence, frequency, repetition;
};

// changed [vocab_size] = the row's logits after the rule is applied.
template <typename Element>
void apply_logit_rules(const LogitRules& rules, int64_t rule, const Penalties& penalties, const Element* row,
                       int64_t vocab_size, std::vector<float>& changed) {
  static thread_local std::vector<int32_t> counts;  // per token: 0 if not seen, else 1 + times generated
  static thread_local std::vector<int32_t> seen;
  changed.resize(vocab_size);
  for (int64_t token = 0; token < vocab_size; ++token) changed[token] = to_float(row[token]);
  for (int64_t i = rules.bias_starts[rule]; i < rules.bias_starts[rule + 1]; ++i)
    changed[rules.bias_ids[i]] += rules.bias_values[i];

  const int32_t* table = rules.block_tables + rule * rules.table_width;
  if (int64_t(counts.size()) < vocab_size) counts.resize(vocab_size, 0);
  seen.clear();
  const int64_t length = rules.lengths[rule], page_size = rules.page_size;
  for (int64_t first = 0; first < length; first += page_size) {
    const int32_t* tokens = rules.tokens + *table++ * page_size;
    for (int64_t position = first; position < std::min(first + page_size, length); ++position) {
      const int32_t token = tokens[position - first];
      if (counts[token] == 0) {
        counts[token] = 1;
        seen.push_back(token);
      }
      counts[token] += position >= rules.num_request_tokens[rule];
    }
  }
  for (const int32_t token : seen) {
    float logit = changed[token];
    logit = logit > 0 ? logit / penalties.repetition : logit * penalties.repetition;
    const float num_generated = float(counts[token] - 1);
    changed[token] = logit - penalties.frequency * num_generated - (num_generated > 0 ? penalties.presence : 0);
    counts[token] = 0;
  }
}
