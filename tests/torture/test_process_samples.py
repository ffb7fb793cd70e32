"""A soak notices processes that grow, and only these."""

from torture.process_memory import MB
from torture.process_samples import Sample, compare_lives, compare_thirds

INTERVAL_S = 10.0


def life(num_samples: int, start_mb: float, mb_per_sample: float, more_files_per_sample: float = 0) -> list[Sample]:
    return [
        Sample(INTERVAL_S * n, int((start_mb + mb_per_sample * n) * MB), 50 + int(more_files_per_sample * n))
        for n in range(num_samples)
    ]


def test_growth_after_the_first_third_is_noticed() -> None:
    growing = compare_thirds(life(90, 300, 1.0, 0.2))
    assert growing is not None
    assert not growing.is_flat
    assert not growing.has_equal_files


def test_growth_in_the_first_third_only_is_none() -> None:
    flat = compare_thirds([*life(30, 100, 5), *life(60, 250, 0.1)])
    assert flat is not None
    assert flat.is_flat
    assert flat.has_equal_files


def test_too_few_samples_are_no_result() -> None:
    assert compare_thirds(life(5, 100, 0)) is None
    assert compare_lives([life(18, 100, 0), life(5, 100, 0)], 150) is None


def test_lives_are_compared_at_the_same_age() -> None:
    alike = compare_lives([life(18, 100, 10), life(18, 100, 10), life(40, 100, 10)], 150)
    assert alike is not None
    assert alike.is_flat
    larger = compare_lives([life(18, 100, 10), life(18, 130, 10)], 150)
    assert larger is not None
    assert not larger.is_flat
