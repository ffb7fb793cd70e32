"""Variants of Triton's kernels that steps launch and the warm-up before did not. Run as a module, which prints them.

Triton compiles a kernel anew for other constants, dtypes, and for pointers and numbers with other divisors: its own
rules, repeated here because its interpreter, which runs the kernels, compiles nothing.

A process of its own: the variable TRITON_INTERPRET must be set before anything imports Triton, and then holds for all.
"""

import collections
import os
import tempfile
import unittest.mock
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import torch.distributed
from triton.runtime.interpreter import InterpretedFunction

from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model
from tests.model.helpers import steps
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.prefix_samples import Samples
from tests.model.helpers.pretend_device import HostTransfers
from tests.model.helpers.rule_contexts import ALWAYS, Rule, make_rules
from tests.model.helpers.sampling_rows import make_masks
from tests.model.helpers.steps import StepDriver, make_runner
from tokasaurus.model import buffer_sizes
from tokasaurus.model.attention import torch_backend
from tokasaurus.model.decoder import adapters, triton_low_rank
from tokasaurus.model.decoder.adapters import ModelAdapters
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.parallel import collectives
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.sampling import sample
from tokasaurus.model.worker import warmup

PAGE_SIZE = 16
LIMITS = warmup.ForwardLimits(max_tokens=32, max_seqs=6, context_length=128, vocab_size=VOCAB_SIZE, has_adapters=True)
RULED_ROWS_AT_ONCE = 3
"""So few that steps need several calls."""

TILE_KERNELS = "_shrink_tile", "_expand_tile"

Variant = tuple[Any, ...]


class Launches:
    """Remembers the variant of every launch."""

    def __init__(self) -> None:
        self.variants: set[Variant] = set()
        self._run = InterpretedFunction.run

    def run(self, kernel: Any, *arguments: Any, **options: Any) -> object:
        free = kernel.kwargs.get("do_not_specialize") or []
        constants = {name: value for name, value in options.items() if name not in ("grid", "warmup")}
        positional = zip(kernel.arg_names, arguments, strict=False)
        kinds = tuple((name, _kind(value, name in free)) for name, value in positional)
        self.variants.add((kernel.__name__, kinds, tuple(sorted(constants.items()))))
        return self._run(kernel, *arguments, **options)


def _kind(value: Any, is_free: bool) -> object:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    assert isinstance(value, int)
    width = 32 if -(2**31) <= value < 2**31 else 64
    return (width,) if is_free else (width, value == 1, value % 16 == 0)


def run_steps(runner: ModelRunner) -> None:
    """Steps with random options of every kind, in chunks beside decode rows; then samples in prefix groups."""
    rng = np.random.default_rng(0)
    for _ in range(6):
        driver = StepDriver(runner, PAGE_SIZE)
        share = rng.choice([0.0, 0.4, 1.0])  # of slots with an option
        num_slots = int(rng.integers(1, 9))
        for slot in range(1, num_slots + 1):
            options: dict[str, Any] = {"temperature": float(rng.choice([0.0, 1.0])), "adapter": slot % 3}
            if rng.random() < share:
                biases = ((7, 3.0, ALWAYS),) * int(rng.integers(0, 3))
                options |= {"rules": make_rules({slot: Rule(2, biases=biases)}), "presence_penalty": 0.5}
            if rng.random() < share:
                options["num_top"] = int(rng.integers(1, 21))
            if rng.random() < share:
                options["num_prompt_top"] = 2
            driver.open(slot, rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 30))).tolist(), **options)
        decoding: list[int] = []
        for slot in range(1, num_slots + 1):
            while (left := driver.remaining(slot)) > 0:
                driver.run(decoding, [(slot, min(left, int(rng.integers(1, 20))))])
            decoding.append(slot)
            masks = None
            if rng.random() < share:
                some = rng.permutation(len(decoding))[: int(rng.integers(1, 4))]
                masks = make_masks({int(row): np.arange(VOCAB_SIZE) % 3 == 1 for row in sorted(some)})
            driver.run(decoding, [], masks=masks)
    driver = StepDriver(runner, PAGE_SIZE)
    driver.open(1, [1, 2, 3], temperature=1.0, num_top=5)  # alone: ranks then search their parts of the vocabulary
    driver.run([], [(1, 3)])
    samples = Samples(StepDriver(runner, PAGE_SIZE), PAGE_SIZE, seed=3)
    samples.run(3, grouped=True)
    assert samples.num_grouped > 0


@contextmanager
def a_rank_alone() -> Iterator[Mesh]:
    """A mesh of two ranks, of which the first runs: it gets what it sends. The sizes are right, the numbers are not."""

    def exchange(received: torch.Tensor, own: torch.Tensor, *_: Any, **__: Any) -> None:
        flat = own.flatten()
        received.view(-1).copy_(flat.repeat(-(-received.numel() // max(1, len(flat))))[: received.numel()])

    with (
        unittest.mock.patch.object(torch.distributed, "all_reduce"),
        unittest.mock.patch.object(torch.distributed, "all_to_all_single", exchange),
        unittest.mock.patch.object(torch.distributed, collectives.GATHER, exchange),
    ):
        yield Mesh(tp_size=2)


def missing_variants(mesh: Mesh) -> list[Variant]:
    with tempfile.TemporaryDirectory() as directory:
        save_tiny_model(Path(directory), "llama")
        model, info = load(Path(directory), mesh)
    launches = Launches()
    with (
        unittest.mock.patch.object(
            InterpretedFunction, "run", lambda kernel, *args, **kw: launches.run(kernel, *args, **kw)
        ),
        unittest.mock.patch.object(steps, "load_kernels", return_value=None),
        unittest.mock.patch.object(sample, "uses_triton", return_value=True),
        unittest.mock.patch.object(torch_backend, "uses_triton", return_value=True),
        unittest.mock.patch.object(adapters, "uses_triton", return_value=True),
        unittest.mock.patch.object(triton_low_rank, "_FEW_ROWS", LIMITS.max_tokens // 2),
        # Others are slow in the interpreter, and have no variants of their own. With any, ranks sample whole rows.
        unittest.mock.patch.object(warmup, "LIMITS", ("min_p",)),
        unittest.mock.patch.object(buffer_sizes, "_SCRATCH_BYTES", 8 * VOCAB_SIZE * RULED_ROWS_AT_ONCE),
    ):
        own = ModelAdapters(model, 2, max_rank=16, max_tokens=LIMITS.max_tokens)
        own.load("random", own.random_share(4))
        own.place(2, "random")
        runner = make_runner(model, info, "torch", PAGE_SIZE, transfers=HostTransfers(), mesh=mesh, adapters=own)
        warmup.warm_up(runner, LIMITS, PAGE_SIZE, is_context_costly=True)
        known = set(launches.variants)
        launches.variants.clear()
        run_steps(runner)
    counts = collections.Counter(name for name, *_ in launches.variants)
    tiles = {(name, dict(constants)["ROWS"]) for name, _, constants in launches.variants if name in TILE_KERNELS}
    assert tiles == {(name, rows) for name in TILE_KERNELS for rows in (16, 64)}, "of few rows and of many"
    for name in TILE_KERNELS:
        del counts[name]
    for name in ("_find_least", "_draw_part"):
        # Ranks sample rows without any option from their part of the vocabulary.
        num_variants = counts.pop(name)
        assert num_variants == 4 + (mesh.tp_size > 1), "with and without rules, with and without masks"
    assert set(counts) == {
        *("_count_tokens", "_add_biases", "_change_rows", "_largest_of_parts", "_largest_of_candidates"),
        *("_write_token", "_merge_rows", "_merge_row", "_finish_row"),
    }
    return sorted(launches.variants - known, key=repr)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for variant in missing_variants(Mesh()):
        print(*variant)
    with a_rank_alone() as rank:
        for variant in missing_variants(rank):
            print("a rank:", *variant)
    print("done")
