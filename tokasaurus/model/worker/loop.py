"""The worker's life after start-up: take a step from the queue, run it, send what it sampled and scored."""

import time
from collections import deque

from tokasaurus.messages.channel import Channel
from tokasaurus.messages.forward import EndOfInputs, ForwardInput, ForwardOutput
from tokasaurus.messages.lifecycle import Ready
from tokasaurus.model.execution.runner import ModelRunner, StepResult


def run_steps(
    runner: ModelRunner,
    inputs: Channel[ForwardInput | EndOfInputs],
    outputs: Channel[ForwardOutput | Ready] | None,
    steps_behind: int,
) -> None:
    """Until EndOfInputs. outputs: None on ranks that do not reply.

    steps_behind: how many steps may run on the device before the oldest is waited for; 0 on a CPU, where a step is done
    when `run` returns. While inputs wait, the host prepares the next step as the device computes this one.
    """
    waiting: deque[ForwardInput | EndOfInputs] = deque()
    running: deque[tuple[StepResult, float]] = deque()
    busy_until = 0.0

    def answer_oldest() -> None:
        nonlocal busy_until
        result, started = running.popleft()
        token_ids = result.host_token_ids()
        now = time.perf_counter()
        # A step that was prepared while the one before it ran did not keep the device for that time.
        seconds = now - max(started, busy_until)
        busy_until = now
        if outputs is not None:
            outputs.send(
                ForwardOutput(
                    result.step_id,
                    token_ids,
                    result.host_logprobs(),
                    seconds,
                    result.num_recompiles,
                    result.phase_seconds,
                    result.host_top(),
                    result.host_scores(),
                )
            )

    while True:
        waiting.extend(inputs.drain())
        while running and (len(running) > steps_behind or not waiting):
            answer_oldest()
        if not waiting:
            waiting.append(inputs.receive())
        message = waiting.popleft()
        if isinstance(message, EndOfInputs):
            break
        started = time.perf_counter()
        running.append((runner.run(message), started))
    while running:
        answer_oldest()
    if outputs is not None:
        outputs.abandon()  # the manager, which ended the inputs, may be gone already
