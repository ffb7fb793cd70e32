"""Pipeline stages in one process, against the whole model: plain, compiled, and as graphs recorded on a tape."""

from pathlib import Path

import pytest

from tests.helpers.examples import few
from tests.helpers.tiny_model import FAMILIES, save_tiny_model
from tests.model.attention.helpers import flashinfer_double
from tests.model.execution.helpers.decode_steps import (
    NUM_BLOCKS,
    NUM_SLOTS,
)
from tests.model.execution.helpers.joined_stages import assert_equals_whole_model, join_stages
from tests.model.execution.helpers.launch_tape import LaunchTape, TapedCompiler
from tests.model.helpers.steps import StepDriver, one_thread
from tokasaurus.model.decoder.compile import Compiler

pytestmark = pytest.mark.cuda_path


@few(
    1,
    ("family", "backend", "pp_size"),
    [*((family, "torch", 2) for family in FAMILIES), ("llama", "cpu", 3), ("qwen3", "torch", 3)],
)
def test_stages_give_the_tokens_of_the_whole_model(
    family: str, backend: str, pp_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, family, tied=family == "llama")
    assert_equals_whole_model(join_stages(tmp_path, pp_size, backend, monkeypatch), tmp_path)


@few(1, "compiled", [False, True])
@few(1, "backend", ["torch", "flashinfer"])
def test_each_stage_has_graphs_of_its_own(
    compiled: bool, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer is in one stage. FlashInfer's attention is recorded once more with each size."""
    flashinfer_double.install(monkeypatch, any_dtype=True)  # the models are in float32
    save_tiny_model(tmp_path, "qwen2")
    tapes = [LaunchTape() for _ in range(3)]
    compilers = [TapedCompiler(tape) for tape in tapes] if compiled else None
    stages = join_stages(tmp_path, 3, backend, monkeypatch, compilers=compilers)
    with one_thread():
        stages.record_graphs(tapes)
    num_pieces = (3 + 1) * (1 + 1) + (0 if backend == "torch" else 3)
    expected = [num_pieces, num_pieces, num_pieces + 3]
    assert [len(tape.graphs) for tape in tapes] == expected, "11, 8 and 4 rows, 24 tokens; one layer each; the LM head"
    assert_equals_whole_model(stages, tmp_path)


@pytest.mark.long
def test_compiled_stages_compile_nothing_after_the_first_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path, "llama")
    compilers = [Compiler() for _ in range(2)]
    stages = join_stages(tmp_path, 2, "torch", monkeypatch, compilers=compilers)
    with one_thread():
        driver = StepDriver(stages, num_blocks=NUM_BLOCKS)
        driver.open(NUM_SLOTS, [5, 3, 9])  # a slot that is not used later
        driver.run([], [(NUM_SLOTS, 3)])
        driver.run([NUM_SLOTS], [])
    assert all(compiler.num_compilations for compiler in compilers)
    for compiler in compilers:
        compiler.end_warm_up()
    assert_equals_whole_model(stages, tmp_path)
    assert not any(compiler.num_recompiles for compiler in compilers)
