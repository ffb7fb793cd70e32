"""A few hundred damaged and hostile model files; `python -m torture.fuzz.fuzz_checkpoints` runs thousands."""

from tests.helpers.examples import few
from torture.fuzz.fuzz_checkpoints import run


@few(1, "num_cases", [18, 105])
def test_damaged_model_files_are_loaded_or_refused_in_one_line(num_cases: int) -> None:
    report = run(num_cases)
    assert not report.faults
    assert report.num_cases == num_cases
    assert {outcome for _, outcome in report.outcomes} == {"loaded", "refused"}
