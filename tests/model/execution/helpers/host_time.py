"""Host time and launches of a decode step and of a step with a prompt, over FlashInfer's real Python wrappers and
planner, without a device; prints JSON.

`python -m tests.model.execution.helpers.host_time PACKAGE NEEDS [--num-layers 16] [--num-steps 300]`, two directories
as of `make flashinfer-packages`.

Whatever a GPU would compute is left out: gemms, Triton kernels and graphs launch nothing, and are counted. What remains
is the time of our Python, of FlashInfer's and of torch's small operations, whose launches run on this CPU. The heads
are a 1B's, and the hidden size is small.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.plain_info import plain_info
from tests.model.attention.helpers import flashinfer_real
from tests.model.attention.helpers.flashinfer_planner import NUM_PROCESSORS, HostPlanner
from tests.model.helpers.pretend_device import HostTransfers
from tokasaurus.checkpoint import RopeInfo
from tokasaurus.messages.forward import ForwardInput, SlotChanges, SlotOpens
from tokasaurus.messages.generation import SAMPLING_DTYPE
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.model import buffer_sizes
from tokasaurus.model.attention import block_lists, flashinfer_backend
from tokasaurus.model.attention.backend import KVShape
from tokasaurus.model.decoder.decoder import build_decoder
from tokasaurus.model.execution import device_batch, executors
from tokasaurus.model.execution import runner as runner_module
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.execution.slot_table import DeviceSlots, SlotTable, SlotTableSize
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.sampling.finish import Finished
from tokasaurus.model.sampling.sample import Sampled

CPU = torch.device("cpu")
PAGE_SIZE, NUM_BLOCKS, CONTEXT = 16, 4000, 4096
HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB = 64, 32, 8, 64, 512
_NOTHING = np.zeros(0, np.int32)

launches = Counter[str]()


class _Count(TorchDispatchMode):
    """Counts operations of torch that a device would be given: views launch nothing."""

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        is_view = any(arg.alias_info is not None and not arg.alias_info.is_write for arg in function._schema.returns)
        if not is_view and not function._schema.name.startswith(("aten::empty", "aten::new_empty", "aten::alias")):
            launches[f"torch {function._schema.name}"] += 1
        return result


class _Graph:
    def replay(self) -> None:
        launches["graph"] += 1


class _Recorder:
    """Implements Recorder; records nothing."""

    preparing = staticmethod(nullcontext)

    def begin(self) -> None:
        pass

    def end(self) -> _Graph:
        return _Graph()

    def unowned(self, tensor: Tensor) -> Tensor:
        return tensor


def _kernel(name: str, *outputs: Any) -> Any:
    """In the place of a Triton kernel. outputs: make the results from the arguments."""

    def launch(*args: Any) -> Any:
        launches[name] += 1
        made = [output(*args) for output in outputs]
        return made[0] if len(made) == 1 else made or None

    return launch


def _rotated(heads: int) -> Any:
    return lambda features, *_: features.new_empty((len(features), heads, HEAD_DIM))


def without_kernels() -> None:
    """Every Triton kernel, gemm and sampling is counted in place of its launch."""
    attention = ModuleType("triton_kernels")
    for name in ("write_kv", "fill_lists", "merge_partial"):
        setattr(attention, name, _kernel(name))
    layers: Any = ModuleType("triton_layers")
    layers.add_norm = _kernel("add_norm", lambda hidden, *_: torch.empty_like(hidden))
    layers.silu_mul = _kernel("silu_mul", lambda gate_up: gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2)))
    poison = lambda features, *_: features.new_empty(len(features))  # noqa: E731
    layers.rotate_heads = _kernel(
        "rotate_heads", _rotated(NUM_HEADS), _rotated(NUM_KV_HEADS), _rotated(NUM_KV_HEADS), poison
    )
    sys.modules["tokasaurus.model.attention.triton_kernels"] = attention
    sys.modules["tokasaurus.model.decoder.triton_layers"] = layers
    inputs: Any = ModuleType("triton_inputs")
    inputs.fill_inputs = _kernel("fill_inputs")
    sys.modules["tokasaurus.model.execution.triton_inputs"] = inputs
    for module in (flashinfer_backend, block_lists, executors, device_batch, runner_module):
        module.uses_triton = lambda *_: True  # type: ignore[attr-defined]

    def linear(x: Tensor, weight: Tensor, _bias: Tensor | None = None) -> Tensor:
        launches["gemm"] += 1
        return x.new_empty((*x.shape[:-1], len(weight)))

    def sampled(logits: Tensor, *_: Any) -> Sampled:
        launches["sample"] += 1
        return Sampled(
            logits.new_zeros(len(logits), dtype=torch.int64), logits.new_zeros(len(logits), dtype=torch.float32)
        )

    def finished(given: Tensor, *_: Any, **__: Any) -> Finished:
        launches["finish"] += 1
        return Finished.allocate(len(given), given.device)

    def computed(name: str, shape_of: Any) -> Any:
        def call(x: Tensor, *_args: Any, **_options: Any) -> Tensor:
            launches[name] += 1
            return x.new_empty(shape_of(x))

        return call

    functional: Any = torch.nn.functional
    functional.linear = linear
    # This CPU takes longer for these two than a launch.
    functional.rms_norm = computed("rms_norm", lambda x: x.shape)
    torch.linalg.vector_norm = computed("vector_norm", lambda x: x.shape[:-1])
    runner: Any = runner_module
    runner.sample = sampled
    runner.draw_and_finish = runner.finish = finished


def make_runner(flashinfer: Any, num_layers: int, max_rows: int) -> ModelRunner:
    rope = RopeInfo(theta=10000.0)
    info = plain_info(
        *("llama", num_layers, HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, 2 * HIDDEN, VOCAB, CONTEXT, 1e-5, rope),
        tie_embeddings=True,
        eos_ids=(),
        dtype="bfloat16",
    )
    model = build_decoder(info, Mesh(), torch.bfloat16)
    model.materialize(CPU, CONTEXT)
    shape = KVShape(num_layers, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, torch.bfloat16, CPU, torch.bfloat16)
    backend = flashinfer_backend.FlashInferBackend(shape, flashinfer, max_graph_rows=max_rows)
    backend.prepare_calls()
    backend.allocate(NUM_BLOCKS + 1)
    slots = SlotTable(SlotTableSize(max_rows + 3, CONTEXT // PAGE_SIZE), CPU)
    slots.on_device = DeviceSlots(max_rows + 3, CONTEXT // PAGE_SIZE, CPU)
    slots.rules.allocate((NUM_BLOCKS + 1) * PAGE_SIZE)
    sizes = buffer_sizes.sizes_for(8192, max_rows, VOCAB, 0)
    transfers = HostTransfers()
    return ModelRunner(model, backend, slots, PAGE_SIZE, CPU, None, transfers=transfers, buffer_sizes=sizes)


def steps(num_rows: int, chunk: int) -> tuple[ForwardInput, ForwardInput]:
    """One step that opens the slots, and one to be run again and again: decode rows, and the next `chunk` tokens of a
    long prompt."""
    slots = np.arange(1, num_rows + 1 + bool(chunk), dtype=np.int32)
    lengths = np.full(len(slots), 200, np.int32)
    prompts = lengths.copy()
    if chunk:
        prompts[-1] = CONTEXT
    blocks_of = np.full(len(slots), 20)
    if chunk:
        blocks_of[-1] = CONTEXT // PAGE_SIZE
    opened = SlotOpens(
        slots=slots,
        num_prompt_tokens=prompts,
        first_positions=lengths - 1,
        sampling=np.array([SamplingParams(temperature=1.0)] * len(slots), SAMPLING_DTYPE),
        seeds=np.zeros(len(slots), np.uint64),
        sample_indices=np.zeros(len(slots), np.uint32),
        want_logprobs=np.zeros(len(slots), np.bool_),
    )
    block_slots = np.repeat(slots, blocks_of)
    changes = SlotChanges(slots, opened, block_slots, 1 + np.arange(len(block_slots), dtype=np.int32) % NUM_BLOCKS)
    ones = np.ones(len(slots), np.int32)
    opening = ForwardInput(0, slots, ones, 0, np.zeros(len(slots), np.int32), changes)
    counts = ones.copy()
    if chunk:
        counts[-1] = chunk
    nothing = SlotChanges(_NOTHING, None, _NOTHING, _NOTHING)
    return opening, ForwardInput(0, slots, counts, num_rows, np.zeros(chunk, np.int32), nothing)


@contextmanager
def _plain_positions(runner: ModelRunner) -> Iterator[None]:
    """The step inside can be run again: slots move on in it."""
    before = runner._slots.positions.copy()
    yield
    runner._slots.positions[:] = before


def measure(runner: ModelRunner, num_rows: int, chunk: int, num_steps: int) -> dict[str, Any]:
    opening, step = steps(num_rows, chunk)
    runner.run(opening)
    times_s = []
    for _ in range(num_steps):
        with _plain_positions(runner):
            began_s = time.thread_time()
            runner.run(step)
            times_s.append(time.thread_time() - began_s)
    launches.clear()
    with _plain_positions(runner), _Count():
        runner.run(step)
    counted = dict(launches)
    return {"host_us": round(1e6 * statistics.quantiles(times_s, n=10)[0]), "launches": counted}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("package")
    parser.add_argument("needs")
    parser.add_argument("--num-layers", type=int, default=16)
    parser.add_argument("--num-steps", type=int, default=300)
    args = parser.parse_args()
    sys.path[:0] = [args.package, args.needs]
    import flashinfer

    flashinfer_real.without_a_device()
    torch.set_num_threads(1)
    real_bytes = buffer_sizes.workspace_bytes
    backend: Any = flashinfer_backend
    backend.workspace_bytes = lambda shape, _number, *others, **named: real_bytes(
        shape, NUM_PROCESSORS, *others, **named
    )
    with tempfile.TemporaryDirectory() as directory:
        planner = HostPlanner(Path(args.package), Path(directory))
        flashinfer_real.stub_modules(flashinfer, planner, on_run=_kernel("attention"))
        without_kernels()
        found: dict[str, Any] = {}
        runner = make_runner(flashinfer, args.num_layers, max_rows=128)
        problems = {"decode": (100, 0), "mixed": (100, 300)}
        for name, problem in problems.items():
            found[f"{name}, launched"] = measure(runner, *problem, args.num_steps)
        runner.record_graphs(_Recorder(), [128, 112], chunk_sizes=[512, 416])
        for name, problem in problems.items():
            found[f"{name}, graphs"] = measure(runner, *problem, args.num_steps)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
