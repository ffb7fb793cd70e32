"""A start's check of the Triton kernels, interpreted: right kernels pass, each wrong one switches its group off."""

from tests.helpers.installed_triton import needs_interpreter, needs_triton, run_python


@needs_triton
@needs_interpreter
def test_wrong_kernels_are_switched_off() -> None:
    assert run_python("-m", "tests.model.worker.helpers.interpreted_check") == "all found\n"
