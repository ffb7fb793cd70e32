"""A few hundred mutated bodies; `python -m torture.fuzz.fuzz_bodies` sends thousands."""

from torture.fuzz.fuzz_bodies import run


def test_mutated_bodies_are_answered_or_refused_in_openais_form() -> None:
    report = run(180)
    assert not report.faults
    assert report.num_cases == 180
    assert {outcome for _, outcome in report.outcomes} >= {"200", "400"}
