"""Memory and file descriptors of processes over hours, and whether they grow."""

import itertools
import statistics
from collections import defaultdict
from dataclasses import dataclass, field

from torture.process_memory import MB, num_open_files, rss_bytes

MAX_GROWTH_SHARE = 0.05
MAX_GROWTH_BYTES = 20 * MB
MAX_MORE_FILES = 3


@dataclass(frozen=True)
class Sample:
    at_s: float
    rss: int
    num_files: int


@dataclass
class Samples:
    """By title of the process and its id: a process that is started again has another life."""

    lives: dict[str, dict[int, list[Sample]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))

    def add(self, title: str, pid: int, at_s: float) -> None:
        try:
            self.lives[title][pid].append(Sample(at_s, rss_bytes(pid), num_open_files(pid)))
        except (OSError, AssertionError):  # it has just ended
            return


@dataclass(frozen=True)
class Comparison:
    earlier_rss: float
    later_rss: float
    earlier_files: float
    later_files: float
    of: str
    """What is compared."""

    @property
    def is_flat(self) -> bool:
        allowed = max(MAX_GROWTH_BYTES, MAX_GROWTH_SHARE * self.earlier_rss)
        return self.later_rss - self.earlier_rss <= allowed

    @property
    def has_equal_files(self) -> bool:
        return abs(self.later_files - self.earlier_files) <= MAX_MORE_FILES


def compare_thirds(life: list[Sample]) -> Comparison | None:
    """Medians of the middle and the last third of a process's samples; None if there are too few."""
    third = len(life) // 3
    if third < 2:
        return None
    return _compare(life[third : 2 * third], life[2 * third :], f"{len(life)} samples, middle and last third")


def compare_lives(lives: list[list[Sample]], min_age_s: float) -> Comparison | None:
    """The earlier half of the lives that reached an age, with the later half, over the second half of that age.

    None if fewer than two reached it.
    """
    long = [life for life in lives if life and life[-1].at_s - life[0].at_s >= min_age_s]
    old = [[sample for sample in life if min_age_s / 2 <= sample.at_s - life[0].at_s <= min_age_s] for life in long]
    if len(old) < 2 or not all(old):
        return None
    half = len(old) // 2
    earlier, later = list(itertools.chain(*old[:half])), list(itertools.chain(*old[-half:]))
    return _compare(earlier, later, f"{len(old)} lives of {min_age_s:.0f} s or more, earlier and later")


def _compare(earlier: list[Sample], later: list[Sample], of: str) -> Comparison:
    return Comparison(
        statistics.median(sample.rss for sample in earlier),
        statistics.median(sample.rss for sample in later),
        statistics.median(sample.num_files for sample in earlier),
        statistics.median(sample.num_files for sample in later),
        of,
    )
