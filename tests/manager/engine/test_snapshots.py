"""Layers with states: where prompts start, what is kept for others, and faults that random runs notice."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from tests.manager.helpers.engine_driver import EngineDriver, make_options, make_quick_driver
from tests.manager.helpers.requests import Shape, make_request, make_requests
from tokasaurus.manager.kv_cache.snapshots import Snapshots
from tokasaurus.messages.generation import GenerateRequest

SHAPES = [Shape(number % 2, 23, number % 5, 3, 20) for number in range(12)]


def run_all(num_seeds: int) -> None:
    for seed in range(num_seeds):
        options = make_options(
            num_blocks=40, max_tokens_per_forward=30, num_snapshots=1 + seed % 6, num_microbatches=1 + seed % 2
        )
        driver = make_quick_driver(options, seed)
        driver.run(make_requests(SHAPES, options.limits), check_share=0.3)
        driver.assert_nothing_is_left()


def start_from_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshots, "number", lambda _self, _block: 0)


def start_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshots, "number", lambda self, block: int(self._numbers[block]) % self.num_snapshots + 1)


def hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is evicted may be what a sequence is about to start from."""
    monkeypatch.setattr(Snapshots, "hold", lambda _self, _block: None)
    monkeypatch.setattr(Snapshots, "drop", lambda _self, _block: None)


def save_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is promised counts as there."""
    original = Snapshots.promise

    def promise(self: Snapshots, block: int, may_evict: bool) -> bool:
        is_new = original(self, block, may_evict)
        self.is_saved[block] |= is_new
        return is_new

    monkeypatch.setattr(Snapshots, "promise", promise)
    monkeypatch.setattr(Snapshots, "break_promise", Snapshots._give_up)


def keep_of_freed_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshots, "forget", lambda _self, _blocks: None)


@pytest.mark.parametrize(
    "inject", [start_from_zeros, start_from_another, hold_nothing, save_at_once, keep_of_freed_blocks]
)
def test_a_fault_in_what_is_kept_of_states_is_noticed(
    inject: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_all(4)
    inject(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run_all(30)


def ask(driver: EngineDriver, number: int, prompt_ids: list[int], num_sequences: int = 1) -> GenerateRequest:
    """Run one request of one token to its end."""
    request = make_request(number, 1, num_sequences, 1)
    request = dataclasses.replace(request, prompt_ids=np.array(prompt_ids, np.int32))
    driver.step([request])
    driver.run_until_idle()
    return request


def test_a_prompt_starts_where_its_states_were_kept() -> None:
    """That is before a prompt's last token, where its samples meet, and where another prompt has left one before."""
    driver = make_quick_driver(make_options(num_blocks=60, max_tokens_per_forward=64, num_snapshots=8))
    text = np.random.default_rng(0).integers(0, 8, 60).tolist()
    asked = [text[:40], text[:40], text[:50], [*text[:24], 9, 9, 9], [*text[:24], 8, 8], [*text[:32], 9]]
    for number, prompt_ids in enumerate(asked):
        ask(driver, number, prompt_ids)
    # All of the first; what follows its snapshot, twice; from the start, though keys and values of 24 tokens are there;
    # from there, since the one before has kept it; and from there again.
    assert driver.worker.start_positions == [0, 36, 36, 0, 24, 24]
    assert all(driver.worker.num_sampled[number, 0] == 1 for number in range(len(asked)))


def test_the_samples_of_a_prompt_compute_it_once() -> None:
    driver = make_quick_driver(
        make_options(num_blocks=60, max_tokens_per_forward=16, max_seqs_per_forward=12, num_snapshots=2)
    )
    ask(driver, 0, list(range(50)), num_sequences=12)
    assert driver.worker.start_positions == [0] + [48] * 11


def test_snapshots_at_intervals_are_at_the_ends_of_blocks_and_evict_none() -> None:
    for page_size in (4, 48, 8192):
        snapshots = Snapshots(3, 9, page_size, 4096)
        found = snapshots.wanted(0, 0, 40_000)
        assert len(found) > 1
        assert all(position > 0 and position % page_size == 0 for position in found)
        assert list(found.values()) == [True] + [False] * (len(found) - 1)
    assert snapshots.promise(1)
    snapshots.save(1)
    assert snapshots.promise(2)
    assert snapshots.promise(3)
    assert not snapshots.promise(4, may_evict=False)
    assert snapshots.promise(4)
    assert snapshots.number(1) == 0


def test_the_snapshot_that_was_read_least_lately_gives_way() -> None:
    driver = make_quick_driver(make_options(num_blocks=60, max_tokens_per_forward=64, num_snapshots=2))
    first, second, third = ([number] * 9 for number in (1, 2, 3))
    for number, prompt_ids in enumerate([first, second, first, third, first, second]):
        ask(driver, number, prompt_ids)
    assert driver.worker.start_positions == [0, 0, 8, 0, 8, 0]
