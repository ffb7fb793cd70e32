"""The grammars of one engine: which are compiled, who waits for one, and whose newest tokens are being read."""

import multiprocessing
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from multiprocessing.connection import Connection

from tokasaurus.manager.state.grammar_matcher import STACK_BYTES, CompiledGrammar, MatcherThreads
from tokasaurus.manager.state.sequence import Sequence
from tokasaurus.text.grammars import GrammarError, GrammarVocabulary

Job = Callable[[], None]
Lane = Callable[[Job], None]
"""Does one job after the other, some time later and elsewhere."""

MOST_COMPILED_GRAMMARS = 64
MOST_GRAMMAR_CHARS = 16 << 20
"""Of all compiled_grammars that are kept."""


class ThreadLane:
    """A thread that does its jobs."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        stack_bytes_before = threading.stack_size(STACK_BYTES)
        self._thread.start()
        threading.stack_size(stack_bytes_before)

    def __call__(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self, timeout_s: float) -> None:
        """Wait for the job at hand; the others are not done. A thread that is within llguidance when the process ends
        may crash it."""
        self._is_closed = True
        self._jobs.put(lambda: None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while not self._is_closed:
            self._jobs.get()()


class Grammars:
    """Compiles grammars, and has the tokens of sequences read by their matchers, all in other threads.

    slow_lane: for compiling, which may take a second, and for reading where the grammar is slow. quick_lane: for other
    reading. reader: readable when `take` has anything to give.

    Whose token is being read is left alone until `take` gives it back.
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        num_threads: int = 1,
        slow_lane: Lane | None = None,
        quick_lane: Lane | None = None,
    ) -> None:
        self._threads = MatcherThreads(vocabulary, num_threads)
        self._slow_lane = slow_lane or ThreadLane("slow grammars")
        self._quick_lane = quick_lane or ThreadLane("grammars")
        self._compiled_grammars: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._waiting: dict[str, list[Sequence]] = {}
        self._unread: list[Sequence] = []
        self._unread_slow: list[Sequence] = []
        self._compiled: deque[tuple[str, CompiledGrammar | GrammarError]] = deque()
        self._read: deque[list[Sequence]] = deque()
        self.reader: Connection
        self.reader, self._writer = multiprocessing.Pipe(duplex=False)

    def begin(self, sequences: list[Sequence]) -> bool:
        """Give all sequences of a request their matchers. False where they have to wait for their grammar, until `take`
        names them."""
        grammar = sequences[0].request.grammar
        compiled_grammar = self._compiled_grammars.get(grammar)
        if compiled_grammar is not None and not compiled_grammar.is_spoilt:
            self._compiled_grammars.move_to_end(grammar)
            self._give(compiled_grammar, sequences)
            return True
        if grammar not in self._waiting:
            self._waiting[grammar] = []
            self._slow_lane(lambda: self._compile(grammar))
        self._waiting[grammar] += sequences
        return False

    def note(self, sequence: Sequence, token_id: int, wants_mask: bool) -> None:
        """The newest token of a sequence is known. wants_mask: another may follow."""
        grammar_matcher = sequence.grammar_matcher
        assert grammar_matcher is not None
        grammar_matcher.token_ids.append(token_id)
        grammar_matcher.wants_mask = wants_mask
        (self._unread_slow if grammar_matcher.compiled_grammar.is_slow else self._unread).append(sequence)

    def read(self, most_seconds: float) -> None:
        """Have the tokens read that have been noted. It seldom takes long, so it is waited for, but no longer than
        that: then they take part in the next step."""
        if self._unread_slow:
            slow, self._unread_slow = self._unread_slow, []
            self._slow_lane(lambda: self._advance(slow))
        if self._unread:
            sequences, self._unread = self._unread, []
            self._quick_lane(lambda: self._advance(sequences))
            if not self.has_finished:
                self.reader.poll(most_seconds)

    def close(self, timeout_s: float) -> None:
        """End the threads; nothing is compiled or read any more."""
        for lane in (self._slow_lane, self._quick_lane):
            if isinstance(lane, ThreadLane):
                lane.close(timeout_s)

    @property
    def has_finished(self) -> bool:
        return bool(self._compiled) or bool(self._read)

    def take(self) -> tuple[list[tuple[Sequence, str]], list[Sequence]]:
        """Sequences whose grammar has been waited for, with "" or why it cannot be had; and those whose newest tokens
        have been read. All may have been cancelled meanwhile."""
        while self.reader.poll():
            self.reader.recv_bytes()
        begun: list[tuple[Sequence, str]] = []
        while self._compiled:
            grammar, result = self._compiled.popleft()
            sequences = self._waiting.pop(grammar)
            if isinstance(result, CompiledGrammar):
                self._keep(result)
                self._give(result, sequences)
            error = "" if isinstance(result, CompiledGrammar) else str(result)
            begun += [(sequence, error) for sequence in sequences]
        read: list[Sequence] = []
        while self._read:
            read += self._read.popleft()
        return begun, read

    def _give(self, compiled_grammar: CompiledGrammar, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.grammar_matcher = compiled_grammar.begin(sequence.request.ignore_eos)

    def _keep(self, compiled_grammar: CompiledGrammar) -> None:
        """The least recently used go where there are too many."""
        self._compiled_grammars[compiled_grammar.grammar] = compiled_grammar
        self._compiled_grammars.move_to_end(compiled_grammar.grammar)
        while (
            len(self._compiled_grammars) > MOST_COMPILED_GRAMMARS
            or sum(map(len, self._compiled_grammars)) > MOST_GRAMMAR_CHARS
        ):
            self._compiled_grammars.popitem(last=False)

    def _compile(self, grammar: str) -> None:
        result: CompiledGrammar | GrammarError
        try:
            result = self._threads.compile(grammar)
        except GrammarError as error:
            result = error
        except BaseException as error:  # a panic of the library's derives from BaseException alone
            result = GrammarError(f"the grammar cannot be compiled: {error}")
        self._compiled.append((grammar, result))
        self._writer.send_bytes(b"\0")

    def _advance(self, sequences: list[Sequence]) -> None:
        grammar_matchers = [sequence.grammar_matcher for sequence in sequences if sequence.grammar_matcher is not None]
        try:
            self._threads.advance(grammar_matchers)
        except BaseException as error:  # as above
            for grammar_matcher in grammar_matchers:
                grammar_matcher.error = f"the grammar cannot be followed: {error}"
        self._read.append(sequences)
        self._writer.send_bytes(b"\0")
