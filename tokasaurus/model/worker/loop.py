"""The worker's step loop: receive a step, run it, send the sampled tokens and the prompt logprobs.

Between two steps, it carries out commands."""

import time
from collections import deque
from collections.abc import Callable

from tokasaurus.messages.channel import ChannelClosed, Receiver, Sender
from tokasaurus.messages.commands import CommandDone, WorkerCommand
from tokasaurus.messages.forward import ForwardInput, ForwardOutput
from tokasaurus.messages.status import Ready
from tokasaurus.model.execution.runner import ModelRunner, StepResult
from tokasaurus.model.staging.staging import Mark


def run_steps(
    runner: ModelRunner,
    inputs: Receiver[ForwardInput | WorkerCommand],
    outputs: Sender[ForwardOutput | Ready | CommandDone] | None,
    steps_behind: int,
    carry_out: Callable[[WorkerCommand], str],
) -> None:
    """Run steps until `inputs` is closed.

    outputs: None on ranks that do not reply.
    steps_behind: how many steps may be running on the device before the loop waits for the oldest; 0 on a CPU, where a
    step is complete when `run` returns. With 1, the host prepares the next step while the device computes this one.
    carry_out: returns why it has changed nothing, or "". The manager sends a command when it has all results.
    """
    waiting: deque[ForwardInput | WorkerCommand] = deque()
    running: deque[tuple[StepResult, float]] = deque()
    busy_until = 0.0
    last_end: Mark | None = None
    trace = runner.trace

    def answer_oldest() -> None:
        nonlocal busy_until, last_end
        result, started = running.popleft()
        result.wait()
        now = time.perf_counter()
        # Do not count the time in which the previous step still occupied the device.
        since = max(started, busy_until)
        seconds = now - since
        if steps_behind:
            trace.add(f"step {result.step_id}", since, now, "device")
        busy_until = now
        idle_seconds = 0.0 if last_end is None else result.begun.seconds_since(last_end)
        last_end = result.ended
        if outputs is not None:
            outputs.send(result.output(seconds, idle_seconds))

    def take(message: ForwardInput | WorkerCommand) -> None:
        if isinstance(message, ForwardInput):
            runner.expect(message)
        waiting.append(message)

    while True:
        for message in inputs.drain():
            take(message)
        while running and (len(running) > steps_behind or not waiting):
            answer_oldest()
        if not waiting:
            trace.cover(trace.step_id + 1, trace.step_id + 1)
            try:
                message = inputs.receive()
            except ChannelClosed:
                trace.write()
                runner.finish()
                return
            take(message)
        message = waiting.popleft()
        if not isinstance(message, ForwardInput):
            while running:
                answer_oldest()
            error = carry_out(message)
            if outputs is not None:
                outputs.send(CommandDone(message.command_id, error))
            continue
        trace.cover(running[0][0].step_id if running else message.step_id, message.step_id)
        started = time.perf_counter()
        runner.times.begin()
        result = runner.run(message)
        runner.times.end()
        if trace.is_on:
            counts = {"decode_rows": message.num_decode, "prompt_tokens": len(message.prompt_ids)}
            trace.add(f"microbatch {message.microbatch}", started, time.perf_counter(), "host", **counts)
        if result is not None:
            running.append((result, started))
