"""Token counts of each sequence and in total, counted again from what the worker was sent."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.manager.helpers.engine_driver import EngineDriver
from tests.manager.helpers.fake_worker import FakeWorker
from tokasaurus.manager.state.sequence import Sequence, TokenCounts
from tokasaurus.messages.commands import EngineCommand
from tokasaurus.messages.generation import CancelRequest, GenerateRequest


def sequence_key(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.seed, sequence.index


def recount(worker: FakeWorker, sequence: Sequence) -> TokenCounts:
    """Counts position by position, through every range of positions that the worker computed for the sequence."""
    counts = TokenCounts()
    num_prompt_tokens = len(sequence.request.prompt_ids)
    computed_before: set[int] = set()
    for start, end in worker.computed_ranges.get(sequence_key(sequence), []):
        counts.asked = num_prompt_tokens
        for position in range(end):
            if position >= start and position in computed_before:
                counts.recomputed += 1
            elif position not in computed_before and position < num_prompt_tokens:
                counts.cached += position < start
                counts.computed += position >= start
            computed_before.add(position)
    longest = worker.longest_prefixes.get(sequence_key(sequence), 0) * worker.limits.page_size
    counts.shared = min(longest, num_prompt_tokens)
    return counts


def total(counts: list[TokenCounts]) -> TokenCounts:
    return TokenCounts(*(sum(column) for column in zip(*(asdict(one).values() for one in counts), strict=True)))


@dataclass
class CountingDriver(EngineDriver):
    """After every step, compares the total counts with the sum over all sequences."""

    sequences: dict[Sequence, None] = field(default_factory=dict)
    """All sequences so far, except those cancelled in the step in which they arrived."""

    def step(
        self, messages: Iterable[GenerateRequest | CancelRequest | EngineCommand] = (), num_results: int = 0
    ) -> Any:
        deltas = super().step(messages, num_results)
        for samples in self.state.unfinished.values():
            self.sequences.update(samples.sequences)
        totals, summed = asdict(self.state.totals.tokens), asdict(total([one.counts for one in self.sequences]))
        running = [one for one in self.running() if one.is_open]
        slots = [one.slot for one in running]
        summed["shared"] += int(self.state.slots.num_shared_tokens[slots].sum()) - sum(
            one.counts.shared for one in running
        )
        assert not self.sequences or totals == summed, "at every step"
        return deltas


def check_counts(driver: CountingDriver) -> TokenCounts:
    """Checks the counts of every sequence and delta after all work; returns the totals."""
    expected = {sequence: recount(driver.worker, sequence) for sequence in driver.sequences}
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
