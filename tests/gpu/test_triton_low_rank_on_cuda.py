"""The Triton kernels of adapters on a CUDA device, against float64, and graphs with adapters against launched steps."""

from pathlib import Path

import pytest
import torch

from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
CUDA = torch.device("cuda", 0)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Of float32 the order of sums; of the others one rounding of results up to 4, and tf32."""
LARGE = {
    "8b, few rows": (64, 4096, [4096, 1024, 1024], [[16, 16, 16]] * 7 + [[64, 64, 64]], 64),
    "8b, many rows": (2000, 4096, [14336, 14336], [[16, 16], [0, 5], [64, 64]], 64),
    "8b, down": (300, 14336, [4096], [[256], [1], [32]], 256),
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", ["mixed", "one", "last"])
def test_adapters_equal_float64(kind: str, dtype: torch.dtype) -> None:
    from tests.model.decoder.helpers.low_rank_cases import CASES, LowRankCase, check

    for case in (*CASES.values(), *(LowRankCase(*sizes) for sizes in LARGE.values())):
        check(case, kind, dtype, CUDA, TOLERANCES[dtype])


@pytest.mark.parametrize("compiled", [False, True])
def test_graphs_with_adapters_equal_launched_steps(compiled: bool, tmp_path: Path) -> None:
    from tests.model.helpers.greedy_decoding import load
    from tests.model.helpers.steps import make_runner
    from tokasaurus.model.decoder.adapters import ModelAdapters
    from tokasaurus.model.decoder.compile import Compiler
    from tokasaurus.model.execution.graphs import CudaRecorder
    from tokasaurus.model.worker.kernel_checks import compare_low_rank
    from tokasaurus.model.worker.self_check import measure_graphs
    from tokasaurus.model.worker.warmup import ForwardLimits, warm_up_small

    save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path, device=CUDA)
    for measured in compare_low_rank(model, 16):
        assert measured.is_right, measured
    compiler = Compiler() if compiled else None
    model.begin_packing(None, compiler=compiler)
    model.end_packing()
    adapters = ModelAdapters(model, 2, max_rank=16, max_tokens=256)
    assert adapters.in_graphs
    runner = make_runner(model, info, "torch", device=CUDA, compiler=compiler, adapters=adapters)
    limits = ForwardLimits(256, 20, 512, VOCAB_SIZE, has_adapters=True)
    warm_up_small(runner, limits, 16)
    if compiler is not None:
        compiler.end_warm_up()
    runner.record_graphs(CudaRecorder(CUDA), [16, 8, 1], chunk_sizes=[64, 24])
    results = list(measure_graphs(runner, model, 16, 20, limits))
    assert sum("adapters" in measured.name for measured in results) == 12
    for measured in results:
        assert measured.is_right, measured
    assert compiler is None or compiler.num_recompiles == 0
