"""A few cases of what long tests check of Triton's kernels on many: against slow oracles, and at a start."""

from tests.helpers.installed_triton import needs_interpreter, run_python


@needs_interpreter
def test_interpreted_kernels_equal_slow_oracles_and_wrong_ones_are_switched_off_at_the_start() -> None:
    printed = run_python("-W", "ignore", "-m", "tests.model.helpers.interpreted_few").split("\n")
    assert printed == ["all equal", "check_sampling", "check_parameters", "check_layers", "check_a_few", ""]
