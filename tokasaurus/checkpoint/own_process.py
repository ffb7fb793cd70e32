"""Runs a module that imports transformers in a process of its own: that import takes seconds, and models' files decide
what it runs."""

import os
import subprocess
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tokasaurus.checkpoint.json_files import CheckpointError, CheckpointUnavailable
from tokasaurus.inherited import python_command

_NONE: Mapping[str, str] = MappingProxyType({})


def run_main(
    module: str, *arguments: str, failing: str, variables: Mapping[str, str] = _NONE, max_seconds: int | None = None
) -> str:
    """Call `main` of the module in the process -> what it prints. variables: further ones of its environment.

    Raises CheckpointError, which says `failing` and the last line on stderr, if the process fails or takes longer than
    max_seconds; CheckpointUnavailable if it is killed or has no memory."""
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": ""}
    command = [*python_command(f"from {module} import main; main()"), *arguments]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        result = subprocess.run(
            command, check=False, env={**os.environ, **quiet, **variables}, timeout=max_seconds, **pipes
        )
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"{failing}: it takes more than {max_seconds} s") from None
    if result.returncode == 0:
        return str(result.stdout)
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    reason = lines[-1] if lines else f"its process ended with status {result.returncode}"
    is_killed = result.returncode < 0 or reason.startswith("MemoryError")
    raise (CheckpointUnavailable if is_killed else CheckpointError)(f"{failing}: {reason}")
