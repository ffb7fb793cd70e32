"""The running sequences by slot: counters, newest tokens, block tables, and which slots are free."""

import numpy as np
from numpy.typing import NDArray

from tokasaurus.manager.state.sequence import Sequence
from tokasaurus.messages.generation import MAX_STOP_TOKEN_IDS

NEVER = np.iinfo(np.int64).max


class SlotArrays:
    """State that changes with every step. Arrays have one row per batch slot; slot 0 is padding and has no sequence.

    After `open` and an earlier `close`, every array has its value for the slot's new sequence, apart from the newest
    token and `predicted_tokens`. Arrays are grouped by the module that writes them while the sequence runs; others that
    do are named under the array. `num_kv_tokens` alone tells how far the steps sent so
    far go, because a decode step writes the KV of the token that the step before sampled: after a prefill of P tokens,
    `num_kv_tokens` = P means that the first token is being sampled, and P + 1 that the second is.
    """

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        def zeros() -> NDArray[np.int64]:
            return np.zeros(num_slots + 1, np.int64)

        def false() -> NDArray[np.bool_]:
            return np.zeros(num_slots + 1, np.bool_)

        self.free = list(range(num_slots, 0, -1))
        """Slots without a sequence."""
        self.sequences: list[Sequence | None] = [None] * (num_slots + 1)
        """None where no sequence runs."""
        self.closed: list[int] = []
        """Slots that the next step's message closes: the worker has them open, for a sequence that has left. They may
        have another sequence already, because the worker closes slots before it opens any."""
        self.num_admissions = 0
        """Calls of `open`."""
        self.num_releases = 0
        """Calls of `close`."""
        self.num_with_stops = 0
        """Running sequences with stop strings."""
        self.num_with_stop_tokens = 0
        """Running sequences with stop token ids."""
        self.num_with_grammars = 0
        """Running sequences with a grammar."""
        self.num_with_experts = 0
        """Running sequences whose requests want experts."""
        self.num_with_adapters = 0
        """Running sequences with an adapter."""
        self.num_with_masks = 0
        """Running sequences with a grammar or a token filter."""
        self.num_background = 0
        """Running sequences of background requests."""
        self.num_reporting = 0
        """Running sequences of jobs, whose progress is reported."""
        self.num_streamed = 0
        """Running sequences whose tokens are sent as they arrive."""

        # Written by `open` and `close` only.
        self.num_prompt_tokens = zeros()
        """Tokens of the request's own prompt."""
        self.num_prefill_tokens = zeros()
        """`num_prompt_tokens` plus the tokens kept across preemptions."""
        self.admitted_at = zeros()
        """Admission number: `num_admissions` before this one."""
        self.microbatches = zeros()
        """See engine/microbatches; 0 without pipeline stages."""
        self.nodes = zeros()
        """Index of the deepest prefix tree node that the sequence uses."""
        self.is_running = false()
        self.ends_at_eos = false()
        """An eos token ends it."""
        self.stop_token_ids = np.full((num_slots + 1, MAX_STOP_TOKEN_IDS), -1)
        """[slots, MAX_STOP_TOKEN_IDS], other tokens that end it; -1 for none."""
        self.stop_rows = zeros()
        """Row of StopTokens.may_end for its stop strings."""
        self.want_logprobs = false()
        """Its request asks for logprobs."""
        self.want_experts = false()
        """Its request asks for the experts of its tokens."""
        self.adapters = np.zeros(num_slots + 1, np.int32)
        """Number of its adapter; 0: none."""
        self.has_grammar = false()
        self.has_mask = false()
        """It has a grammar or a token filter: each of its tokens needs a mask."""
        self.needs_results = false()
        """Each of its masks depends on the token before."""
        self.is_slow = false()
        """Its grammar is slow (see CompiledGrammar.is_slow)."""

        # engine/admission, when it has admitted the sequence.
        self.predicted_tokens = zeros()
        """Length of its completion as predicted then."""

        # Where the prefill starts: engine/lifecycle, again if another sequence leaves during its prefill.
        self.first_positions = zeros()
        """First position that the prefill computes."""
        self.first_writes = zeros()
        """First position whose KV the prefill writes; earlier KV is cached. Positions from first_positions up
        to here are recomputed for their logits only."""

        # Advanced with each step that is sent: engine/input_building.
        self.num_kv_tokens = zeros()
        """Tokens whose KV is cached or computed by the steps sent so far. Also set with `first_positions`."""
        self.num_covered_tokens = zeros()
        """Tokens that fit into its allocated blocks."""
        self.first_held = zeros()
        """The first block of its table whose set in WindowSets it holds, as all after it; 0 without windows. Set by
        engine/lifecycle."""
        self.block_tables: NDArray[np.int32] = np.zeros((num_slots + 1, max_blocks + 1), np.int32)
        """[slots, most blocks of a sequence + 1]; 0, the padding block, after the sequence's own blocks."""
        self.opened_at = np.full(num_slots + 1, NEVER)
        """The step that opened the slot for its sequence at the worker; NEVER before that, and once it is ending, which
        engine/outputs sets."""
        self.is_decoding = false()
        """A running sequence past its prefill: decodes in every step, unless it awaits its matcher. Set by
        state/sequence_queues, and cleared by engine/outputs once it is ending."""
        self.awaits_matcher = false()
        """Its masks depend on its tokens and the next one is not ready: a token is being sampled, or its grammar
        matcher is reading one. Cleared by engine/outputs."""
        self.groups = zeros()
        """Number of its prefix group; 0 for none. Set by engine/engine."""
        self.num_shared_tokens = zeros()
        """Prompt tokens in the longest prefix that it has attended to in a prefix group. Set by engine/lifecycle."""

        # Advanced with each result: engine/outputs.
        self.num_known_tokens = zeros()
        """Prompt tokens, and sampled tokens whose values have arrived."""
        self.last_tokens = zeros()
        """Newest token that it has sampled, once there is one; before, a token of an earlier sequence."""
        self.last_logprobs = np.zeros(num_slots + 1, np.float32)
        """Logprob of `last_tokens`."""
        self.max_kv_tokens = zeros()
        """`num_kv_tokens` after the last step that the sequence may need; lowered once it is ending."""
        self.may_stop = false()
        """It may end before its last allowed token."""
        self.is_ending = false()
        """Its last token is known, and it is about to leave its slot."""
        self.has_stops = false()
        """It has stop strings."""
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

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self.sequences) - 1 - len(self.free)

    def sequence(self, slot: int) -> Sequence:
        """The sequence in `slot`. Precondition: there is one."""
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} has no sequence"
        return sequence

    def open(
        self,
        sequence: Sequence,
        blocks: NDArray[np.int32],
        page_size: int,
        microbatch: int,
        first_position: int,
        first_write: int,
        adapter: int = 0,
    ) -> None:
        """Give a free slot to `sequence`, whose node is set. blocks: those of its whole prompt, int32. first_position,
        first_write: as for `set_start`. adapter: its number."""
        request, slot = sequence.request, self.free.pop()
        sequence.slot = slot
        self.sequences[slot] = sequence
        self.num_prompt_tokens[slot] = len(request.prompt_ids)
        self.num_prefill_tokens[slot] = self.num_known_tokens[slot] = len(sequence.prompt)
        self.admitted_at[slot] = self.num_admissions
        self.microbatches[slot] = microbatch
        assert sequence.node is not None
        self.nodes[slot] = sequence.node.index
        self.is_running[slot] = True
        self.ends_at_eos[slot] = not request.ignore_eos
        if request.stop_token_ids:
            self.stop_token_ids[slot, : len(request.stop_token_ids)] = request.stop_token_ids
        self.stop_rows[slot] = sequence.stop_row
        self.want_logprobs[slot] = request.want_logprobs
        self.want_experts[slot] = request.want_experts
        self.adapters[slot] = adapter
        self.has_grammar[slot] = sequence.has_grammar
        self.has_mask[slot] = sequence.has_grammar or sequence.token_masks is not None
        self.needs_results[slot] = sequence.needs_results
        self.is_slow[slot] = sequence.grammar_matcher is not None and sequence.grammar_matcher.compiled_grammar.is_slow
        self.set_start(slot, first_position, first_write)
        self.num_covered_tokens[slot] = len(blocks) * page_size
        self.block_tables[slot, : len(blocks)] = blocks
        self.first_held[slot] = 0
        self.groups[slot] = 0
        self.num_shared_tokens[slot] = sequence.counts.shared
        self.max_kv_tokens[slot] = sequence.max_kv_tokens
        self.may_stop[slot] = sequence.may_stop
        self.has_stops[slot] = sequence.stop_matcher is not None
        self.may_have_stopped[slot] = False
        self.num_counted_tokens[slot] = len(sequence.kept_token_ids)
        self.is_streamed[slot] = request.is_streamed
        self.num_streamed_tokens[slot] = sequence.num_streamed_tokens
        self.streamed_s[slot] = -np.inf
        self.num_admissions += 1
        self._count(sequence, 1)

    def set_start(self, slot: int, first_position: int, first_write: int) -> None:
        """Where the prefill starts: see the arrays of these names. Precondition: no step has computed it yet."""
        self.first_positions[slot] = self.num_kv_tokens[slot] = first_position
        self.first_writes[slot] = first_write

    def close(self, sequence: Sequence, page_size: int) -> None:
        """Free the slot of a running sequence."""
        slot = sequence.slot
        self.block_tables[slot, : self.num_covered_tokens[slot] // page_size] = 0
        self.opened_at[slot] = NEVER
        self.is_running[slot] = self.is_decoding[slot] = self.is_ending[slot] = False
        self.has_grammar[slot] = self.awaits_matcher[slot] = self.is_streamed[slot] = False
        self.has_mask[slot] = self.needs_results[slot] = False
        if sequence.request.stop_token_ids:
            self.stop_token_ids[slot] = -1
        self.sequences[slot] = None
        self.free.append(slot)
        if sequence.is_open:
            self.closed.append(slot)
        sequence.slot, sequence.node = 0, None
        sequence.is_open = sequence.table_is_sent = False
        self.num_releases += 1
        self._count(sequence, -1)

    def _count(self, sequence: Sequence, change: int) -> None:
        request = sequence.request
        self.num_with_stops += change * (sequence.stop_matcher is not None)
        self.num_with_stop_tokens += change * bool(request.stop_token_ids)
        self.num_with_grammars += change * sequence.has_grammar
        self.num_with_experts += change * request.want_experts
        self.num_with_adapters += change * bool(request.adapter)
        self.num_with_masks += change * (sequence.has_grammar or sequence.token_masks is not None)
        self.num_background += change * request.is_background
        self.num_reporting += change * (request.job != "")
        self.num_streamed += change * request.is_streamed
