"""Runs the Triton kernels of adapters, interpreted: in launched steps, in graphs on a tape and in compiled layers. Run
as a module, with names of checks.

A process of its own: the variable TRITON_INTERPRET must be set before anything imports Triton, and then holds for all.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from transformers import PreTrainedModel

from tests.helpers.tiny_model import VOCAB_SIZE
from tests.model.execution.helpers.interpreted_graphs import OneOperation
from tests.model.execution.helpers.launch_tape import LaunchTape, TapedGraph
from tests.model.helpers.adapter_texts import assert_each_row_has_its_text, make_oracles
from tests.model.helpers.greedy_decoding import load, oracle_greedy
from tests.model.helpers.steps import StepDriver, make_runner, one_thread
from tokasaurus.checkpoint.adapters import read_adapter
from tokasaurus.model.decoder import adapters, triton_low_rank
from tokasaurus.model.decoder.adapters import ModelAdapters
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.execution.graphs import DecodeOutput, StepGraphs
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.worker.kernel_checks import compare_low_rank
from tokasaurus.model.worker.self_check import measure_graphs
from tokasaurus.model.worker.warmup import ForwardLimits, warm_up_small

GRAPH_SIZES, CHUNK_SIZES = [8, 4, 1], [64, 24]
LIMITS = ForwardLimits(max_tokens=256, max_seqs=20, context_length=512, vocab_size=VOCAB_SIZE, has_adapters=True)


def in_use() -> AbstractContextManager[object]:
    return patch.object(adapters, "uses_triton", lambda _device, group: group == "adapters")


def record(runner: ModelRunner) -> None:
    runner.record_graphs(LaunchTape(), GRAPH_SIZES, chunk_sizes=CHUNK_SIZES)


def check_texts(directory: Path, oracles: list[PreTrainedModel]) -> None:
    """Of adapters of linear layers alone, which graphs compute; then with those that change embeddings and logits."""
    sources = [directory / f"adapter{number}" for number in range(1, len(oracles))]
    replays: list[int] = []
    replay = TapedGraph.replay

    def noted(graph: TapedGraph) -> None:
        replays.append(sum("interpreted_graphs" in str(function) for function, *_ in graph.operations))
        replay(graph)

    with in_use(), patch.object(TapedGraph, "replay", noted):
        assert_each_row_has_its_text(directory, sources[:3], oracles[:4], "torch", prepare=record)
        assert sum(count > 0 for count in replays) > len(replays) // 2
        assert_each_row_has_its_text(directory, sources, oracles, "torch", prepare=record)


def check_changes(directory: Path, oracles: list[PreTrainedModel]) -> None:
    """One recording, for steps with adapters and without, before and after another adapter gets a number."""
    with in_use():
        model, info = load(directory)
        own = ModelAdapters(model, 2, max_rank=16, max_tokens=64)
        digests = [""]
        for number in (1, 2, 3):
            adapter = read_adapter(directory / f"adapter{number}")
            own.load(adapter.digest, own.share(adapter))
            digests.append(adapter.digest)
        runner = make_runner(model, info, "torch", adapters=own)
        record(runner)
        driver, prompt = StepDriver(runner, want_logprobs=False), [3, 1, 4, 1, 5]

        def decode(numbers: dict[int, int]) -> dict[int, list[int]]:
            """numbers: of each slot's adapter."""
            for slot, number in numbers.items():
                driver.open(slot, prompt, adapter=number)
            texts = {slot: [driver.run([], [(slot, 5)])[slot][0]] for slot in numbers}
            for _ in range(7):
                for slot, (token, _) in driver.run([*numbers], []).items():
                    texts[slot].append(token)
            for slot in numbers:
                driver.close(slot)
            return texts

        texts = [oracle_greedy(oracle, prompt, 8)[0] for oracle in oracles[:4]]
        driver.place_adapter(1, digests[1])
        driver.place_adapter(2, digests[2])
        assert decode({1: 2, 2: 0, 3: 1}) == {1: texts[2], 2: texts[0], 3: texts[1]}
        assert decode({1: 0, 2: 0}) == {1: texts[0], 2: texts[0]}
        driver.place_adapter(1, digests[3])
        assert decode({1: 1, 2: 2}) == {1: texts[3], 2: texts[2]}
        own.unload(digests[2])
        assert decode({1: 2, 2: 1}) == {1: texts[0], 2: texts[3]}


def check_compiled(directory: Path, oracles: list[PreTrainedModel]) -> None:
    """Compiled layers, which the warm-up compiles twice: without adapters and with them."""
    sources = [directory / f"adapter{number}" for number in (1, 2, 3)]
    compiler = Compiler()

    def warm_up(runner: ModelRunner) -> None:
        warm_up_small(runner, LIMITS, 16)
        compiler.end_warm_up()

    with in_use():
        assert_each_row_has_its_text(directory, sources, oracles[:4], "torch", prepare=warm_up, compiler=compiler)
    assert compiler.num_compilations == 3, "and the LM head"
    assert compiler.num_recompiles == 0


def check_start(directory: Path, _oracles: list[PreTrainedModel]) -> None:
    """A start's checks of the kernels and of recorded steps, which find a replay without adapters."""
    with in_use():
        model, info = load(directory)
        for measured in compare_low_rank(model, 16):
            assert measured.is_right, measured
        runner = make_runner(model, info, "torch", adapters=ModelAdapters(model, 2, max_rank=16, max_tokens=64))
        record(runner)
        num_blocks = 20

        def measure() -> dict[str, bool]:
            found = measure_graphs(runner, model, 16, num_blocks, LIMITS)
            return {measured.name: measured.is_right for measured in found}

        results = measure()
        assert all(results.values()), results
        with patch.object(StepGraphs, "run", partialmethod(run_without_adapters, StepGraphs.run)):
            wrong = {name for name, is_right in measure().items() if not is_right}
        # Half of the rows have no adapter.
        assert wrong == {name for name in results if "adapters" in name and name.endswith("worst row")}
        assert len(wrong) == 6


def run_without_adapters(graphs: StepGraphs, run: Callable[..., DecodeOutput], *arguments: Any) -> DecodeOutput:
    return run(graphs, *arguments[:-1])


CHECKS: dict[str, Callable[[Path, list[PreTrainedModel]], None]] = {
    "texts": check_texts,
    "changes": check_changes,
    "compiled": check_compiled,
    "start": check_start,
}


def main(names: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory() as name, one_thread():
        for kernel in ("_shrink_tile", "_expand_tile"):
            patched.setattr(triton_low_rank, kernel, OneOperation(getattr(triton_low_rank, kernel)))
        oracles = make_oracles(Path(name), "llama")
        for each in names or CHECKS:
            CHECKS[each](Path(name), oracles)
    print("all equal")


if __name__ == "__main__":
    main(sys.argv[1:])
