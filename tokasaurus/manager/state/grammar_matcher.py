"""How far sequences are in their grammars. What is here runs in threads of its own, mostly without the GIL."""

import os
import random
import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from tokasaurus.text.grammars import GrammarError, GrammarVocabulary, make_matcher, one_line

MIN_TOKENS_BETWEEN_REBUILDS = 64

NUM_TRIED_TOKENS = 8
SLOW_SECONDS = 150e-6
"""For one token. Most take a tenth of that, and a third of it alone, for the sake of a thread; repetitions that are
counted take a quarter to a half of a millisecond."""

STACK_BYTES = 16 << 20
"""Of the threads in which llguidance runs: many times what the server allows a grammar when it checks it. To run out of
it would be the end of the process."""


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """A grammar at the beginning of a text. mask: uint32 [words], the tokens that may be the first; inner_mask: without
    eos where there are others.

    is_slow: reading a token takes long, so that others do not wait for it.
    All matchers that are copied from one share the states that they find, and their number is limited; is_spoilt: they
    have reached the limit.
    """

    grammar: str
    matcher: LLMatcher
    mask: NDArray[np.uint32]
    inner_mask: NDArray[np.uint32]
    is_slow: bool
    is_spoilt: bool = False

    def begin(self, avoids_eos: bool) -> "GrammarMatcher":
        """For one sequence. A matcher takes up to 40 kilobytes, which thousands that wait do without."""
        return GrammarMatcher(self, avoids_eos, self.inner_mask if avoids_eos else self.mask)


@dataclass(slots=True, eq=False)
class GrammarMatcher:
    """One sequence in its grammar.

    avoids_eos: eos may come only where nothing else may.
    mask: uint32 [words], the tokens that may come next; it stays until the next one is read, for that may be sampled
    twice.
    matcher: has read the tokens that are known; None before the first.
    token_ids: int32, read so far. wants_mask: another token may follow the newest.
    is_complete: nothing may follow. error: why it cannot go on; "" while it can.
    rebuilt_at: how many tokens it had read when its matcher was last made anew.
    """

    compiled_grammar: CompiledGrammar
    avoids_eos: bool
    mask: NDArray[np.uint32]
    matcher: LLMatcher | None = None
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    wants_mask: bool = True
    is_complete: bool = False
    error: str = ""
    rebuilt_at: int | None = None

    @property
    def its_matcher(self) -> LLMatcher:
        """Made when first needed."""
        if self.matcher is None:
            self.matcher = self.compiled_grammar.matcher.deep_copy()
        return self.matcher


class MatcherThreads:
    """Reads tokens and finds masks, many at a time, on up to `num_threads` cores. Safe to use from several threads, for
    different sequences."""

    def __init__(self, vocabulary: GrammarVocabulary, num_threads: int) -> None:
        self._vocabulary = vocabulary
        os.environ["RUST_MIN_STACK"] = str(STACK_BYTES)  # the executor's own
        self._executor = LLExecutor(num_threads)
        # Is in error, and reads nothing.
        self._idle = LLMatcher(vocabulary.tokenizer, "", log_level=0)

    def compile(self, grammar: str) -> CompiledGrammar:
        """Raises GrammarError."""
        matcher = make_matcher(self._vocabulary, grammar)
        (mask,) = self._masks([matcher])
        if matcher.is_error():
            raise GrammarError(one_line(matcher.get_error()))
        if not mask.any():
            raise GrammarError("no token can be the first of a text that the grammar allows")
        seconds = self._try(matcher, mask)
        return CompiledGrammar(grammar, matcher, mask, self._without_eos(mask), is_slow=seconds > SLOW_SECONDS)

    def advance(self, grammar_matchers: Sequence[GrammarMatcher]) -> None:
        """Each reads its newest token, the last of token_ids, and has the mask for the next one afterwards, unless it
        is complete, or has an error, or wants none."""
        self._read(
            [(grammar_matcher.its_matcher, grammar_matcher.token_ids[-1]) for grammar_matcher in grammar_matchers]
        )
        self._find_masks(grammar_matchers)
        broken = [grammar_matcher for grammar_matcher in grammar_matchers if grammar_matcher.its_matcher.is_error()]
        for grammar_matcher in broken:
            self._rebuild(grammar_matcher)

    def _try(self, matcher: LLMatcher, mask: NDArray[np.uint32]) -> float:
        """Seconds for a token of a random text, in the middle of some; 0 where no text is so long."""
        rng, matcher, seconds = random.Random(0), matcher.deep_copy(), []
        for _ in range(NUM_TRIED_TOKENS):
            bits = np.unpackbits((mask & ~self._vocabulary.eos_bits).view(np.uint8), bitorder="little")
            token_ids = np.flatnonzero(bits)
            if not len(token_ids):
                break
            start_s = time.perf_counter()
            self._read([(matcher, int(token_ids[rng.randrange(len(token_ids))]))])
            if matcher.is_stopped():
                break
            (mask,) = self._masks([matcher])
            seconds.append(time.perf_counter() - start_s)
        return statistics.median(seconds) if seconds else 0.0

    def _read(self, pairs: list[tuple[LLMatcher, int]]) -> None:
        # With a single matcher the executor would keep the GIL.
        self._executor.consume_token_par([*pairs, (self._idle.deep_copy(), 0)] if len(pairs) == 1 else pairs)

    def _masks(self, matchers: Sequence[LLMatcher]) -> NDArray[np.uint32]:
        """[N, words]."""
        num_words = self._vocabulary.num_words
        masks = np.zeros((len(matchers), num_words), np.uint32)
        pairs = list(zip(matchers, range(len(matchers)), strict=True))
        self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, 4 * num_words, len(matchers))
        return masks

    def _find_masks(self, grammar_matchers: Sequence[GrammarMatcher]) -> None:
        # A matcher in error is stopped as well.
        live = [
            grammar_matcher
            for grammar_matcher in grammar_matchers
            if grammar_matcher.wants_mask and not grammar_matcher.its_matcher.is_stopped()
        ]
        if live:
            masks = self._masks([grammar_matcher.its_matcher for grammar_matcher in live])
            for grammar_matcher, mask in zip(live, masks, strict=True):
                if not mask.any():
                    grammar_matcher.error = "no token can follow in the grammar"
                # A copy, or the masks of all stay as long as one of them.
                grammar_matcher.mask = self._without_eos(mask) if grammar_matcher.avoids_eos else mask.copy()
        for grammar_matcher in grammar_matchers:
            matcher = grammar_matcher.its_matcher
            grammar_matcher.is_complete = matcher.is_stopped() and not matcher.is_error()

    def _rebuild(self, grammar_matcher: GrammarMatcher) -> None:
        """Begin with a new matcher, which shares no states: those of many sequences, over hours, reach the limit where
        one alone is far from it. One that gets there by itself has an error."""
        error = one_line(grammar_matcher.its_matcher.get_error())
        grammar_matcher.compiled_grammar.is_spoilt = True
        num_before = grammar_matcher.rebuilt_at
        if num_before is not None and len(grammar_matcher.token_ids) - num_before < MIN_TOKENS_BETWEEN_REBUILDS:
            grammar_matcher.error = error
            return
        grammar_matcher.rebuilt_at = len(grammar_matcher.token_ids)
        try:
            grammar_matcher.matcher = matcher = make_matcher(self._vocabulary, grammar_matcher.compiled_grammar.grammar)
        except GrammarError as again:
            grammar_matcher.error = str(again)
            return
        for token_id in grammar_matcher.token_ids:
            self._read([(matcher, token_id)])
        self._find_masks([grammar_matcher])
        if matcher.is_error():
            grammar_matcher.error = one_line(matcher.get_error())

    def _without_eos(self, mask: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """A copy, [words], that forbids the end where anything else may come."""
        others = mask & ~self._vocabulary.eos_bits
        return others if others.any() else mask.copy()
