"""Per-slot arrays of the running sequences' state: counters, newest tokens and block tables."""

import numpy as np
from numpy.typing import NDArray

from tokasaurus.messages.generation import MAX_STOP_TOKEN_IDS

NEVER = np.iinfo(np.int64).max


class SlotArrays:
    """State that changes with every step. Arrays have one row per batch slot; slot 0 is padding and has no sequence.

    `num_kv_tokens` alone tells how far the steps sent so far go, because a decode step writes the KV of the token that
    the step before sampled: after a prefill of P tokens, `num_kv_tokens` = P means that the first token is being
    sampled, and P + 1 that the second is.
    """

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        def zeros() -> NDArray[np.int64]:
            return np.zeros(num_slots + 1, np.int64)

        def false() -> NDArray[np.bool_]:
            return np.zeros(num_slots + 1, np.bool_)

        self.num_kv_tokens = zeros()
        """Tokens whose KV is cached or computed by the steps sent so far."""
        self.num_known_tokens = zeros()
        """Prompt tokens, and sampled tokens whose values have arrived."""
        self.num_prompt_tokens = zeros()
        """Tokens of the request's own prompt."""
        self.num_prefill_tokens = zeros()
        """`num_prompt_tokens` plus the tokens kept across preemptions."""
        self.max_kv_tokens = zeros()
        """`num_kv_tokens` after the last step that the sequence may need."""
        self.num_covered_tokens = zeros()
        """Tokens that fit into its allocated blocks."""
        self.last_tokens = zeros()
        """Newest known token."""
        self.opened_at = np.full(num_slots + 1, NEVER)
        """The step that opened the slot for its sequence at the worker; NEVER before that."""
        self.admitted_at = zeros()
        """Admission number; grows with every admission and so orders the sequences."""
        self.first_positions = zeros()
        """First position that the prefill computes."""
        self.first_writes = zeros()
        """First position whose KV the prefill writes; earlier KV is cached. Positions from first_positions up
        to here are recomputed for their logits only."""
        self.nodes = zeros()
        """Index of the deepest prefix tree node that the sequence uses."""
        self.is_running = false()
        self.is_decoding = false()
        """A running sequence past its prefill: decodes in every step, unless it awaits its matcher."""
        self.is_ending = false()
        """Its last token is known, and it is about to leave its slot."""
        self.ends_at_eos = false()
        """An eos token ends it."""
        self.stop_token_ids = np.full((num_slots + 1, MAX_STOP_TOKEN_IDS), -1)
        """[slots, MAX_STOP_TOKEN_IDS], other tokens that end it; -1 for none."""
        self.may_stop = false()
        """It may end before its last allowed token."""
        self.has_stops = false()
        """It has stop strings."""
        self.want_logprobs = false()
        """Its request asks for logprobs."""
        self.has_grammar = false()
        """Each of its tokens needs a mask."""
        self.awaits_matcher = false()
        """It has a grammar and its next mask is not ready: a token is being sampled, or its grammar matcher is reading
        one."""
        self.is_slow = false()
        """Its grammar is slow (see CompiledGrammar.is_slow)."""
        self.stop_rows = zeros()
        """Row of StopTokens.may_end for its stop strings."""
        self.microbatches = zeros()
        """See engine/microbatches; 0 without pipeline stages."""
        self.groups = zeros()
        """Number of its prefix group; 0 for none."""
        self.num_shared_tokens = zeros()
        """Prompt tokens in the longest prefix that it has attended to in a prefix group."""
        self.may_have_stopped = false()
        """A token that may end a stop string has arrived since the last check for stop strings."""
        self.num_counted_tokens = zeros()
        """Sampled tokens already checked for stop strings and counted as generated; used only with stop strings."""
        self.is_streamed = false()
        """A running sequence whose tokens are sent as they arrive."""
        self.num_streamed_tokens = zeros()
        """Sampled tokens already in deltas; used only if `is_streamed`."""
        self.streamed_s = np.full(num_slots + 1, -np.inf)
        """When its newest delta was made, by time.monotonic; -inf before the first since its admission."""
        self.block_tables: NDArray[np.int32] = np.zeros((num_slots + 1, max_blocks + 1), np.int32)
        """[slots, most blocks of a sequence + 1]; 0, the padding block, after the sequence's own blocks."""
