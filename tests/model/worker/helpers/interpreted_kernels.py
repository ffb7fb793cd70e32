"""The checks of the Triton kernels, one by one and in a start, in Triton's interpreter. Run as a module.

A process of its own: the variable TRITON_INTERPRET must be set before anything imports Triton, and then holds for all.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import contextlib
import dataclasses
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.helpers.tiny_model import FAMILIES, VOCAB_SIZE, save_tiny_model
from tests.model.attention.helpers.kernel_checks import unfilled_lists
from tests.model.execution.helpers.input_checks import check_inputs
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.sampling_rows import make_rows, noise_keys
from tokasaurus.config import ServerConfig
from tokasaurus.model import triton_choice
from tokasaurus.model.attention import block_lists, torch_backend, triton_kernels
from tokasaurus.model.attention.backend import KVShape
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.decoder import adapters, triton_layers, triton_low_rank
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.execution import device_batch, executors, triton_inputs
from tokasaurus.model.execution.executors import FusedExecutor, ModuleExecutor
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.sampling import sample, triton_rows, triton_sample
from tokasaurus.model.worker import attention_choice, kernel_checks, self_check
from tokasaurus.model.worker.self_check import Checks

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
uses_triton = triton_choice.uses_triton
GROUPS: tuple[triton_choice.KernelGroup, ...] = ("attention", "sampling", "layers", "steps", "adapters")

Kernel = Callable[..., Any]


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.lines.append(record.getMessage())


@contextlib.contextmanager
def on_pretended_cuda(*off: str) -> Iterator[None]:
    """The modules ask for the groups as if their tensors were on CUDA. off: groups that are switched off."""

    def uses(_device: torch.device, group: triton_choice.KernelGroup) -> bool:
        return uses_triton(CUDA, group)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(triton_choice, "_switched_off", set(off)))
        used = kernel_checks, torch_backend, block_lists, sample, executors, device_batch, adapters
        for module in (triton_choice, *used):
            stack.enter_context(patch.object(module, "uses_triton", uses))
        yield


def check(
    model: Decoder,
    shape: KVShape,
    all_agree: Callable[[bool], bool] = lambda works: works,
    run: Callable[[KVShape, Decoder, Checks], object] = kernel_checks.check_each_kernel,
) -> list[str]:
    """The warnings."""
    handler, checks = Lines(), Checks(all_agree, is_thorough=True)
    self_check.logger.addHandler(handler)
    try:
        run(shape, model, checks)
    finally:
        self_check.logger.removeHandler(handler)
    assert len(checks.switched_off) == len(handler.lines)
    return handler.lines


def check_as_a_start(shape: KVShape, model: Decoder, checks: Checks) -> None:
    backend = attention_choice.choose_backend(ServerConfig.parse([]), shape, None, 0, checks)
    limits = SimpleNamespace(context_length=64)
    config, info = ServerConfig.parse(["max_loras=2"]), SimpleNamespace(is_native=True)
    start: Any = SimpleNamespace(
        **{"model": model, "decoder": model, "shape": shape, "backend": backend, "mesh": Mesh(), "limits": limits},
        **{"device": shape.device, "checks": checks, "config": config, "info": info},
    )
    kernel_checks.check_triton(start)


def left() -> set[str]:
    return {group for group in GROUPS if uses_triton(CUDA, group)}


def use_every_group(model: Decoder) -> set[str]:
    """Which Triton kernels of OF_GROUP were used by attention, sampling and layers."""
    used: set[str] = set()

    def noted(module: Any, name: str) -> Any:
        kernel: Kernel = getattr(module, name)

        def call(*arguments: Any) -> Any:
            used.add(name)
            return kernel(*arguments)

        return patch.object(module, name, call)

    with (
        noted(triton_kernels, "merge_partial"),
        noted(triton_kernels, "fill_lists"),
        noted(triton_sample, "draw"),
        noted(triton_inputs, "fill_inputs"),
    ):
        backend = make_backend("torch", KVShape(1, 2, 1, 16, 16, torch.float32, CPU), None)
        part = torch.ones(1, 2, 16), torch.zeros(1, 2)
        assert torch.equal(backend.merge(part, part, torch.empty(1, 2, 16)), part[0])
        lists = unfilled_lists(torch.tensor([0, 2]), torch.tensor([17], dtype=torch.int32), CPU)
        block_lists.fill_lists(torch.tensor([[7, 8, 9]], dtype=torch.int32), torch.tensor([1]), 16, lists)
        assert lists.blocks.tolist() == [8, 9]
        rows = make_rows([0.0], [1.0], noise_keys([1], [0], [5]))
        assert sample.sample(torch.tensor([[1.0, 3.0, 2.0]]), rows, None).tokens.tolist() == [1]
        check_inputs(0, CPU, num_rows=3, page_size=4, fill=device_batch.fill_inputs)
    executor = executors.choose_executor(model, None)  # type: ignore[arg-type]
    assert isinstance(executor, (FusedExecutor, ModuleExecutor))
    if isinstance(executor, FusedExecutor):
        used.add("layers")
    if adapters.ModelAdapters(model, 1, max_rank=4, max_tokens=8).in_graphs:
        used.add("adapters")
    return used


OF_GROUP = {
    "attention": {"merge_partial", "fill_lists"},
    "sampling": {"draw"},
    "layers": {"layers"},
    "steps": {"fill_inputs"},
    "adapters": {"adapters"},
}


def wrong_kernels() -> Iterator[tuple[triton_choice.KernelGroup, Any, str, Kernel]]:
    """(group, module, name, a kernel in its place) of one fault each."""

    def raises(*_: Any) -> Any:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable")

    def changed(module: Any, name: str, change: Callable[[Any], Any]) -> Kernel:
        kernel: Kernel = getattr(module, name)
        return lambda *arguments: change(kernel(*arguments))

    def other_first(count: int, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Change one of the results."""
        return lambda results: tuple(change(x) if i == count else x for i, x in enumerate(results))

    def write_double(keys: Tensor, values: Tensor, key: Tensor, *others: Any) -> None:
        original_write(keys, values, key * 2, *others)

    def write_values_nowhere(keys: Tensor, values: Tensor, *others: Any) -> None:
        original_write(keys, torch.empty_strided(values.shape, values.stride()), *others)

    def write_padding(keys: Tensor, values: Tensor, *others: Any) -> None:
        original_write(keys, values, *others)
        keys[0] = 1

    def fill_other_blocks(*arguments: Any) -> None:
        original_fill(*arguments)
        arguments[-1].blocks[0] += 1

    def merge_elsewhere(first: Any, second: Any, output: Tensor, *others: Any) -> Tensor:
        return original_merge(first, second, torch.empty_like(output), *others)

    def merge_naturally(first: Any, second: Any, output: Tensor, *_: Any) -> Tensor:
        return original_merge(first, second, output)

    def without_masks(*arguments: Any) -> Any:
        draw: Any = original_draw
        return draw(*arguments[:-1], None)

    def fill_other_tokens(staged: Any, slots: Any, *others: Any) -> None:
        original_inputs(staged, slots._replace(last_tokens=slots.last_tokens + 1), *others)

    def without_lists(*arguments: Any) -> None:
        original_inputs(*arguments[:-1], None)

    def finish_elsewhere(*arguments: Any) -> Any:
        return original_finish(*arguments[:-1], arguments[-1].clone())

    def add_nothing(*_: Tensor) -> None:
        pass

    def add_first_tile(out: Tensor, x: Tensor, order: Tensor, tiles: Tensor, *others: Tensor) -> None:
        original_add(out, x, order, tiles * (torch.arange(len(tiles)) < 3), *others)

    def add_first_part(*arguments: Tensor) -> None:
        original_add(*arguments[:-1], arguments[-1][:1])

    original_add: Any = triton_low_rank.add_low_rank
    original_finish: Any = triton_sample.finish
    original_inputs: Any = triton_inputs.fill_inputs
    original_write, original_fill = triton_kernels.write_kv, triton_kernels.fill_lists
    original_merge = triton_kernels.merge_partial
    attention, sampling, layers, steps, low_rank = GROUPS
    for name in ("write_kv", "merge_partial", "count_sinks", "fill_lists"):
        yield attention, triton_kernels, name, raises
    yield attention, triton_kernels, "count_sinks", lambda output, *_: output.mul_(0.9)
    for wrong in (write_double, write_values_nowhere, write_padding):
        yield attention, triton_kernels, "write_kv", wrong
    yield attention, triton_kernels, "fill_lists", fill_other_blocks
    yield attention, triton_kernels, "merge_partial", lambda first, _second, output, *_: output.copy_(first[0])
    yield (
        attention,
        triton_kernels,
        "merge_partial",
        changed(triton_kernels, "merge_partial", lambda x: x.mul_(torch.nan)),
    )
    yield attention, triton_kernels, "merge_partial", merge_elsewhere
    yield attention, triton_kernels, "merge_partial", merge_naturally
    for module, name in ((triton_sample, "draw"), (triton_rows, "changed_rows"), (triton_sample, "largest_logits")):
        yield sampling, module, name, raises
    for result, change in ((0, torch.zeros_like), (1, lambda x: x + 0.1), (2, lambda x: x * 1.01)):
        yield sampling, triton_sample, "draw", changed(triton_sample, "draw", other_first(result, change))
    for result, change in ((0, lambda x: x.flip(1)), (1, lambda x: x + 0.1)):
        wrong = changed(triton_sample, "largest_logits", other_first(result, change))
        yield sampling, triton_sample, "largest_logits", wrong
    yield (
        sampling,
        triton_rows,
        "changed_rows",
        lambda logits, rules, own, _: logits[rules.rows.on_device[own]].float(),
    )
    yield sampling, triton_sample, "draw", without_masks
    for name in ("draw_and_finish", "finish"):
        yield sampling, triton_sample, name, raises
        yield sampling, triton_sample, name, changed(triton_sample, name, lambda x: x._replace(packed=x.packed * 2))
    yield sampling, triton_sample, "finish", finish_elsewhere
    for name in ("add_norm", "rotate_heads", "silu_mul"):
        yield layers, triton_layers, name, raises
    yield layers, triton_layers, "add_norm", changed(triton_layers, "add_norm", lambda x: x * 1.01)
    yield layers, triton_layers, "silu_mul", changed(triton_layers, "silu_mul", torch.sigmoid)
    for result in range(4):
        wrong = changed(triton_layers, "rotate_heads", other_first(result, torch.ones_like))
        yield layers, triton_layers, "rotate_heads", wrong
    yield steps, triton_inputs, "fill_inputs", raises
    yield steps, triton_inputs, "fill_inputs", without_lists
    yield steps, triton_inputs, "fill_inputs", fill_other_tokens
    for wrong_add in (raises, add_nothing, add_first_tile, add_first_part):
        yield low_rank, triton_low_rank, "add_low_rank", wrong_add


original_draw = triton_sample.draw


IN_A_START = {
    *(("write_kv", "write_double"), ("merge_partial", "merge_elsewhere"), ("write_kv", "raises")),
    *(("draw", "raises"), ("add_norm", "raises"), ("silu_mul", "<lambda>"), ("add_low_rank", "add_nothing")),
}
"""Names of kernels, and of what is in their place."""


def check_is_found(
    model: Decoder, shape: KVShape, group: triton_choice.KernelGroup, module: Any, kernel_name: str, wrong: Kernel
) -> None:
    """With `wrong` in a kernel's place, its group alone is switched off, with one line, and then not used. Of each
    kernel that takes part in what a start checks, the start finds one fault too; it takes long in the interpreter."""
    off = {"sampling", "adapters"} - {group}
    is_in_start = (kernel_name, wrong.__name__) in IN_A_START
    for run in (kernel_checks.check_each_kernel, check_as_a_start)[: 1 + is_in_start]:
        check_is_found_by(run, off, model, shape, group, module, kernel_name, wrong)


def check_is_found_by(
    run: Callable[[KVShape, Decoder, Checks], object],
    off: set[str],
    model: Decoder,
    shape: KVShape,
    group: triton_choice.KernelGroup,
    module: Any,
    kernel_name: str,
    wrong: Kernel,
) -> None:
    with on_pretended_cuda(*off):
        with patch.object(module, kernel_name, wrong):
            lines = check(model, shape, run=run)
        assert left() == {*GROUPS} - {group} - off, (kernel_name, lines)
        (line,) = lines
        assert line.startswith(f"the Triton kernels of {group} are switched off: "), line
        assert line.endswith("Triton needs a C compiler")
        assert "\n" not in line
        assert ("RuntimeError: Failed to find C compiler.;" in line) == (wrong.__name__ == "raises"), line
        assert use_every_group(model) == set().union(*(OF_GROUP[other] for other in left()))


def main() -> None:
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        for family in FAMILIES:
            (directory := Path(name) / family).mkdir()
            save_tiny_model(directory, family)
            model, info = load(directory)
            heads = info.num_heads, info.num_kv_heads, info.head_dim
            for dtype, page_size in ((torch.float32, 16), (torch.float16, 1), (torch.bfloat16, 256)):
                shape = KVShape(info.num_layers, *heads, page_size, dtype, CPU, activation_dtype=torch.float32)
                off = set() if dtype == torch.float32 else {"sampling", "adapters"}  # slow, and alike
                with on_pretended_cuda(*off):
                    assert (lines := check(model, shape)) == [], lines
                    assert left() == {*GROUPS} - off
        bfloat16 = KVShape(2, 9, 3, 80, 16, torch.bfloat16, CPU)
        for case in (
            kernel_checks.compare_attention(bfloat16),
            kernel_checks.compare_sampling(2500, torch.bfloat16, CPU, sample.sample_by_triton),
        ):
            for measured in case:
                assert measured.is_right, measured

        assert model.vocab_size == VOCAB_SIZE
        shape = dataclasses.replace(shape, dtype=torch.float32, page_size=16)
        with on_pretended_cuda():
            assert (lines := check(model, shape, run=check_as_a_start)) == [], lines
            assert use_every_group(model) == set().union(*OF_GROUP.values())
        for fault in wrong_kernels():
            check_is_found(model, shape, *fault)
        answers: list[bool] = []

        def disagree(works: bool) -> bool:
            answers.append(works)
            return False

        with on_pretended_cuda():
            lines = check(model, shape, all_agree=disagree)
            assert answers == [True] * len(GROUPS)
            assert all("it fails on another rank" in line for line in lines)
            assert len(lines) == len(GROUPS)
            assert left() == set()
            assert check(model, shape) == [], "what is off is not checked again"
    print("all found")


if __name__ == "__main__":
    main()
