"""Layers with windows: what a prompt finds of them in the cache, and faults that random runs notice."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.manager.helpers.engine_driver import EngineDriver, make_options, make_quick_driver
from tests.manager.helpers.requests import Shape, make_request, make_requests
from tokasaurus.manager.kv_cache.window_blocks import WindowSets
from tokasaurus.messages.forward import WindowBlocks
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.messages.status import WindowGroups

WINDOWS = WindowGroups(2, 9)
SHAPES = [Shape(number % 2, 23, number % 5, 3, 20) for number in range(12)]


def run_all(num_seeds: int) -> None:
    for seed in range(num_seeds):
        run_one(seed)


def run_one(seed: int) -> None:
    options = make_options(num_blocks=70, max_tokens_per_forward=30, windows=WINDOWS)
    driver = make_quick_driver(options, seed)
    driver.run(make_requests(SHAPES, options.limits), check_share=0.3)
    driver.assert_nothing_is_left()


class EarlyGroups(WindowGroups):
    """A token is given back one step before its last use."""

    def first_seen(self, num_tokens: Any) -> Any:
        return super().first_seen(num_tokens + 1)


def give_back_early(monkeypatch: pytest.MonkeyPatch) -> None:
    original = WindowSets.__init__

    def init(self: WindowSets, groups: WindowGroups, *sizes: int) -> None:
        original(self, EarlyGroups(groups.num_groups, groups.window), *sizes)

    monkeypatch.setattr(WindowSets, "__init__", init)


def forget_other_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    original = WindowSets.drop

    def drop(self: WindowSets, blocks: NDArray[np.int32], tick: int) -> NDArray[np.int32]:
        self.num_holders[blocks] = np.minimum(self.num_holders[blocks], 1)
        return original(self, np.unique(blocks), tick)

    monkeypatch.setattr(WindowSets, "drop", drop)


def tell_workers_half(monkeypatch: pytest.MonkeyPatch) -> None:
    original = WindowSets.take_new

    def take_new(self: WindowSets) -> WindowBlocks | None:
        new = original(self)
        return None if new is None else dataclasses.replace(new, blocks=new.blocks[::2], own=new.own[::2])

    monkeypatch.setattr(WindowSets, "take_new", take_new)


def keep_nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowSets, "hold", lambda _self, _blocks: None)


def find_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowSets, "start", lambda _self, _cached, start: start)


@pytest.mark.parametrize(
    "inject", [give_back_early, forget_other_holders, tell_workers_half, keep_nothing_held, find_everything]
)
def test_a_fault_in_what_layers_with_windows_keep_is_noticed(
    inject: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_all(3)
    inject(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run_all(20)


def ask(driver: EngineDriver, number: int, prompt_ids: list[int]) -> GenerateRequest:
    """Run one request of one token to its end."""
    request = make_request(number, 1, 1, 1)
    request = dataclasses.replace(request, prompt_ids=np.array(prompt_ids, np.int32))
    driver.step([request])
    driver.run_until_idle()
    return request


def test_a_prompt_goes_on_where_the_last_window_before_is_there() -> None:
    """Sets of a whole prompt's end stay, and those of a place where another prompt has gone on from it."""
    driver = make_quick_driver(make_options(num_blocks=60, max_tokens_per_forward=64, windows=WINDOWS))
    text = np.random.default_rng(0).integers(0, 8, 60).tolist()
    asked = [text[:40], text[:40], text[:50], [*text[:24], 9, 9, 9], [*text[:24], 8, 8], [*text[:32], 9]]
    for number, prompt_ids in enumerate(asked):
        ask(driver, number, prompt_ids)
    # All of the first; its last token; what follows it; from the start, though 24 tokens are there: no layer with a
    # window has kept them; now they are; and a place in the first one for which this holds as well.
    starts = driver.worker.start_positions
    assert starts[:5] == [0, 39, 40, 0, 24]
    assert starts[5] == 24
    assert all(driver.worker.num_sampled[number, 0] == 1 for number in range(len(asked)))
