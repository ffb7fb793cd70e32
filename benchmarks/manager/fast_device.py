"""A worker process without a model whose steps take the time of a fast device, on a clock that spins."""

import gc
import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from benchmarks.manager.load import InstantWorker
from tokasaurus.messages.channel import Receiver, Sender
from tokasaurus.messages.forward import ForwardInput, ForwardOutput
from tokasaurus.messages.status import EngineLimits, Ready

COUNTERS = ("idle_s", "busy_s", "stalled_s", "num_steps", "num_decode_rows", "num_prefill_tokens", "num_gaps", "queued")
"""What the worker counts in shared memory. idle_s: seconds without a queued or running step after the first step.
stalled_s: seconds in which the spinning process itself did not run. num_gaps: steps that found the device idle.
queued: steps in the queue or running when a step arrived, summed over steps."""

STALL_SECONDS = 0.0005
"""A pass of the spinning loop without a message that takes longer was interrupted by another process."""


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """How long a step takes."""

    step_s: float = 0.002
    """Seconds of every step, whatever its number of decode rows."""
    prefill_token_s: float = 0.060 / 8192
    """Additional seconds for each prompt token."""

    def seconds(self, message: ForwardInput) -> float:
        return self.step_s + self.prefill_token_s * len(message.prompt_ids)


def pin(cores: set[int], niceness: int) -> None:
    """Restrict this process to `cores` and change its niceness, as far as the system permits."""
    with suppress(OSError):
        os.sched_setaffinity(0, cores)
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)


class Device:
    """Computes steps one after the other in the time that `speed` gives. Times are seconds of one clock."""

    def __init__(self, speed: DeviceSpeed, num_slots: int, counters: Any) -> None:
        self._speed = speed
        self._worker = InstantWorker(num_slots, 0.0)
        self._counters = counters
        self._steps: deque[tuple[float, ForwardOutput]] = deque()
        self._free_s = 0.0  # when the newest step ends

    def queue(self, message: ForwardInput, now_s: float) -> None:
        """Begin the step now, or after the steps before it."""
        seconds = self._speed.seconds(message)
        idle_s = now_s - self._free_s if self._free_s else 0.0
        values = (max(0.0, idle_s), seconds, 0.0, 1, message.num_decode, len(message.prompt_ids), idle_s > 0)
        for index, value in enumerate((*values, len(self._steps))):
            self._counters[index] += value
        self._free_s = max(self._free_s, now_s) + seconds
        self._worker.forward_seconds = seconds
        self._steps.append((self._free_s, self._worker.forward(message)))

    def finished(self, now_s: float) -> ForwardOutput | None:
        """The result of the oldest step, if it has ended by now."""
        if self._steps and self._steps[0][0] <= now_s:
            return self._steps.popleft()[1]
        return None


def run_fast_worker(
    speed: DeviceSpeed,
    num_slots: int,
    cores: set[int],
    niceness: int,
    counters: Any,
    limits: EngineLimits,
    inputs: Receiver[ForwardInput],
    outputs: Sender[ForwardOutput | Ready],
) -> None:
    """Process entry: runs steps until `inputs` is closed. The process never sleeps.

    counters: shared array of doubles, one for each of COUNTERS.
    """
    pin(cores, niceness)
    device = Device(speed, num_slots, counters)
    outputs.send(Ready("worker", limits))
    gc.freeze()
    gc.disable()
    last_s = perf_counter()
    while not inputs.is_closed:
        messages = inputs.drain(1)
        now_s = perf_counter()
        # A step that has arrived counts from when it was read, before its result is prepared.
        for message in messages:
            device.queue(message, now_s)
        output = device.finished(now_s)
        if output is not None:
            outputs.send(output)
        if not messages and output is None and now_s - last_s > STALL_SECONDS:
            counters[COUNTERS.index("stalled_s")] += now_s - last_s
        last_s = perf_counter()
