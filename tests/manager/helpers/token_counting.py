"""What is counted of each sequence and in total, against what the worker was really sent."""

from dataclasses import asdict, dataclass, field

from tests.manager.helpers.engine_driver import EngineDriver
from tests.manager.helpers.fake_worker import FakeWorker
from tokasaurus.manager.state.sequence import Sequence, TokenCounts


def key_of(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.seed, sequence.index


def counts_by_hand(worker: FakeWorker, sequence: Sequence) -> TokenCounts:
    """Position by position, through all stays of the sequence at the worker."""
    counts = TokenCounts()
    num_prompt_tokens = len(sequence.request.prompt_ids)
    had: set[int] = set()
    for start, end in worker.stays.get(key_of(sequence), []):
        counts.asked = num_prompt_tokens
        for position in range(end):
            if position >= start and position in had:
                counts.recomputed += 1
            elif position not in had and position < num_prompt_tokens:
                counts.cached += position < start
                counts.computed += position >= start
            had.add(position)
    longest = worker.longest_prefixes.get(key_of(sequence), 0) * worker.limits.page_size
    counts.shared = min(longest, num_prompt_tokens)
    return counts


def total(counts: list[TokenCounts]) -> TokenCounts:
    return TokenCounts(*(sum(column) for column in zip(*(asdict(one).values() for one in counts), strict=True)))


@dataclass
class CountingDriver(EngineDriver):
    """sequences: all that were not cancelled in the step in which they came."""

    sequences: dict[Sequence, None] = field(default_factory=dict)

    def step(self, messages=(), num_results=0):
        deltas = super().step(messages, num_results)
        for siblings in self.state.unfinished.values():
            self.sequences.update(siblings)
        totals, summed = asdict(self.state.totals.tokens), asdict(total([one.counts for one in self.sequences]))
        running = [one for one in self.running() if one.is_open]
        slots = [one.slot for one in running]
        summed["shared"] += int(self.state.slots.num_shared_tokens[slots].sum()) - sum(
            one.counts.shared for one in running
        )
        assert not self.sequences or totals == summed, "at every step"
        return deltas


def check_counts(driver: CountingDriver) -> TokenCounts:
    """When all is done. Gives the totals."""
    expected = {sequence: counts_by_hand(driver.worker, sequence) for sequence in driver.sequences}
    assert {sequence: sequence.counts for sequence in driver.sequences} == expected
    totals = driver.state.totals.tokens
    assert totals == total(list(expected.values()))
    stats = driver.state.stats()
    assert totals == TokenCounts(
        stats.total_asked_prompt_tokens,
        stats.total_prefix_cache_hit_tokens,
        stats.total_computed_prompt_tokens,
        stats.total_recomputed_tokens,
        stats.total_shared_prompt_tokens,
    )
    by_key = {(sequence.request.request_id, sequence.index): counts for sequence, counts in expected.items()}
    for delta in driver.deltas:
        counts = by_key[delta.request_id, delta.sequence_index]
        assert counts.asked == counts.cached + counts.computed
        assert (delta.num_computed_tokens, delta.num_recomputed_tokens, delta.num_shared_tokens) == (
            counts.computed,
            counts.recomputed,
            counts.shared,
        )
    return totals
