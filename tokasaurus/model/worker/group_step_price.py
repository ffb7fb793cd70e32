"""Measure what a decode step with prefix groups takes more than one without, whatever its attention saves.

With CUDA graphs, a step without groups replays one graph. A step with groups replays a piece for each layer, and the
host launches attention between them: one after another, where the device may have to wait for the host.
"""

import statistics
import time
from dataclasses import replace

import numpy as np
import torch

from tokasaurus.messages.forward import ForwardInput, PrefixGroups
from tokasaurus.messages.status import HydragenCosts
from tokasaurus.model.attention.backend import AttentionBackend, KVShape
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.worker.hydragen_costs import seconds_per_token
from tokasaurus.model.worker.warmup import ForwardLimits, decode_after, rows_after_a_block

_NUM_ROUNDS = 7
_NUM_STEPS = 4
"""Steps of a run, each launched before the results of the one before it are read, as in service."""


def with_step_price(
    costs: HydragenCosts,
    runner: ModelRunner,
    backend: AttentionBackend,
    shape: KVShape,
    num_blocks: int,
    limits: ForwardLimits,
    num_layers: int,
    details: list[str],
) -> HydragenCosts:
    """The costs with per_step as it is measured; as they are without CUDA graphs.

    num_blocks: as for measure_costs. num_layers: of all pipeline stages, since a step's time is that of all of them.
    details: gets a text for the user if there is a price.
    """
    seconds = measure_step_price(runner, limits, shape.page_size)
    if seconds == 0:
        return costs
    token_seconds = seconds_per_token(backend, shape, num_blocks, limits.max_seqs)
    if token_seconds is None:
        return costs
    num_tokens = seconds / (token_seconds * num_layers)
    details.append(f"a decode step with groups takes {seconds * 1e3:.2g} ms more ({num_tokens:,.0f} tokens)")
    return replace(costs, per_step=num_tokens)


def measure_step_price(runner: ModelRunner, limits: ForwardLimits, page_size: int) -> float:
    """Seconds by which a decode step takes longer if two of its rows share a block; 0 without CUDA graphs.

    Measured where it is greatest: with few rows and short contexts, and attention in three calls a layer (the prefix,
    the grouped rows, the other rows). Where the device computes for longer, that hides launches of the host. All ranks
    run the same steps. Leaves slots open, as `warm_up` does.
    """
    if not runner.graph_sizes:
        return 0.0
    num_rows = min(runner.graph_sizes[0], limits.max_seqs, limits.max_tokens)
    if num_rows < 2 or limits.context_length < page_size + 1 + _NUM_STEPS:
        return 0.0  # no step can have such a group
    opening = rows_after_a_block(num_rows, limits, page_size)
    alone = decode_after(opening)
    grouped = replace(alone, groups=PrefixGroups(np.array([2], np.int32), np.ones(1, np.int32)))
    differences = []
    for round_index in range(1 + _NUM_ROUNDS):
        alone_s, grouped_s = (_seconds_per_step(runner, opening, step) for step in (alone, grouped))
        if round_index:  # the first one creates and loads what steps keep
            differences.append(grouped_s - alone_s)
    return max(0.0, statistics.median(differences))


def _seconds_per_step(runner: ModelRunner, opening: ForwardInput, step: ForwardInput) -> float:
    runner.run(opening)
    _wait_for_device(runner.device)
    began_s = time.perf_counter()
    before = None
    for _ in range(_NUM_STEPS):
        result = runner.run(step)
        if before is not None:
            before.host_token_ids()
        before = result
    _wait_for_device(runner.device)
    return (time.perf_counter() - began_s) / _NUM_STEPS


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
