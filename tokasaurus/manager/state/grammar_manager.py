"""The grammars of one engine: which are compiled, which sequences wait for one, and whose newest tokens are being
read by grammar matchers."""

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
SubmitJob = Callable[[Job], None]
"""Accepts a job and runs it later, outside the calling thread; jobs run one at a time, in order."""

MAX_COMPILED_GRAMMARS = 64
"""Compiled grammars kept at once."""
MAX_GRAMMAR_CHARS = 16 << 20
"""Total characters of the compiled grammars kept."""


class JobThread:
    """Runs jobs one at a time, in order, in a thread of its own."""

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
        """Wait up to `timeout_s` for the running job and drop the others. If the process exits while a thread is inside
        llguidance, it may crash."""
        self._is_closed = True
        self._jobs.put(lambda: None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while not self._is_closed:
            self._jobs.get()()


class Grammars:
    """Compiles grammars and advances grammar matchers, all in other threads.

    submit_slow: for jobs that compile grammars, which may take a second, or read tokens of slow grammars. submit_quick:
    for jobs that read tokens of all other grammars.

    While a sequence's token is being read, its grammar matcher must not be touched until `take` returns the sequence.
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        num_threads: int = 1,
        submit_slow: SubmitJob | None = None,
        submit_quick: SubmitJob | None = None,
    ) -> None:
        self._threads = MatcherThreads(vocabulary, num_threads)
        self._submit_slow = submit_slow or JobThread("slow grammars")
        self._submit_quick = submit_quick or JobThread("grammars")
        self._compiled_grammars: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._waiting: dict[str, list[Sequence]] = {}
        self._unread: list[Sequence] = []
        self._unread_slow: list[Sequence] = []
        self._compiled: deque[tuple[str, CompiledGrammar | GrammarError]] = deque()
        self._caught_up: deque[list[Sequence]] = deque()
        self._read: deque[list[Sequence]] = deque()
        self.reader: Connection
        """Readable when `take` has something to return."""
        self.reader, self._writer = multiprocessing.Pipe(duplex=False)

    def begin(self, sequences: list[Sequence]) -> bool:
        """Create the grammar matchers of all sequences of a request. False if the grammar must be compiled first, or
        tokens that an earlier server has sampled must be read: then `take` returns the sequences once that is done."""
        grammar = sequences[0].request.grammar
        compiled_grammar = self._compiled_grammars.get(grammar)
        if compiled_grammar is not None and not compiled_grammar.is_broken:
            self._compiled_grammars.move_to_end(grammar)
            return self._create_matchers(compiled_grammar, sequences)
        if grammar not in self._waiting:
            self._waiting[grammar] = []
            self._submit_slow(lambda: self._compile(grammar))
        self._waiting[grammar] += sequences
        return False

    def note(self, sequence: Sequence, token_id: int, wants_mask: bool) -> None:
        """Queue the newest token of a sequence for `read`. wants_mask: another token may follow."""
        grammar_matcher = sequence.grammar_matcher
        assert grammar_matcher is not None
        grammar_matcher.token_ids.append(token_id)
        grammar_matcher.wants_mask = wants_mask
        (self._unread_slow if grammar_matcher.compiled_grammar.is_slow else self._unread).append(sequence)

    def read(self, max_seconds: float) -> None:
        """Start reading the noted tokens. Wait up to `max_seconds` for quick grammars: reading is usually short, and
        sequences that are ready in time take part in the next step."""
        if self._unread_slow:
            slow, self._unread_slow = self._unread_slow, []
            self._submit_slow(lambda: self._advance(slow))
        if self._unread:
            sequences, self._unread = self._unread, []
            self._submit_quick(lambda: self._advance(sequences))
            if not self.has_finished:
                self.reader.poll(max_seconds)

    def close(self, timeout_s: float) -> None:
        """End the threads; later jobs do not run. timeout_s: for each thread."""
        for submit in (self._submit_slow, self._submit_quick):
            if isinstance(submit, JobThread):
                submit.close(timeout_s)

    @property
    def has_finished(self) -> bool:
        """Whether `take` has something to return."""
        return bool(self._compiled or self._caught_up or self._read)

    def take(self) -> tuple[list[tuple[Sequence, str]], list[Sequence]]:
        """Sequences whose matchers stand at their next token, each with "" or an error message, after `begin`; and
        sequences whose newest token has been read. Any of them may have been cancelled in the meantime."""
        while self.reader.poll():
            self.reader.recv_bytes()
        begun: list[tuple[Sequence, str]] = []
        while self._compiled:
            grammar, result = self._compiled.popleft()
            sequences = self._waiting.pop(grammar)
            if isinstance(result, GrammarError):
                begun += [(sequence, str(result)) for sequence in sequences]
                continue
            self._cache(result)
            if self._create_matchers(result, sequences):
                begun += [(sequence, "") for sequence in sequences]
        while self._caught_up:
            for sequence in self._caught_up.popleft():
                assert sequence.grammar_matcher is not None
                begun.append((sequence, sequence.grammar_matcher.error))
        read: list[Sequence] = []
        while self._read:
            read += self._read.popleft()
        return begun, read

    def _create_matchers(self, compiled_grammar: CompiledGrammar, sequences: list[Sequence]) -> bool:
        """False if some must first read tokens: then `take` returns all of these sequences later."""
        for sequence in sequences:
            sequence.grammar_matcher = compiled_grammar.begin(sequence.request.ignore_eos)
            sequence.grammar_matcher.token_ids.extend(sequence.kept_token_ids)
        if not any(sequence.kept_token_ids for sequence in sequences):
            return True
        self._submit_slow(lambda: self._catch_up(sequences))
        return False

    def _cache(self, compiled_grammar: CompiledGrammar) -> None:
        """Cache a compiled grammar, and drop the least recently used ones above the limits."""
        self._compiled_grammars[compiled_grammar.grammar] = compiled_grammar
        self._compiled_grammars.move_to_end(compiled_grammar.grammar)
        while (
            len(self._compiled_grammars) > MAX_COMPILED_GRAMMARS
            or sum(map(len, self._compiled_grammars)) > MAX_GRAMMAR_CHARS
        ):
            self._compiled_grammars.popitem(last=False)

    def _compile(self, grammar: str) -> None:
        result: CompiledGrammar | GrammarError
        try:
            result = self._threads.compile(grammar)
        except GrammarError as error:
            result = error
        except BaseException as error:  # a Rust panic derives from BaseException only
            result = GrammarError(f"the grammar cannot be compiled: {error}")
        self._compiled.append((grammar, result))
        self._writer.send_bytes(b"\0")

    def _catch_up(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            grammar_matcher = sequence.grammar_matcher
            assert grammar_matcher is not None
            if not grammar_matcher.token_ids:
                continue
            try:
                self._threads.catch_up(grammar_matcher)
            except BaseException as error:  # a Rust panic, as above
                grammar_matcher.error = f"the grammar cannot be followed: {error}"
        self._caught_up.append(sequences)
        self._writer.send_bytes(b"\0")

    def _advance(self, sequences: list[Sequence]) -> None:
        grammar_matchers = [sequence.grammar_matcher for sequence in sequences if sequence.grammar_matcher is not None]
        try:
            self._threads.advance(grammar_matchers)
        except BaseException as error:  # a Rust panic, as above
            for grammar_matcher in grammar_matchers:
                grammar_matcher.error = f"the grammar cannot be followed: {error}"
        self._read.append(sequences)
        self._writer.send_bytes(b"\0")
