"""A server whose managers write down each step, for `python -m benchmarks.scale --real`.

Each replica's file, in the directory that SCALE_RECORDS names, has what the step's time depends on, that time, and when
its result arrived.
"""

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.scale.step_times import RecordedSteps
from tokasaurus.config import ServerConfig
from tokasaurus.manager import loop
from tokasaurus.manager.engine import engine, outputs
from tokasaurus.manager.state.engine_state import EngineState
from tokasaurus.messages.forward import ForwardOutput
from tokasaurus.processes.launch import Entries, serve

DIRECTORY = "SCALE_RECORDS"


def run_manager(config: Any, checkpoint: Any, index: int, *channels: Any) -> None:
    """Entry of the manager's process."""
    steps: list[tuple[list[float], float, float]] = []
    limits: dict[str, Any] = {}

    def apply_output(state: EngineState, output: ForwardOutput) -> None:
        step = state.steps_in_flight[0]
        # With what the device waited for the next step while there was work
        idle_s = output.idle_seconds if step.follows_work else 0.0
        steps.append((step.features.tolist(), output.forward_seconds + idle_s, time.monotonic()))
        limits.update(asdict(state.options.limits))
        outputs.apply_output(state, output)

    engine.apply_output = apply_output  # type: ignore[attr-defined]
    loop.run_manager(config, checkpoint, index, *channels)
    features, seconds, ended_s = (list(column) for column in zip(*steps, strict=True))
    RecordedSteps(limits, features, seconds, ended_s).write(Path(os.environ[DIRECTORY]) / f"{index}.json")


def main() -> int:
    """The process of the server: serves with the flags of its command line, and returns the exit code."""
    return serve(ServerConfig.parse(sys.argv[1:]), Entries(manager=f"{__name__}:run_manager"))
