"""Cycles are still collected, at moments when there is time, and at the latest when many objects wait."""

import gc
import itertools
import time
import weakref
from collections.abc import Iterator

import pytest

from tokasaurus.monitoring import garbage
from tokasaurus.monitoring.garbage import OVERDUE_FACTOR, YOUNG_OBJECTS, GarbageCollector


class Cycle:
    """An object that refers to itself, so that reference counts never free it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def collector() -> Iterator[GarbageCollector]:
    yield GarbageCollector()
    gc.enable()


def make_cycles(num: int) -> list[weakref.ref]:
    return [weakref.ref(Cycle()) for _ in range(num)]


def num_alive(references: list[weakref.ref]) -> int:
    return sum(reference() is not None for reference in references)


def test_nothing_is_collected_while_the_worker_has_little_work(collector: GarbageCollector) -> None:
    cycles = make_cycles(YOUNG_OBJECTS)
    for _ in range(100):
        collector.collect(0.0, is_idle=False)
    assert num_alive(cycles) == YOUNG_OBJECTS, "neither by the collector's own choice nor automatically"


@pytest.mark.parametrize(("seconds_left", "is_idle"), [(1.0, False), (0.0, True)])
def test_cycles_are_collected_when_there_is_time(
    collector: GarbageCollector, seconds_left: float, is_idle: bool
) -> None:
    cycles = make_cycles(YOUNG_OBJECTS + 10)
    collector.collect(seconds_left, is_idle)
    assert num_alive(cycles) == 0


def test_garbage_stays_bounded_although_there_is_never_time(collector: GarbageCollector) -> None:
    cycles, most = [], 0
    for _ in range(400):
        cycles += make_cycles(500)
        collector.collect(0.0, is_idle=False)
        cycles = [reference for reference in cycles if reference() is not None]
        most = max(most, len(cycles))
    assert YOUNG_OBJECTS < most <= (OVERDUE_FACTOR + 1) * YOUNG_OBJECTS


def test_cycles_that_grew_old_are_collected_by_a_full_collection(
    collector: GarbageCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were in use during many collections, so that only a full one looks at them."""
    now_s = itertools.count(time.monotonic(), 1.0)
    old = [Cycle() for _ in range(100)]
    references = [weakref.ref(cycle) for cycle in old]
    gc.collect(0)
    gc.collect(1)
    del old
    make_cycles(YOUNG_OBJECTS + 10)
    collector.collect(1.0, is_idle=False)
    assert num_alive(references) == 100
    monkeypatch.setattr(garbage.time, "monotonic", lambda: next(now_s) + garbage.IDLE_FULL_SECONDS)
    collector.collect(1.0, is_idle=False)
    assert num_alive(references) == 0
