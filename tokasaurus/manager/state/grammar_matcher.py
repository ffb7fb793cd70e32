"""Grammar matchers: each tracks one sequence's position in its grammar. They run in separate threads, mostly without
the GIL."""

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
"""A matcher that reaches its limit again within fewer tokens fails."""

NUM_TRIED_TOKENS = 8
"""Random tokens read to time a grammar."""
SLOW_SECONDS = 150e-6
"""Time per token above which a grammar is slow. Most grammars take a tenth of it, or a third when one matcher runs
alone, because of the thread; counted repetitions take 0.25 to 0.5 ms."""

STACK_BYTES = 16 << 20
"""Stack size of llguidance's threads: many times what the server allows when it validates a grammar, because a stack
overflow ends the process."""


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """A compiled grammar at the beginning of a text."""

    grammar: str
    matcher: LLMatcher
    mask: NDArray[np.uint32]
    """[words], the tokens that may come first."""
    inner_mask: NDArray[np.uint32]
    """`mask` without eos, unless eos is the only allowed token."""
    is_slow: bool
    """Reading a token takes more than SLOW_SECONDS, so other sequences do not wait for it."""
    is_broken: bool = False
    """Its matchers have reached the limit on states: all copies of one matcher share the states they find."""

    def begin(self, avoids_eos: bool) -> "GrammarMatcher":
        """A grammar matcher for one sequence. Its LLMatcher is created lazily: it takes up to 40 kB, and thousands of
        sequences may wait."""
        return GrammarMatcher(self, avoids_eos, self.inner_mask if avoids_eos else self.mask)


@dataclass(slots=True, eq=False)
class GrammarMatcher:
    """One sequence's position in its grammar."""

    compiled_grammar: CompiledGrammar
    avoids_eos: bool
    """Allow eos only if nothing else is allowed."""
    mask: NDArray[np.uint32]
    """[words], the tokens that may come next. Kept until the next token is read, since a token may be sampled twice."""
    matcher: LLMatcher | None = None
    """Has read the known tokens; None before the first."""
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    """int32, the known tokens; the last may not have been read yet."""
    wants_mask: bool = True
    """Another token may follow the newest."""
    is_complete: bool = False
    """No token may follow."""
    error: str = ""
    """Why the sequence cannot continue; "" while it can."""
    rebuilt_at: int | None = None
    """Length of `token_ids` when the matcher was last rebuilt."""

    @property
    def llmatcher(self) -> LLMatcher:
        """The matcher, created on first use."""
        if self.matcher is None:
            self.matcher = self.compiled_grammar.matcher.deep_copy()
        return self.matcher


class MatcherThreads:
    """Reads tokens and computes masks in batches, on up to `num_threads` threads.

    Safe to call from several threads for different sequences.
    """

    def __init__(self, vocabulary: GrammarVocabulary, num_threads: int) -> None:
        self._vocabulary = vocabulary
        os.environ["RUST_MIN_STACK"] = str(STACK_BYTES)  # for the executor's threads
        self._executor = LLExecutor(num_threads)
        # Always in error, so it reads nothing.
        self._idle = LLMatcher(vocabulary.tokenizer, "", log_level=0)

    def compile(self, grammar: str) -> CompiledGrammar:
        """Compile a grammar and time it. Raises GrammarError."""
        matcher = make_matcher(self._vocabulary, grammar)
        (mask,) = self._masks([matcher])
        if matcher.is_error():
            raise GrammarError(one_line(matcher.get_error()))
        if not mask.any():
            raise GrammarError("no token can be the first of a text that the grammar allows")
        seconds = self._try(matcher, mask)
        return CompiledGrammar(grammar, matcher, mask, self._without_eos(mask), is_slow=seconds > SLOW_SECONDS)

    def advance(self, grammar_matchers: Sequence[GrammarMatcher]) -> None:
        """Each matcher reads its newest token, the last of `token_ids`, and then has the mask for the next one, unless
        it is complete, has an error or wants no mask."""
        self._read([(grammar_matcher.llmatcher, grammar_matcher.token_ids[-1]) for grammar_matcher in grammar_matchers])
        self._find_masks(grammar_matchers)
        broken = [grammar_matcher for grammar_matcher in grammar_matchers if grammar_matcher.llmatcher.is_error()]
        for grammar_matcher in broken:
            self._rebuild(grammar_matcher)

    def catch_up(self, grammar_matcher: GrammarMatcher) -> None:
        """A new matcher reads all of `token_ids`, and then has the mask for the next one. It has an error if they do
        not begin a text of the grammar, or are a whole one."""
        matcher = grammar_matcher.llmatcher
        for token_id in grammar_matcher.token_ids:
            self._read([(matcher, token_id)])
        self._find_masks([grammar_matcher])
        if matcher.is_stopped():
            grammar_matcher.error = one_line(matcher.get_error()) or "the grammar allows no further token"

    def _try(self, matcher: LLMatcher, mask: NDArray[np.uint32]) -> float:
        """Median seconds per token of a random text; 0 if only eos may come first, or the first token ends the text."""
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
        # With a single matcher the executor keeps the GIL, so a second one is added.
        self._executor.consume_token_par([*pairs, (self._idle.deep_copy(), 0)] if len(pairs) == 1 else pairs)

    def _masks(self, matchers: Sequence[LLMatcher]) -> NDArray[np.uint32]:
        """Masks of N matchers, [N, words]."""
        num_words = self._vocabulary.num_words
        masks = np.zeros((len(matchers), num_words), np.uint32)
        pairs = list(zip(matchers, range(len(matchers)), strict=True))
        self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, 4 * num_words, len(matchers))
        return masks

    def _find_masks(self, grammar_matchers: Sequence[GrammarMatcher]) -> None:
        # A matcher in error counts as stopped.
        live = [
            grammar_matcher
            for grammar_matcher in grammar_matchers
            if grammar_matcher.wants_mask and not grammar_matcher.llmatcher.is_stopped()
        ]
        if live:
            masks = self._masks([grammar_matcher.llmatcher for grammar_matcher in live])
            for grammar_matcher, mask in zip(live, masks, strict=True):
                if not mask.any():
                    grammar_matcher.error = "no token can follow in the grammar"
                # A copy: a view would keep the masks of the whole batch alive.
                grammar_matcher.mask = self._without_eos(mask) if grammar_matcher.avoids_eos else mask.copy()
        for grammar_matcher in grammar_matchers:
            matcher = grammar_matcher.llmatcher
            grammar_matcher.is_complete = matcher.is_stopped() and not matcher.is_error()

    def _rebuild(self, grammar_matcher: GrammarMatcher) -> None:
        """Replace a matcher in error with a new one, which shares no states with others: over hours, the shared states
        of many sequences reach the limit, while a single sequence stays far below it. A matcher that soon reaches the
        limit by itself keeps its error."""
        error = one_line(grammar_matcher.llmatcher.get_error())
        grammar_matcher.compiled_grammar.is_broken = True
        num_before = grammar_matcher.rebuilt_at
        if num_before is not None and len(grammar_matcher.token_ids) - num_before < MIN_TOKENS_BETWEEN_REBUILDS:
            grammar_matcher.error = error
            return
        grammar_matcher.rebuilt_at = len(grammar_matcher.token_ids)
        try:
            grammar_matcher.matcher = matcher = make_matcher(self._vocabulary, grammar_matcher.compiled_grammar.grammar)
        except GrammarError as rebuild_error:
            grammar_matcher.error = str(rebuild_error)
            return
        for token_id in grammar_matcher.token_ids:
            self._read([(matcher, token_id)])
        self._find_masks([grammar_matcher])
        if matcher.is_error():
            grammar_matcher.error = one_line(matcher.get_error())

    def _without_eos(self, mask: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """A copy of `mask`, [words], without eos unless nothing else is allowed."""
        others = mask & ~self._vocabulary.eos_bits
        return others if others.any() else mask.copy()
