"""What changes with every step: the counters, tokens and block tables of the running sequences, as arrays by slot."""

import numpy as np
from numpy.typing import NDArray

from tokasaurus.messages.generation import MAX_STOP_TOKEN_IDS

NEVER = np.iinfo(np.int64).max


class SlotArrays:
    """One place per batch slot; slot 0 is for padding and belongs to no sequence.

    One counter tells how far the steps sent so far go, because a decode step writes the KV of the token sampled by the
    step before: with P tokens of prefill, `num_kv_tokens` = P means that the first token is being sampled, P + 1 that
    the second is.

    num_kv_tokens: tokens whose KV the steps sent so far compute or found cached.
    num_known_tokens: prompt and sampled tokens whose values are here.
    num_prompt_tokens: of the request's own prompt. num_prefill_tokens: with the tokens kept over a preemption.
    max_kv_tokens: where its last step leaves num_kv_tokens.
    num_covered_tokens: tokens for which its blocks suffice.
    last_tokens: the newest known token.
    opened_at: the step that opened the slot for its sequence at the worker; NEVER while no step has.
    admitted_at: a number that grows with every admission, for the order among sequences.
    first_positions: where its prefill begins. first_writes: the KV of the tokens before is cached; where that is behind
    first_positions, what lies between is computed again for its logits alone.
    nodes: index of the deepest node it holds in the prefix tree.
    is_running, is_decoding: of the running, those that decode in every step in which they are not held.
    ends_at_eos: eos ends it. stop_token_ids: [slots, MAX_STOP_TOKEN_IDS], others that do; -1 for none.
    may_stop: something may end it before its last token.
    has_stops: it has stop strings. want_logprobs: they were asked for.
    has_grammar: each of its tokens has a mask. is_held: and a token is being sampled, or read by its grammar, so that
    the mask of the next is not there. is_slow: that may take long.
    stop_rows: the row of StopTokens that is for its stop strings. may_have_stopped: a token that may end one has come
    since they were last looked for. num_counted_tokens: sampled tokens that are counted, of those with stop strings.
    groups: which group of those that share a prefix it decodes in; 0 for none. num_shared_tokens: of its prompt, the
    longest prefix that it has attended to in a group.
    block_tables: [slots, most blocks + 1]; 0, the padding block, beyond a sequence's blocks.
    """

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        def zeros() -> NDArray[np.int64]:
            return np.zeros(num_slots + 1, np.int64)

        def false() -> NDArray[np.bool_]:
            return np.zeros(num_slots + 1, np.bool_)

        self.num_kv_tokens = zeros()
        self.num_known_tokens = zeros()
        self.num_prompt_tokens = zeros()
        self.num_prefill_tokens = zeros()
        self.max_kv_tokens = zeros()
        self.num_covered_tokens = zeros()
        self.last_tokens = zeros()
        self.opened_at = np.full(num_slots + 1, NEVER)
        self.admitted_at = zeros()
        self.first_positions = zeros()
        self.first_writes = zeros()
        self.nodes = zeros()
        self.is_running = false()
        self.is_decoding = false()
        self.ends_at_eos = false()
        self.stop_token_ids = np.full((num_slots + 1, MAX_STOP_TOKEN_IDS), -1)
        self.may_stop = false()
        self.has_stops = false()
        self.want_logprobs = false()
        self.has_grammar = false()
        self.is_held = false()
        self.is_slow = false()
        self.stop_rows = zeros()
        self.groups = zeros()
        self.num_shared_tokens = zeros()
        self.may_have_stopped = false()
        self.num_counted_tokens = zeros()
        self.block_tables: NDArray[np.int32] = np.zeros((num_slots + 1, max_blocks + 1), np.int32)
