"""Runs the layers' Triton kernels, interpreted, inside graphs on a tape. Run as a module.

A process of its own: the variable TRITON_INTERPRET must be set before anything imports Triton, and then holds for all.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.helpers.tiny_model import save_tiny_model
from tests.model.attention.helpers import flashinfer_double
from tests.model.execution.helpers.decode_steps import Sampled, assert_same
from tests.model.execution.helpers.launch_tape import LaunchTape, TapedGraph
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.steps import StepDriver, make_runner, one_thread
from tokasaurus.model.decoder import triton_layers
from tokasaurus.model.execution import executors
from tokasaurus.model.execution.executors import FusedExecutor, ModuleExecutor
from tokasaurus.model.execution.runner import ModelRunner

GRAPH_SIZES, PAGE_SIZE = [4, 2], 4
KERNELS = ("_add_norm_row", "_rotate_token", "_activate_token")
KERNELS_OF_A_LAYER = 4

_launches: list[Callable[[Sequence[Tensor]], None]] = []


@torch.library.custom_op("interpreted_graphs::launch", mutates_args=("tensors",))
def _launch(tensors: Sequence[Tensor], number: int) -> None:
    """One operation, as a launch is: a tape that replays it does not see how the interpreter computes."""
    _launches[number](tensors)


class OneOperation:
    """A kernel whose launches are operations of torch. Its numbers are those of the recording, its tensors too."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            def again(tensors: Sequence[Tensor]) -> None:
                in_order = iter(tensors)
                given = [next(in_order) if isinstance(x, Tensor) else x for x in arguments]
                self._kernel[grid](*given, **constants)

            _launches.append(again)
            _launch([x for x in arguments if isinstance(x, Tensor)], len(_launches) - 1)

        return launch


def decode(runner: ModelRunner) -> list[Sampled]:
    """Up to five rows, one more than the largest graph, then fewer; the first two share a block, in a group or not."""
    driver = StepDriver(runner, PAGE_SIZE)
    prompts = {1: [5, 6, 7, 8, 9], 2: [5, 6, 7, 8, 3, 4], 3: [2], 4: [9, 1, 3], 5: [4, 4]}
    results = []
    for slot, prompt in prompts.items():
        shares = (1, 1) if slot == 2 else None
        driver.open(slot, prompt, temperature=float(slot % 2), seed=slot, shares=shares)
        results.append(driver.run(list(range(1, slot)), [(slot, driver.remaining(slot))]))
    results += [driver.run(slots, []) for slots in ([1, 2, 3, 4, 5], [4, 1, 2, 3], [2, 3, 5], [3, 1], [5])]
    return results + [driver.run(slots, [], groups=[(2, 1)]) for slots in ([2, 1, 4, 3], [1, 2, 5], [2, 1])]


def check(family: str, backend: str) -> None:
    with tempfile.TemporaryDirectory() as directory, one_thread():
        save_tiny_model(Path(directory), family)
        model, info = load(Path(directory))
        plain = make_runner(model, info, backend, PAGE_SIZE)
        assert isinstance(plain._executor, ModuleExecutor)
        tape = LaunchTape()
        with patch.object(executors, "uses_triton", lambda _device, group: group == "layers"):
            fused = make_runner(model, info, backend, PAGE_SIZE)
        assert isinstance(fused._executor, FusedExecutor)
        fused.record_graphs(tape, GRAPH_SIZES)
        recorded = [function for graph in tape.graphs for function, *_ in graph.operations]
        num_recordings = len(GRAPH_SIZES) * (2 if backend == "flashinfer" else 1)
        num_launches = sum("interpreted_graphs" in str(function) for function in recorded)
        assert num_launches == num_recordings * info.num_layers * KERNELS_OF_A_LAYER
        before = len(_launches)
        replayed: list[TapedGraph] = []
        replay = TapedGraph.replay

        def noted(graph: TapedGraph) -> None:
            replayed.append(graph)
            replay(graph)

        with patch.object(TapedGraph, "replay", noted):
            got = decode(fused)
        assert replayed
        assert len(_launches) > before, "prompts, and the step with more rows than any graph, are launched"
        assert_same(got, decode(plain))


def main() -> None:
    with pytest.MonkeyPatch.context() as patched:
        flashinfer_double.install(patched, any_dtype=True)  # the models are in float32
        for name in KERNELS:
            patched.setattr(triton_layers, name, OneOperation(getattr(triton_layers, name)))
        check("llama", "torch")
        check("qwen3", "flashinfer")  # with norms of heads, and recordings with attention
    print("all equal")


if __name__ == "__main__":
    main()
