"""The pipeline stages of a model, all in this process and on one device."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.execution.helpers.decode_steps import (
    MAX_ROWS,
    NUM_BLOCKS,
    NUM_SLOTS,
    STEP,
    assert_same,
    decode_every_number_of_rows,
)
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.prefix_samples import Samples
from tests.model.helpers.steps import CPU, StepDriver, make_runner, one_thread
from tests.model.parallel.helpers.stage_transport import Transport, stage_meshes
from tokasaurus.messages.forward import ForwardInput
from tokasaurus.model.buffer_sizes import graph_sizes
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.execution.graphs import Recorder
from tokasaurus.model.execution.runner import ModelRunner, StepResult
from tokasaurus.model.parallel.stage_links import StageLinks

MAX_TOKENS = 256
"""Of a step."""


@dataclass
class JoinedStages:
    """Has the methods of a ModelRunner that tests call."""

    runners: list[ModelRunner]

    def run(self, step: ForwardInput) -> StepResult:
        for runner in self.runners:
            runner.expect(step)
        *others, result = [runner.run(step) for runner in self.runners]
        assert not any(others), "only the last stage replies"
        assert result is not None
        return result

    def record_graphs(self, recorders: Sequence[Recorder]) -> None:
        """recorders: one of each stage."""
        for runner, recorder in zip(self.runners, recorders, strict=True):
            runner.record_graphs(recorder, graph_sizes(MAX_ROWS, STEP), chunk_sizes=[24])


def join_stages(
    directory: Path,
    pp_size: int,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device = CPU,
    compilers: Sequence[Compiler] | None = None,
) -> JoinedStages:
    """compilers: one of each stage; None if nothing is compiled."""
    Transport().install(monkeypatch)
    torch._dynamo.reset()  # in this process, all stages of all tests share the limit of one function's compilations
    runners = []
    for mesh in stage_meshes(pp_size):
        model, info = load(directory, mesh, device, packed=backend == "cpu")
        compiler = None if compilers is None else compilers[mesh.pp_rank]
        buffers = [model.new_hidden(MAX_TOKENS, device) for _ in range(mesh.num_hidden_buffers)]
        links = StageLinks(mesh, buffers, NUM_SLOTS + 1)
        sizes: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "num_slots": NUM_SLOTS}
        runners.append(
            make_runner(model, info, backend, **sizes, device=device, compiler=compiler, mesh=mesh, links=links)
        )
    return JoinedStages(runners)


def assert_equals_whole_model(stages: JoinedStages, directory: Path, device: torch.device = CPU) -> None:
    """Every number of rows, with prompts in between; then with prefix groups that change with every step."""
    model, info = load(directory, device=device)
    whole = make_runner(model, info, "torch", num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS, device=device)
    with one_thread():
        assert_same(decode_every_number_of_rows(stages), decode_every_number_of_rows(whole))
        sampled = []
        for runner in (stages, whole):
            samples = Samples(StepDriver(runner, 16, num_blocks=NUM_BLOCKS, seed=1), 16, seed=3)
            samples.run(12, grouped=True)
            assert samples.num_grouped > 20
            sampled.append(samples.sampled)
    assert_same(*([dict(enumerate(pairs)) for pairs in by_slot.values()] for by_slot in sampled))
