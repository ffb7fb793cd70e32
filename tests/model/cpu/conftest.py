import pytest

from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.cpu.build import INSTRUCTION_SETS, machine_sets
from tokasaurus.model.cpu.layer_executor import LayerKernels


@pytest.fixture(scope="module", params=dict.fromkeys(level.cpu_isa for level in INSTRUCTION_SETS))
def kernels(request: pytest.FixtureRequest) -> LayerKernels:
    """The kernels of each instruction set; this machine must have it."""
    if request.param not in [level.cpu_isa for level in machine_sets()]:
        pytest.skip("this processor does not have it")
    loaded = load_kernels(request.param)
    assert loaded is not None, "the tests need a C++ compiler"
    return LayerKernels(loaded)
