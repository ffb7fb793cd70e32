"""A few cases of what long tests check of Triton's kernels on many, against slow oracles."""

import pytest

from tests.helpers.installed_triton import needs_interpreter, run_python

pytestmark = pytest.mark.cuda_path


@needs_interpreter
def test_interpreted_kernels_equal_slow_oracles() -> None:
    printed = run_python("-W", "ignore", "-m", "tests.model.helpers.interpreted_few").split("\n")
    assert printed == [
        "all equal",
        "check_sampling",
        "check_parameters",
        "check_logprobs_as_sampled",
        "check_layers",
        "check_products",
        "check_recorded_inputs",
        "",
    ]
