"""Compiled layers or our Triton kernels, whichever is faster on this device: a start on CUDA times both.

It depends on the model, the device and the compiler's version, and nothing but a measurement tells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from tokasaurus.model.decoder.decoder import Decoder, LayerExecutor
from tokasaurus.model.execution.executors import CompiledExecutor, FusedExecutor
from tokasaurus.model.execution.graphs import no_attention
from tokasaurus.model.parallel.collectives import least_of_ranks
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.device import make_stopwatch
from tokasaurus.model.worker.self_check import first_hidden, measure_layers

if TYPE_CHECKING:
    from tokasaurus.model.worker.start import Start

_NUM_TOKENS = (64, 1024)
"""Tokens of the forwards that are timed: of a decode step, and of one with a prompt."""

_NUM_ROUNDS = 3
"""Forwards of each way after the first one, in turns; the shortest counts."""

_MARGIN = 0.02
"""Our kernels are taken if they are faster by more than this: else starts of one server might choose differently, and
the two round differently."""


def check_layers(start: Start, flag: str | None = None) -> bool:
    """Whether all layers, compiled or not, compute what torch's modules do. flag: as in Checks.passes."""
    measure = partial(
        measure_layers,
        *(start.runner.executor, start.model, start.backend, start.shape, start.mesh, start.compiler),
        *(start.runner.token_multiple, start.limits.context_length),
    )
    if start.compiler is None:
        return start.checks.describe_wrong("layers", measure) is None
    what, without = "torch_compile is", "the layers run uncompiled, which is slower"
    return start.checks.passes("torch_compile", measure, what, without, flag)


def compile_layers(start: Start) -> str:
    """Compile the layers; switch the compiler off if it fails, which it logs itself, or if they compute wrongly. Unless
    they are asked for, our kernels compute the layers where they are faster; both have been checked then."""
    compiler, executor, is_asked_for = start.compiler, start.runner.executor, start.config.torch_compile
    assert compiler is not None
    if not check_layers(start, "torch_compile=T" if is_asked_for else None):
        compiler.switch_off()
    elif not start.least(int(not compiler.has_failed)):  # all ranks time their layers, or none
        compiler.switch_off()
        start.checks.leave_out("torch_compile", "it does not compile here")
    elif not is_asked_for and isinstance(executor, CompiledExecutor) and isinstance(executor.plain, FusedExecutor):
        times = time_layers(executor, executor.plain, start.model, start.mesh, start.limits.max_tokens)
        executor.is_slower = takes_own_kernels(times)
        return describe_choice(times)
    return ""


class LayerTimes(NamedTuple):
    """Seconds of all layers of a stage, without attention: on the slowest rank, by the device's clock."""

    num_tokens: int
    compiled_s: float
    own_s: float


def takes_own_kernels(times: Sequence[LayerTimes]) -> bool:
    """Whether our kernels are faster, in the geometric mean of all sizes."""
    return math.prod(one.own_s / one.compiled_s for one in times) ** (1 / len(times)) < 1 - _MARGIN


def describe_choice(times: Sequence[LayerTimes]) -> str:
    """One line for the user."""
    takes_own = takes_own_kernels(times)
    compared = " and ".join(
        f"{own * 1e3:.3g} ms with own kernels, {compiled * 1e3:.3g} compiled ({tokens:,} tokens)"
        for tokens, compiled, own in times
    )
    return f"{'own kernels' if takes_own else 'compiled'}: the layers take {compared}"


@torch.inference_mode()
def time_layers(
    compiled: LayerExecutor, own: LayerExecutor, model: Decoder, mesh: Mesh, max_tokens: int
) -> list[LayerTimes]:
    """Times of both, the same on every rank. All ranks must call it, after both have run once. max_tokens: of a
    forward."""
    stopwatch = make_stopwatch(model.device)
    times = []
    for num_tokens in dict.fromkeys(min(count, max_tokens) for count in _NUM_TOKENS):
        positions = torch.zeros(num_tokens, dtype=torch.int64, device=model.device)
        cos_sin = model.rotary.at(positions)
        shortest = [math.inf, math.inf]
        for round_index in range(1 + _NUM_ROUNDS):
            for way, executor in enumerate((compiled, own)):
                hidden = first_hidden(num_tokens, model, seed=0)
                seconds = stopwatch.seconds(lambda: executor.run(hidden, cos_sin, no_attention))  # noqa: B023
                if round_index:
                    shortest[way] = min(shortest[way], seconds)
        on_slowest = (-least_of_ranks(-math.ceil(seconds * 1e9), mesh, model.device) / 1e9 for seconds in shortest)
        times.append(LayerTimes(num_tokens, *on_slowest))
    return times
