"""What decode steps launch and where their time goes: a process that prints a line of JSON for each number of rows.

python -m benchmarks.gpu.profile_steps DIRECTORY --rows 1 64 1024 [--context 512] [--traces DIRECTORY] [server's flags]

It starts a worker by the server's own code, without a server, and runs decode steps as the worker's loop does: one step
is launched while the one before it computes. torch's profiler then records some of them. The keys and values of the
contexts are zeros. Afterwards it does the same with steps of the same rows as one prefix group over whole contexts, and
with steps of the rows beside a prompt of some tokens, a new one in each step.
"""

import argparse
import gzip
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile

from tokasaurus.checkpoint import resolve_checkpoint
from tokasaurus.config import ServerConfig
from tokasaurus.messages.forward import ForwardInput, PrefixGroups, SlotChanges, SlotOpens
from tokasaurus.messages.generation import SAMPLING_DTYPE
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.messages.status import PhaseDone
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.entry import start_worker
from tokasaurus.monitoring.log_writer import log_writer, setup_logging

_NUM_WARM, _NUM_TIMED, _NUM_PROFILED = 4, 32, 8
_NUM_STEPS = 2 + 3 * (_NUM_WARM + _NUM_TIMED + 1 + _NUM_PROFILED)
NUM_LONGEST = 10
"""Kernels that are shown, those that take most time."""
_NUM_GAPS = 5
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("cuda_runtime", "cuda_driver")
_NOTHING = np.zeros(0, np.int32)


class Event(NamedTuple):
    """Of a trace. Times are in microseconds."""

    name: str
    began_us: float
    ended_us: float


def summarize(trace_events: Iterable[dict[str, Any]], num_steps: int, num_layers: int) -> dict[str, Any]:
    """Of the events of a trace as torch writes it, for each of its steps.

    Where no device took part, the operations of torch that call no other are counted as its kernels."""
    by_category: dict[str, list[dict[str, Any]]] = {}
    for event in trace_events:
        if event.get("ph") == "X":
            by_category.setdefault(event.get("cat", ""), []).append(event)
    kernels = [_event(event) for category in _DEVICE for event in by_category.get(category, ())]
    is_on_device = bool(kernels)
    if not is_on_device:
        kernels = _leaves(by_category.get("cpu_op", ()))
    if not kernels:
        raise ValueError("the trace has no kernels and no operations")
    kernels.sort(key=lambda kernel: kernel.began_us)
    launches: dict[str, int] = {}
    for event in (event for category in _RUNTIME for event in by_category.get(category, ())):
        if any(word in event["name"] for word in ("Launch", "Memcpy", "Memset")):
            launches[event["name"]] = launches.get(event["name"], 0) + 1
    times_us: dict[str, list[float]] = {}
    for kernel in kernels:
        times_us.setdefault(kernel.name, []).append(kernel.ended_us - kernel.began_us)
    total_us = sum(map(sum, times_us.values()))
    longest = sorted(times_us.items(), key=lambda item: -sum(item[1]))[:NUM_LONGEST]
    busy_us, gaps = _gaps(kernels)
    window_us = max(kernel.ended_us for kernel in kernels) - kernels[0].began_us
    return {
        "is_on_device": is_on_device,
        "kernels_per_step": len(kernels) / num_steps,
        # Of those that a step has at least once a layer; what a step has a few times belongs to no layer.
        "kernels_per_layer": sum(round(len(times) / num_steps) // num_layers for times in times_us.values()),
        "launches_per_step": {name: count / num_steps for name, count in sorted(launches.items())},
        "busy_ms": busy_us / 1000 / num_steps,
        "idle_ms": (window_us - busy_us) / 1000 / num_steps,
        "longest_kernels": [
            {
                "name": name,
                "per_step": len(times) / num_steps,
                "us": sum(times) / num_steps,
                "share": sum(times) / total_us,
            }
            for name, times in longest
        ],
        "longest_gaps": [
            {"us": us, "after": after, "before": before} for us, after, before in sorted(gaps, reverse=True)[:_NUM_GAPS]
        ],
    }


def _event(event: dict[str, Any]) -> Event:
    return Event(event["name"], event["ts"], event["ts"] + event.get("dur", 0))


def _leaves(operations: Iterable[dict[str, Any]]) -> list[Event]:
    """Operations that call no other, of all threads."""
    by_thread: dict[object, list[Event]] = {}
    for operation in operations:
        by_thread.setdefault(operation.get("tid"), []).append(_event(operation))
    leaves = []
    for events in by_thread.values():
        events.sort(key=lambda event: (event.began_us, -event.ended_us))
        leaves += [event for event, after in pairwise(events) if after.began_us >= event.ended_us]
        leaves.append(events[-1])
    return leaves


def _gaps(kernels: Sequence[Event]) -> tuple[float, list[tuple[float, str, str]]]:
    """Microseconds in which some kernel runs, and (microseconds, kernel before, kernel after) of each other time.
    kernels: by their begin; they may overlap."""
    busy_us, gaps = 0.0, []
    last = kernels[0]
    began_us = last.began_us
    for kernel in kernels[1:]:
        if kernel.began_us > last.ended_us:
            gaps.append((kernel.began_us - last.ended_us, last.name, kernel.name))
            busy_us += last.ended_us - began_us
            began_us = kernel.began_us
        if kernel.ended_us > last.ended_us:
            last = kernel
    return busy_us + last.ended_us - began_us, gaps


def opening_step(num_rows: int, num_context: int, num_blocks: int, page_size: int) -> ForwardInput:
    """Opens a slot for each row, with blocks of its own, and computes its first token after the context."""
    slots = np.arange(1, 1 + num_rows, dtype=np.int32)
    each = -(-(num_context + _NUM_STEPS) // page_size)
    assert each * num_rows <= num_blocks
    ones = np.ones(num_rows, np.int32)
    blocks = _scattered(num_blocks)[: each * num_rows]
    changes = SlotChanges(slots, _opened(slots, num_context, 1), np.repeat(slots, each), blocks)
    return ForwardInput(0, slots, ones, 0, np.zeros(num_rows, np.int32), changes)


def step_with_prompt(decode: ForwardInput, num_tokens: int, num_blocks: int, page_size: int) -> ForwardInput:
    """The decode step beside a prompt of num_tokens, whose slot it opens. It can be run again and again."""
    slots = np.append(decode.slots, np.int32(len(decode.slots) + 1)).astype(np.int32)
    own = slots[-1:]
    blocks = _scattered(num_blocks)[num_blocks - -(-num_tokens // page_size) :]
    changes = SlotChanges(own, _opened(own, 0, num_tokens), np.repeat(own, len(blocks)), blocks)
    counts = np.append(decode.num_tokens, num_tokens).astype(np.int32)
    return ForwardInput(0, slots, counts, decode.num_decode, np.zeros(num_tokens, np.int32), changes)


def _scattered(num_blocks: int) -> NDArray[np.int32]:
    return 1 + np.random.default_rng(0).permutation(num_blocks).astype(np.int32)


def _opened(slots: NDArray[np.int32], num_context: int, num_tokens: int) -> SlotOpens:
    """Each slot computes the last num_tokens of its prompt, after a context."""
    ones = np.ones(len(slots), np.int32)
    return SlotOpens(
        slots=slots,
        num_prompt_tokens=ones * np.int32(num_context + num_tokens),
        first_positions=ones * np.int32(num_context),
        sampling=np.array([SamplingParams(temperature=1.0)] * len(slots), SAMPLING_DTYPE),
        seeds=np.arange(len(slots), dtype=np.uint64),
        sample_indices=np.zeros(len(slots), np.uint32),
        want_logprobs=np.zeros(len(slots), np.bool_),
    )


def measure(
    runner: ModelRunner,
    num_rows: int,
    num_context: int,
    num_blocks: int,
    page_size: int,
    num_layers: int,
    path: Path,
    num_prompt: int = 0,
    has_groups: bool = True,
) -> dict[str, Any]:
    """path: of the trace that is written, which ends in .gz. num_prompt: tokens of the prompt beside the rows; 0: no
    such steps. has_groups: whether rows may share a prefix."""
    opening = opening_step(num_rows, num_context, num_blocks, page_size)
    runner.run(opening)
    changes = SlotChanges(closed=_NOTHING, opened=None, block_slots=_NOTHING, block_ids=_NOTHING)
    step = ForwardInput(0, opening.slots, opening.num_tokens, num_rows, _NOTHING, changes)
    found = {"num_rows": num_rows, "num_context": num_context, **_timed(runner, step, path, num_layers)}
    num_shared = num_context // page_size
    if has_groups and num_rows > 1 and num_shared:
        groups = PrefixGroups(np.full(1, num_rows, np.int32), np.full(1, num_shared, np.int32))
        of_groups = _timed(runner, replace(step, groups=groups), _beside(path, "groups"), num_layers)
        found["with_groups"] = {"num_tokens": num_shared * page_size, **of_groups}
    if num_prompt:
        mixed = step_with_prompt(step, num_prompt, num_blocks, page_size)
        of_mixed = _timed(runner, mixed, _beside(path, "prompt"), num_layers)
        found["with_prompt"] = {"num_tokens": num_prompt, **of_mixed}
    return found


def _beside(path: Path, name: str) -> Path:
    return path.with_name(f"{name}-{path.name}")


def _timed(runner: ModelRunner, step: ForwardInput, path: Path, num_layers: int) -> dict[str, Any]:
    """path: of the trace."""
    _run(runner, step, _NUM_WARM)
    step_ms, host_ms = _run(runner, step, _NUM_TIMED)
    activities = [ProfilerActivity.CPU]
    if runner.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities):  # the first one loads its library
            _run(runner, step, 1)
    with profile(activities=activities) as profiler:
        _run(runner, step, _NUM_PROFILED)
    profiler.export_chrome_trace(str(path))
    return {"step_ms": step_ms, "host_ms": host_ms, **summarize(read_trace(path), _NUM_PROFILED, num_layers)}


def read_trace(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def _run(runner: ModelRunner, step: ForwardInput, num_steps: int) -> tuple[float, float]:
    """Milliseconds of a step, and the median of those in which the host prepares and launches it."""
    host_s: list[float] = []
    _wait(runner.device)
    began_s = time.perf_counter()
    before = None
    for _ in range(num_steps):
        launched_s = time.perf_counter()
        result = runner.run(step)
        host_s.append(time.perf_counter() - launched_s)
        if before is not None:
            before.wait()
        before = result
    _wait(runner.device)
    return 1000 * (time.perf_counter() - began_s) / num_steps, 1000 * statistics.median(host_s)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _show_phase(phase: PhaseDone) -> None:
    print(f"{phase.phase:<16} {phase.seconds:7.2f} s  {phase.detail}", file=sys.stderr)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.profile_steps")
    parser.add_argument("directory", type=Path, help="the model's")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 1024], help="default: %(default)s")
    parser.add_argument(
        "--context", type=int, default=512, help="tokens of each row, unless the KV cache has fewer (default: 512)"
    )
    parser.add_argument(
        "--prompt",
        type=int,
        default=256,
        help="tokens of a prompt beside the rows, where flags and KV cache allow it (default: %(default)s)",
    )
    parser.add_argument("--traces", type=Path, metavar="DIRECTORY", help="where the traces are kept")
    args, flags = parser.parse_known_args(argv)
    config = ServerConfig.parse([f"model={args.directory}", *flags])
    checkpoint = resolve_checkpoint(str(args.directory))
    setup_logging(config, "profile")
    worker = start_worker(config, checkpoint, Mesh(), 0, _show_phase)
    limits, num_layers = worker.limits, checkpoint.info.num_layers
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.traces or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        for num_rows in args.rows:
            blocks_each = limits.num_kv_blocks // num_rows
            tokens_each = min(blocks_each * limits.page_size, limits.max_tokens_per_sequence) - _NUM_STEPS
            if num_rows > config.max_seqs_per_forward or tokens_each < 1:
                reason = "the server's flags and its KV cache allow no such step"
                print(json.dumps({"num_rows": num_rows, "reason": reason}), flush=True)
                continue
            sizes = limits.num_kv_blocks, limits.page_size, num_layers
            path = directory / f"rows-{num_rows}.json.gz"
            context = min(args.context, tokens_each)
            left = (blocks_each - -(-(context + _NUM_STEPS) // limits.page_size)) * num_rows * limits.page_size
            beside = config.max_tokens_per_forward - num_rows if num_rows < config.max_seqs_per_forward else 0
            num_prompt = max(0, min(args.prompt, left, limits.max_tokens_per_sequence - 1, beside))
            has_groups = worker.limits.hydragen is not None
            found = measure(worker.runner, num_rows, context, *sizes, path, num_prompt, has_groups)
            print(json.dumps(found), flush=True)
    worker.runner.drop_graphs()
    log_writer().flush_lines()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
