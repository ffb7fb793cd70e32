"""transformers' classes whose layers torch compiles, and whose steps are recorded as graphs: the same tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP

from tests.model.by_transformers.helpers.every_class import assert_equals, load_class
from tests.model.by_transformers.helpers.in_parts import SERVED
from tests.model.by_transformers.helpers.next_token import PROMPT
from tests.model.by_transformers.helpers.tiny_classes import save_tiny_model, tiny_config
from tests.model.execution.helpers.launch_tape import LaunchTape, TapedCompiler
from tests.model.helpers.prefix_samples import Samples
from tests.model.helpers.steps import CPU, StepDriver, make_runner, one_thread
from tokasaurus.messages.status import FlagRefused
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.by_transformers import probe
from tokasaurus.model.by_transformers.model import TransformersModel
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.execution.executors import OwnLayers
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.memory import kv_shape
from tokasaurus.model.worker.self_check import Measured, measure_graphs, measure_layers
from tokasaurus.model.worker.warmup import ForwardLimits

NUM_BLOCKS = 300


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def save(directory: Path, family: str, num_layers: int = 2) -> Any:
    config = tiny_config(family)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    return save_tiny_model(directory, config)


@pytest.mark.parametrize(
    "family", ["gemma2", *(pytest.param(each, marks=pytest.mark.long) for each in ("mixtral", "gpt_oss", "gpt2"))]
)
def test_compiled_layers_equal_transformers(family: str, tmp_path: Path) -> None:
    """They are compiled once, for steps of any size."""
    oracle, compiler = save(tmp_path, family), Compiler()
    with one_thread():
        assert_equals(tmp_path, oracle, compiler)
    assert compiler.num_compilations == 1


@pytest.mark.parametrize(("stage", "num_stages"), [(0, 1), (0, 2), (1, 2)])
def test_compiled_layers_equal_the_same_uncompiled(stage: int, num_stages: int, tmp_path: Path) -> None:
    save(tmp_path, "gpt_oss")
    tape, mesh = LaunchTape(), Mesh(stage, num_stages)
    compiler = TapedCompiler(tape)
    model, info = load_class(tmp_path, mesh=mesh, compiler=compiler)
    shape = kv_shape(info, mesh, 16, torch.float32, torch.float32, CPU, model.sinks)
    backend = make_backend("torch", shape, None)
    places = OwnLayers(), model, backend, shape, mesh, compiler, 1, info.context_length
    results = list(measure_layers(*places))
    assert results
    assert all(one.is_right for one in results)
    assert compiler.num_compilations == 1


def with_a_number_on_the_host(self: Any, states: Tensor) -> Tensor:
    factor = 2.0 if states.is_meta or float(states.mean()) > 0 else 3.0
    result: Tensor = self.down_proj(self.up_proj(states)) * factor
    return result


@pytest.mark.parametrize("is_required", [True, False])
def test_a_class_that_does_not_compile_as_a_whole_is_told(
    is_required: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Gemma2MLP, "forward", with_a_number_on_the_host)
    save(tmp_path, "gemma2")
    compiler = Compiler(is_required)
    model, info = load_class(tmp_path, compiler=compiler)
    driver = StepDriver(make_runner(model, info, None, compiler=compiler))
    driver.open(1, PROMPT.tolist())
    if is_required:
        with pytest.raises(
            FlagRefused, match=r"^torch_compile=T: cannot compile here, .*; torch_compile=F needs none$"
        ):
            driver.run([], [(1, len(PROMPT))])
        return
    found = driver.run([], [(1, len(PROMPT))])[1]
    told = [record.getMessage() for record in caplog.records if record.name == "tokasaurus.model.decoder.compile"]
    assert len([line for line in told if line.startswith("the layers run uncompiled, which is slower, since")]) == 1
    plain = StepDriver(make_runner(*load_class(tmp_path, packed=False), None))
    plain.open(1, PROMPT.tolist())
    token, logprob = plain.run([], [(1, len(PROMPT))])[1]
    assert found == (token, pytest.approx(logprob, abs=1e-4))


def recorded(directory: Path, is_compiled: bool = False) -> ModelRunner:
    """A runner with graphs of 3 and 11 rows, and of 30 tokens."""
    tape = LaunchTape()
    compiler = TapedCompiler(tape) if is_compiled else None
    with patch.object(TransformersModel, "pack_module"):  # a tape reads no packed weights
        model, info = load_class(directory, compiler=compiler)
    runner = make_runner(model, info, "torch", num_blocks=NUM_BLOCKS, compiler=compiler)
    runner.record_graphs(tape, [11, 3], chunk_sizes=[30])
    return runner


def measure(runner: ModelRunner) -> list[Measured]:
    model = runner._model
    assert isinstance(model, TransformersModel)
    limits = ForwardLimits(256, 16, 64, model.vocab_size)
    return list(measure_graphs(runner, model, 16, NUM_BLOCKS, limits))


@pytest.mark.parametrize(
    ("family", "is_compiled"), [("gpt_oss", False), ("gemma2", False), ("gpt2", False), ("gemma2", True)]
)
def test_replays_give_the_tokens_of_launched_steps(family: str, is_compiled: bool, tmp_path: Path) -> None:
    save(tmp_path, family)
    sampled = []
    with one_thread():
        plain = make_runner(*load_class(tmp_path, packed=False), "torch", num_blocks=NUM_BLOCKS)
        runner = recorded(tmp_path, is_compiled)
        for each in (runner, plain):
            samples = Samples(StepDriver(each, 16, num_blocks=NUM_BLOCKS), 16, seed=3)
            samples.run(12, grouped=True)
            assert samples.num_grouped > 20
            sampled.append(samples.sampled)
        results = measure(runner)
    for replayed, launched in zip(*(each.values() for each in sampled), strict=True):
        assert [token for token, _ in replayed] == [token for token, _ in launched]
    assert len(results) >= 12
    assert all(one.is_right for one in results)


def without_the_rows(self: TransformersModel, hidden: Tensor) -> Tensor:
    logits: Tensor = self.whole.lm_head(hidden.flip(0))
    return logits


def test_graphs_of_a_class_that_compute_something_else_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "gemma2")
    with one_thread():
        with monkeypatch.context() as patched:
            patched.setattr(TransformersModel, "logits", without_the_rows)
            runner = recorded(tmp_path)
        wrong = {one.name for one in measure(runner) if not one.is_right}
    assert wrong
    assert all("logits" in name for name in wrong)


def test_a_class_that_reads_numbers_on_the_host_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CUDA raises while it records: a start then goes on without graphs."""
    monkeypatch.setattr(Gemma2MLP, "forward", with_a_number_on_the_host)
    save(tmp_path, "gemma2")
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        recorded(tmp_path)


class TracingCompiler(Compiler):
    """Makes one graph of what it compiles, which torch's operations run: inductor takes a minute for each class."""

    def _compile_graph(self, graph: GraphModule, _inputs: Any, _options: Any = None) -> Callable[..., Any]:
        self.num_compilations += 1
        return graph.forward


@pytest.mark.long
@pytest.mark.parametrize("family", SERVED)
def test_every_class_compiles_as_a_whole_and_is_recorded(family: str, tmp_path: Path) -> None:
    oracle, compiler = save_tiny_model(tmp_path, tiny_config(family)), TracingCompiler()
    with one_thread(), patch("tokasaurus.checkpoint.info.read_facts", probe.facts_of):
        assert_equals(tmp_path, oracle, compiler)
        assert compiler.num_compilations == 1
        assert all(one.is_right for one in measure(recorded(tmp_path)))
