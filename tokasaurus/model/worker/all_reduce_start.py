"""A start's choice between NCCL's sums over tensor-parallel ranks and those through symmetric memory, by their size.

The ways of symmetric memory are compared with NCCL's sums, and measured beside them, before the model is built.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import distributed_c10d

from tokasaurus.messages.status import FlagRefused, UserError, first_line
from tokasaurus.model.buffer_sizes import buffer_bytes
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.parallel.symmetric_all_reduce import (
    DTYPES,
    SharedBuffer,
    SymmetricAllReduce,
    SymmetricBuffer,
    Way,
    unreadable_device,
)
from tokasaurus.model.worker.device import Stopwatch, make_stopwatch
from tokasaurus.model.worker.memory import dtype_name
from tokasaurus.model.worker.memory_plan import show_size
from tokasaurus.model.worker.self_check import TOLERANCES

if TYPE_CHECKING:
    from tokasaurus.model.worker.start import Start

logger = logging.getLogger(__name__)

WAIT_SECONDS = 60.0
"""Longest wait of a rank for what the others found, or for its device. A rank that reads another's memory waits for it
without end, on the device, if that one fails alone."""

_MIN_BYTES, _FACTOR = 8 << 10, 4
"""Bytes of the smallest sum that is measured, and the factor between two sizes."""
_NUM_SUMS = 10
"""Sums that are measured together, so that it matters little when each rank begins."""
_NUM_ROUNDS = 5
_NUM_INPUTS = 2
"""Inputs with which each way is compared at each size."""


def is_tried(symmetric_all_reduce: bool | None, mesh: Mesh, device: torch.device) -> bool:
    """Whether to call choose_all_reduce. symmetric_all_reduce: the flag. Raises FlagRefused if it is T on a CPU."""
    if symmetric_all_reduce is True and device.type != "cuda":
        raise FlagRefused(f"symmetric_all_reduce=T: needs GPUs, not device={device.type}")
    return symmetric_all_reduce is not False and mesh.tp_size > 1 and device.type == "cuda"


def choose_sums(start: Start) -> str:
    """How ranks add up, for each size of sums."""
    hidden_size, dtype = start.info.hidden_size, start.activation_dtype
    num_bytes = buffer_bytes(start.config.max_tokens_per_forward, hidden_size, dtype_name(dtype))
    start.mesh, described = choose_all_reduce(
        *(start.config.symmetric_all_reduce, start.mesh, start.device, dtype, num_bytes, start.first_device),
        on_left_out=partial(start.checks.leave_out, "symmetric_all_reduce"),
    )
    return described


def choose_all_reduce(
    symmetric_all_reduce: bool | None,
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype,
    num_bytes: int,
    first_device: int,
    make_buffer: Callable[..., SharedBuffer] = SymmetricBuffer,
    on_left_out: Callable[[str], None] = lambda _reason: None,
) -> tuple[Mesh, str]:
    """The mesh, with sums through symmetric memory where they are the fastest; and a text for the user, that says so.

    num_bytes: from buffer_bytes. dtype: of hidden states. first_device: index of the first rank's CUDA
    device; the others follow. Every rank of the group must call it. What fails on one of them is used on none: one line
    is logged, and on_left_out called with the reason, or, where the flag is True, FlagRefused raised. Raises UserError
    if a rank waits for another in vain.
    """
    meeting = _Meeting(mesh)
    failure = meeting.first_failure(_why_impossible(dtype, device, first_device, mesh.tp_size))
    if failure is not None:
        if symmetric_all_reduce:
            raise FlagRefused(f"symmetric_all_reduce=T: {failure}")
        return mesh, f"NCCL, {failure}"
    try:
        ways = _working_ways(mesh, device, dtype, num_bytes, meeting, make_buffer)
    except _FailsHere as error:
        if symmetric_all_reduce:
            raise FlagRefused(f"symmetric_all_reduce=T: {error}") from error
        on_left_out(str(error))
        logger.warning(
            "sums over ranks through symmetric memory are switched off: %s; NCCL takes longer for few tokens. "
            "symmetric_all_reduce=F does not try",
            error,
        )
        return mesh, "NCCL"
    sizes = _measured_sizes(num_bytes)
    seconds = _measure(ways, sizes, mesh, device, dtype, make_stopwatch(device))
    limits = fastest_up_to(sizes, seconds)
    if not limits:
        return mesh, "NCCL, which is the fastest"
    assert mesh.tp_group is not None
    all_reduce = SymmetricAllReduce(ways, limits, dtype, mesh.tp_group)
    described = [f"{name} up to {show_size(max_bytes)}" for max_bytes, name in limits]
    return replace(mesh, all_reduce=all_reduce), ", ".join([*described, "NCCL beyond"])


def fastest_up_to(sizes: Sequence[int], seconds: Sequence[dict[str | None, float]]) -> list[tuple[int, str]]:
    """(bytes, way): each way up to which size, ascending. sizes: in bytes, ascending. seconds: of each size, by way;
    None is NCCL's way, which gets every size from the first one on where it is the fastest."""
    limits: list[tuple[int, str]] = []
    for size, of_ways in zip(sizes, seconds, strict=True):
        name = min(of_ways, key=lambda way: of_ways[way])
        if name is None:
            break
        if limits and limits[-1][1] == name:
            limits.pop()
        limits.append((size, name))
    return limits


class _FailsHere(Exception):
    """One line: what does not work, on which rank. Raised on every rank alike."""


class _Meeting:
    """What ranks tell each other through the store with which they met: a rank that waits on its device cannot."""

    def __init__(self, mesh: Mesh) -> None:
        assert mesh.tp_group is not None
        self._mesh = mesh
        store = distributed_c10d._get_process_group_store(mesh.tp_group)
        number = store.add(f"all-reduce/{mesh.tp_rank}", 1)  # of this meeting, the same on every rank
        self._store = distributed_c10d.PrefixStore(f"all-reduce/{number}", store)
        self._num_rounds = 0

    def first_failure(self, own: str | None) -> str | None:
        """The failure of the first rank that has one, the same text on every rank. own: this rank's; None: none."""
        texts = self._exchange("" if own is None else own)
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        if failures and all(text == texts[0] for text in texts):
            return texts[0]
        return failures[0] if failures else None

    def lacked(self, names: Iterable[str]) -> list[str]:
        """This rank's names that another rank lacks."""
        own = list(names)
        of_all = [set(text.split()) for text in self._exchange(" ".join(own))]
        return [name for name in own if not all(name in of_rank for of_rank in of_all)]

    def _exchange(self, own: str) -> list[str]:
        """The text of each rank. Raises UserError if one does not come; `own` says why if it is not empty."""
        self._num_rounds += 1
        keys = [f"{self._num_rounds}/{rank}" for rank in range(self._mesh.tp_size)]
        self._store.set(keys[self._mesh.tp_rank], own)
        try:
            self._store.wait(keys, timedelta(seconds=WAIT_SECONDS))
        except RuntimeError as error:
            why = f"{own}, and " if own else ""
            raise UserError(
                f"sums over ranks through symmetric memory: {why}other ranks did not go on for {WAIT_SECONDS:g} s; "
                "symmetric_all_reduce=F starts without"
            ) from error
        return [self._store.get(key).decode() for key in keys]

    def run(self, what: str, call: Callable[[], object]) -> None:
        """Raises _FailsHere, on all ranks, if the call raises an exception on one."""
        failure = None
        try:
            call()
        except UserError:
            raise
        except Exception as error:  # of torch, the driver, or a lack of memory
            logger.debug("%s failed", what, exc_info=error)
            failure = f"{what}: {first_line(error) or type(error).__name__}"
        failure = self.first_failure(failure)
        if failure is not None:
            raise _FailsHere(failure)


def _why_impossible(dtype: torch.dtype, device: torch.device, first_device: int, tp_size: int) -> str | None:
    if dtype not in DTYPES:
        return f"since others need bfloat16 or float32, not {str(dtype).removeprefix('torch.')}"
    other = unreadable_device(device, first_device, tp_size) if device.type == "cuda" else None
    return None if other is None else f"since {device} cannot read memory of cuda:{other}"


def _working_ways(
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype,
    num_bytes: int,
    meeting: _Meeting,
    make_buffer: Callable[..., SharedBuffer],
) -> dict[str, Way]:
    """Raises _FailsHere."""
    buffers: list[SharedBuffer] = []
    # No rank may wait for one that lacks memory: they meet after each part.
    meeting.run("no memory to share", lambda: buffers.append(make_buffer(num_bytes, dtype, device, mesh.tp_group)))
    (buffer,) = buffers
    meeting.run("memory cannot be shared", buffer.join)
    ways = buffer.ways()
    for name in meeting.lacked(ways):
        del ways[name]
    # NCCL's first: if a way fails on this rank alone, the others must not wait for it there.
    inputs = itertools.product(_measured_sizes(num_bytes), range(_NUM_INPUTS))
    compared = [_expected(size, seed, mesh, device, dtype) for size, seed in inputs]
    for name, way in ways.items():
        meeting.run(f"{name} sums", partial(_compare, way, compared, device))
    return ways


def _expected(num_bytes: int, seed: int, mesh: Mesh, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Other numbers on each rank, and NCCL's sum of them, in float32."""
    generator = torch.Generator().manual_seed(seed * mesh.tp_size + mesh.tp_rank)
    own = torch.randn(num_bytes // dtype.itemsize, generator=generator).to(device, dtype)
    total = own.to(torch.float32, copy=True)
    torch.distributed.all_reduce(total, group=mesh.tp_group)
    return own, total


def _compare(way: Way, compared: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
    """Raises ValueError if a sum differs from the expected one, and UserError if the device does not end."""
    sums = []
    for own, expected in compared:  # all of them before the first comparison: the other ranks wait for each
        found = own.clone()
        way(found)
        _wait_for(device)
        sums.append((found, expected))
    for found, expected in sums:
        error, largest = float((found.float() - expected).abs().max()), float(expected.abs().max())
        allowed = TOLERANCES[found.dtype] * largest
        if not error <= allowed:
            size = show_size(found.numel() * found.itemsize)
            raise ValueError(f"one of {size} differs from NCCL's by {error:.2g}, allowed is {allowed:.2g}")


def _wait_for(device: torch.device) -> None:
    """Wait until the device has done its work. Raises UserError if that takes too long: it waits for another rank."""
    if device.type != "cuda":
        return
    end = torch.cuda.current_stream(device).record_event()
    limit_s = time.monotonic() + WAIT_SECONDS
    while not end.query():
        if time.monotonic() > limit_s:
            raise UserError(
                f"a sum over ranks through symmetric memory has not ended after {WAIT_SECONDS:g} s; "
                "symmetric_all_reduce=F starts without"
            )
        time.sleep(0.001)


def _measured_sizes(num_bytes: int) -> list[int]:
    """Sizes to measure in bytes, ascending; the last is the buffer's size."""
    powers = (_MIN_BYTES * _FACTOR**exponent for exponent in itertools.count())
    return [*itertools.takewhile(lambda size: size < num_bytes, powers), num_bytes]


def _measure(
    ways: dict[str, Way],
    sizes: Sequence[int],
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype,
    stopwatch: Stopwatch,
) -> list[dict[str | None, float]]:
    """Seconds of _NUM_SUMS sums of each size, by way, the same numbers on every rank. None is NCCL's way."""

    def by_nccl(own: Tensor) -> None:
        torch.distributed.all_reduce(own, group=mesh.tp_group)

    def seconds(way: Way, size: int) -> float:
        zeros = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)  # whose sums never overflow

        def sum_often() -> None:
            for _ in range(_NUM_SUMS):
                way(zeros)

        return stopwatch.seconds(sum_often)

    all_ways = [by_nccl, *ways.values()]
    rounds = [[[seconds(way, size) for way in all_ways] for size in sizes] for _ in range(_NUM_ROUNDS)]
    # The rank that begins last waits for nobody: its time is the least.
    least = torch.tensor(rounds, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=mesh.tp_group)
    by_size = zip(*least.tolist(), strict=True)  # of each, the rounds' times of all ways
    medians = [map(statistics.median, zip(*of_rounds, strict=True)) for of_rounds in by_size]
    return [dict(zip([None, *ways], of_ways, strict=True)) for of_ways in medians]
