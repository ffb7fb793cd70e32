"""The ledger against plain dicts."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import apsw
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.helpers.examples import examples
from tests.server.jobs.helpers.records import new_batch, new_lines, new_result
from tokasaurus.server.jobs.store.database import migrate
from tokasaurus.server.jobs.store.ledger import (
    add_lines,
    finished_ledgers,
    pending_lines,
    record_results,
    release_lines,
    release_running,
    remove_lines,
    results_in_order,
    start_lines,
    unfinished_lines,
)
from tokasaurus.server.jobs.store.records import (
    LineResult,
    LineState,
    add_batch,
    cancel_batch,
    read_batch,
    remove_batch_row,
)

NUM_LINES = 12
NUMBERS = st.lists(st.integers(0, NUM_LINES - 1), max_size=6)
BATCHES = st.integers(0, 1)


@dataclass
class ExpectedLine:
    seed: int
    state: LineState = LineState.PENDING
    attempts: int = 0
    result: LineResult | None = None


@dataclass
class ExpectedBatch:
    number: int
    lines: dict[int, ExpectedLine] = field(default_factory=dict)


def in_memory() -> apsw.Connection:
    connection = apsw.Connection(":memory:")
    migrate(connection)
    return connection


class LedgerMachine(RuleBasedStateMachine):
    """Two batches, so that a change of one must leave the other as it is."""

    @initialize(seeds=st.lists(st.integers(0, (1 << 64) - 1), min_size=2 * NUM_LINES, max_size=2 * NUM_LINES))
    def fill(self, seeds: list[int]) -> None:
        self.connection = in_memory()
        self.batches = []
        for start in (0, NUM_LINES):
            own = seeds[start : start + NUM_LINES]
            batch = add_batch(self.connection, new_batch("in_progress", f"batch_{start}"))
            add_lines(self.connection, batch.number, new_lines(NUM_LINES), own)
            lines = {number: ExpectedLine(seed) for number, seed in enumerate(own)}
            self.batches.append(ExpectedBatch(batch.number, lines))

    @rule(which=BATCHES, first=st.integers(0, NUM_LINES), limit=st.integers(1, NUM_LINES))
    def claim(self, which: int, first: int, limit: int) -> None:
        batch = self.batches[which]
        found = pending_lines(self.connection, batch.number, first, limit)
        waiting = [number for number in range(first, NUM_LINES) if batch.lines[number].state == LineState.PENDING]
        assert [line.number for line in found] == waiting[:limit]
        assert [line.seed for line in found] == [batch.lines[line.number].seed for line in found]
        assert [line.attempts for line in found] == [batch.lines[line.number].attempts for line in found]
        self.start(which, [line.number for line in found])

    @rule(which=BATCHES, numbers=NUMBERS.map(lambda numbers: list(dict.fromkeys(numbers))))
    def start(self, which: int, numbers: list[int]) -> None:
        """Start any lines: those that do not wait are left alone."""
        start_lines(self.connection, self.batches[which].number, numbers)
        for number in numbers:
            line = self.batches[which].lines[number]
            if line.state == LineState.PENDING:
                line.state = LineState.RUNNING
                line.attempts += 1

    @rule(which=BATCHES, numbers=NUMBERS, counts_attempt=st.booleans())
    def release(self, which: int, numbers: list[int], counts_attempt: bool) -> None:
        release_lines(self.connection, self.batches[which].number, numbers, counts_attempt)
        for number in numbers:
            line = self.batches[which].lines[number]
            if line.state == LineState.RUNNING:
                line.state = LineState.PENDING
                line.attempts -= not counts_attempt

    @rule(which=BATCHES)
    def restart(self, which: int) -> None:
        batch = self.batches[which]
        running = [line for line in batch.lines.values() if line.state == LineState.RUNNING]
        assert release_running(self.connection, batch.number) == len(running)
        for line in running:
            line.state = LineState.PENDING

    @rule(which=BATCHES, numbers=NUMBERS, has_failed=st.booleans())
    def record(self, which: int, numbers: list[int], has_failed: bool) -> None:
        """Record running, waiting and finished lines, one line twice, and a line that does not exist."""
        results = [new_result(number, has_failed) for number in [*numbers, NUM_LINES]]
        record_results(self.connection, self.batches[which].number, results)
        for result in results[:-1]:
            line = self.batches[which].lines[result.number]
            if line.result is None:
                line.result = result
                line.state = LineState.FAILED if has_failed else LineState.COMPLETED

    @rule(which=BATCHES)
    def cancel(self, which: int) -> None:
        """The ledger does not mind."""
        cancel_batch(self.connection, self.batches[which].number, 1_800_000_000)

    @invariant()
    def lines_results_and_sums_are_as_expected(self) -> None:
        for batch in self.batches:
            stored = self.connection.execute(
                "SELECT state, attempts FROM lines WHERE key >> 32 = ? ORDER BY key", (batch.number,)
            ).fetchall()
            assert stored == [(line.state, line.attempts) for line in batch.lines.values()]
            results = {number: line.result for number, line in batch.lines.items() if line.result is not None}
            assert list(unfinished_lines(self.connection, batch.number, 0, NUM_LINES + 1)) == [
                (number, f"line-{number}") for number in range(NUM_LINES) if number not in results
            ]
            for state, has_failed in ((LineState.COMPLETED, False), (LineState.FAILED, True)):
                assert list(results_in_order(self.connection, batch.number, state, 0, NUM_LINES + 1)) == [
                    (number, result.content) for number, result in results.items() if result.has_failed == has_failed
                ]
            record = read_batch(self.connection, batch.number)
            assert record.num_completed == sum(not result.has_failed for result in results.values())
            assert record.num_failed == sum(result.has_failed for result in results.values())
            assert record.input_tokens == sum(result.input_tokens for result in results.values())
            assert record.cached_tokens == sum(result.cached_tokens for result in results.values())
            assert record.output_tokens == sum(result.output_tokens for result in results.values())
        (num_results,) = self.connection.execute("SELECT count(*) FROM results").fetchone()
        assert num_results == sum(line.result is not None for batch in self.batches for line in batch.lines.values())


LedgerMachine.TestCase.settings = examples(60, stateful_step_count=30)
TestLedger = LedgerMachine.TestCase


@pytest.fixture
def connection() -> Iterator[apsw.Connection]:
    return in_memory()


def test_pages_of_results_and_of_unfinished_lines_join_to_all(connection: apsw.Connection) -> None:
    batch = add_batch(connection, new_batch("in_progress")).number
    add_lines(connection, batch, new_lines(40), range(40))
    record_results(connection, batch, [new_result(number) for number in range(0, 40, 3)])
    finished: list[int] = []
    while page := list(
        results_in_order(connection, batch, LineState.COMPLETED, finished[-1] + 1 if finished else 0, 5)
    ):
        finished += [number for number, _ in page]
    assert finished == list(range(0, 40, 3))
    unfinished: list[int] = []
    while more := unfinished_lines(connection, batch, unfinished[-1] + 1 if unfinished else 0, 7):
        unfinished += [number for number, _ in more]
    assert unfinished == sorted(set(range(40)) - set(finished))


def test_lines_are_removed_in_steps_and_no_others(connection: apsw.Connection) -> None:
    kept, removed = (add_batch(connection, new_batch("in_progress", name)).number for name in ("batch_1", "batch_2"))
    for batch in (kept, removed):
        add_lines(connection, batch, new_lines(25), range(25))
        record_results(connection, batch, [new_result(number) for number in range(0, 25, 2)])
    steps = []
    while step := remove_lines(connection, removed, 10):
        steps.append(step)
    assert steps == [10, 10, 5]
    assert connection.execute("SELECT count(*), min(key) >> 32, max(key) >> 32 FROM lines").fetchall() == [
        (25, kept, kept)
    ]
    assert connection.execute("SELECT count(*), min(key) >> 32, max(key) >> 32 FROM results").fetchall() == [
        (13, kept, kept)
    ]


def test_only_finished_batches_with_lines_have_ledgers_to_clear(connection: apsw.Connection) -> None:
    numbers = {
        status: add_batch(connection, new_batch(status, f"batch_{status}")).number
        for status in ("completed", "in_progress", "failed", "cancelled")
    }
    for status in ("completed", "in_progress", "cancelled"):
        add_lines(connection, numbers[status], new_lines(3), range(3))
    assert finished_ledgers(connection) == [numbers["completed"], numbers["cancelled"]]


def test_the_number_of_a_removed_batch_is_not_used_again(connection: apsw.Connection) -> None:
    first = add_batch(connection, new_batch(name="batch_1")).number
    remove_batch_row(connection, first)
    assert add_batch(connection, new_batch(name="batch_2")).number == first + 1
