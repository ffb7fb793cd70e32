"""A few hundred damaged and hostile model files; `python -m torture.fuzz.fuzz_checkpoints` runs thousands."""

from torture.fuzz.fuzz_checkpoints import run


def test_damaged_model_files_are_loaded_or_refused_in_one_line() -> None:
    report = run(105)
    assert not report.faults
    assert report.num_cases == 105
    assert {outcome for _, outcome in report.outcomes} == {"loaded", "refused"}
