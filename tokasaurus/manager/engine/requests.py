"""Add and cancel requests."""

from collections.abc import Collection

import numpy as np

from tokasaurus.manager.engine.lifecycle import note_end, release
from tokasaurus.manager.engine.outputs import MAX_RELEASED, abort, begin_or_end, end_waiting
from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.manager.state.sequence import KeptTop, Phase, Samples, Sequence, TokenCounts, make_prompt
from tokasaurus.manager.state.token_filter import FilterMasks
from tokasaurus.messages.generation import GenerateRequest, SequenceDelta
from tokasaurus.text.stop_strings import StopMatcher
from tokasaurus.text.token_decoder import PROMPT_TAIL_TOKENS

EXPERTS_SALT, ADAPTER_SALT = b"\xff", b"\xfe"
"""Begin the salts of requests that want experts, and of those with an adapter, before its digest: no text in UTF-8 has
such a byte."""


def add_request(state: EngineState, request: GenerateRequest) -> None:
    """Queue the request's sequences, or hold them back until their adapter has its turn.

    Precondition: it fits the KV pool, which the server has checked.
    """
    options = state.options
    assert request.request_id not in state.unfinished, f"request id {request.request_id} is in use"
    stop_matcher, stop_row = None, 0
    if request.stop_strings and request.max_new_tokens > 0:
        decode, prompt_tail, special_ids = options.decode_text, options.prompt_tail, options.special_ids
        stops: tuple[str, ...] = request.stop_strings
        marked_ids: Collection[int] = ()
        if request.shows_special and options.decode_special is not None and options.special_tail is not None:
            decode, prompt_tail, special_ids = options.decode_special, options.special_tail, frozenset()
        elif (special := options.special_stops(stops)) is not None:
            decode, stops, marked_ids = special.decode, special.stops, special.marks.keys()
            special_ids = special_ids.difference(marked_ids)
        stop_matcher = StopMatcher(
            decode,
            stops,
            special_ids,
            prompt_tail(request.prompt_ids[-PROMPT_TAIL_TOKENS:].tolist()),
        )
        # its texts are without special tokens
        if options.stop_tokens is not None and not request.shows_special:
            stop_row = options.stop_tokens.row(stops, marked_ids)
    prompt = make_prompt(request.prompt_ids)
    salt = (EXPERTS_SALT if request.want_experts else b"") + _adapter_salt(request) + request.cache_salt.encode()

    token_masks = None
    if request.token_filter is not None and request.max_new_tokens > 0:
        token_masks = FilterMasks(request.token_filter)

    kept = {delta.sequence_index: delta for delta in request.kept}

    def make_sequence(index: int) -> Sequence:
        sequence = Sequence(request, index, prompt, salt, stop_matcher, stop_row, token_masks=token_masks)
        if request.num_top_logprobs:
            sequence.kept_top = KeptTop(request.num_top_logprobs)
        if request.adapter:
            sequence.weight_versions = ((0, request.adapter_version),)
        sequence.needs_prompt_logprobs = request.want_prompt_logprobs and index == 0
        if index in kept:
            _continue(sequence, kept[index])
        return sequence

    samples = state.unfinished[request.request_id] = Samples(request, make_sequence, request.num_sequences)
    first = samples.create()
    # A sequence that can never be admitted would block all behind it for ever.
    limits = options.limits
    num_pages = -(-first.max_kv_tokens // limits.page_size)
    num_blocks = num_pages if limits.windows is None else limits.windows.num_blocks(num_pages, limits.page_size)
    assert num_blocks <= limits.num_kv_blocks, f"{request.request_id} cannot fit the KV pool"
    if request.want_prompt_logprobs:
        state.blocks.keep_prompt_logprobs(request.num_top_prompt_logprobs)
    if not request.adapter or state.adapters.begin(samples):
        queue(state, samples)


def _adapter_salt(request: GenerateRequest) -> bytes:
    return ADAPTER_SALT + bytes.fromhex(request.adapter) if request.adapter else b""


def queue(state: EngineState, samples: Samples) -> None:
    """Queue a request's sequences, of which the first is created, or block them until their grammar is compiled."""
    kept = {delta.sequence_index: delta for delta in samples.request.kept}
    [first] = samples.sequences
    if first.has_grammar:
        _add_with_grammar(state, samples)
    elif kept:
        _create_all(samples)
        for sequence in list(samples.sequences):
            state.queues.add_waiting(sequence)
    else:
        state.queues.add_waiting(first)
        if samples.num_to_create:
            state.queues.add_samples(samples)
    for sequence in list(samples.sequences) if kept else ():
        ended = kept.get(sequence.index)
        if ended is not None and ended.finish_reason is not None:
            end_waiting(state, sequence, ended.finish_reason)


def queue_released(state: EngineState) -> None:
    """Queue the requests that were held back, and whose adapter has its turn."""
    for samples in state.adapters.take_released():
        queue(state, samples)


def queue_to_end(state: EngineState, samples: Samples) -> None:
    """Queue a request that is to be ended now, if it was held back."""
    queue_released(state)
    if state.adapters.take_out(samples):
        queue(state, samples)


def _continue(sequence: Sequence, kept: SequenceDelta) -> None:
    """Bring a new sequence to where a preemption after these tokens would have left it."""
    prompt, request = sequence.prompt, sequence.request
    sequence.prompt = make_prompt(np.concatenate((prompt.token_ids, np.array(kept.token_ids, np.int32))))
    sequence.kept_token_ids = list(kept.token_ids)
    sequence.kept_logprobs = [] if kept.logprobs is None else list(kept.logprobs)
    if kept.top is not None:
        assert sequence.kept_top is not None, "the request wants top-k logprobs"
        for token_ids, logprobs in zip(kept.top.token_ids, kept.top.logprobs, strict=True):
            sequence.kept_top.append(token_ids, logprobs)
    sequence.num_cached_tokens = kept.num_cached_tokens
    sequence.counts = TokenCounts(
        asked=len(request.prompt_ids),
        cached=kept.num_cached_tokens,
        computed=kept.num_computed_tokens,
        recomputed=kept.num_recomputed_tokens,
        shared=kept.num_shared_tokens,
    )
    sequence.num_kv_tokens_before = max(0, len(sequence.prompt) - 1)


def _add_with_grammar(state: EngineState, samples: Samples) -> None:
    """Create all sequences, each with its grammar matcher; block them until the grammar is compiled."""
    _create_all(samples)
    sequences = list(samples.sequences)
    if state.grammars is not None and state.grammars.begin(sequences):
        for sequence in sequences:
            begin_or_end(state, sequence)
        return
    for sequence in sequences:
        state.queues.block(sequence)
        if state.grammars is None:
            abort(state, sequence, "grammars cannot be used with this model's tokenizer")


def _create_all(samples: Samples) -> None:
    while samples.num_to_create:
        samples.create()


def cancel_request(state: EngineState, request_id: str) -> None:
    """End every sequence of the request. Later results of steps in flight for them are discarded.

    Waiting sequences end at once. Running ones, of which there may be thousands, end in this and the next steps: see
    `release_cancelled`. An id that is unknown, or whose sequences have all finished, is no error.
    """
    samples = state.unfinished.get(request_id)
    if samples is None:
        return
    queue_to_end(state, samples)
    samples.is_cancelled = True
    if samples.num_to_create:
        state.queues.drop_samples(samples)
    for sequence in list(samples.sequences):
        if sequence.phase is Phase.WAITING:
            release(state, sequence)
        else:
            state.cancelled.append(sequence)
    if not samples.sequences and state.unfinished.pop(request_id, None) is not None:
        note_end(state, samples)


def end_all(state: EngineState) -> None:
    """End every request at once, without an answer."""
    for request_id in list(state.unfinished):
        cancel_request(state, request_id)
    while state.cancelled:
        release_cancelled(state)
    state.deltas = []


def release_cancelled(state: EngineState) -> int:
    """End up to MAX_RELEASED running sequences of cancelled requests; return how many. The others run on until a later
    call; the server ignores what they generate."""
    num_released = 0
    while state.cancelled and num_released < MAX_RELEASED:
        sequence = state.cancelled.popleft()
        if sequence.phase is not Phase.FINISHED:
            release(state, sequence)
            num_released += 1
    return num_released
