"""Start, health and end of processes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine can hold, known once the worker has sized its KV pool.

    num_kv_blocks: blocks that sequences may use (the padding block is not counted).
    page_size: tokens per block.
    max_tokens_per_sequence: prompt and completion of one sequence; the smallest of model context, KV pool and flag.
    """

    num_kv_blocks: int
    page_size: int
    max_tokens_per_sequence: int


@dataclass(frozen=True, slots=True)
class PhaseDone:
    """One phase of a process's start-up has ended. `detail` is shown to the user, such as the KV arithmetic."""

    process: str
    phase: str
    seconds: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """The process has started. `limits` is set by the worker and by the manager, which passes it on."""

    process: str
    limits: EngineLimits | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The process cannot go on. `message` is one line for the user; the traceback is in the log."""

    process: str
    message: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Finish the step at hand and exit."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of one manager. Totals count since start.

    num_kv_blocks_used: owned by sequences; cached blocks that nobody references are not counted.
    worker_queue_depth: steps sent to the worker whose results are not back.
    total_prompt_tokens: each prompt once, however many samples it has.
    total_prefix_cache_hit_tokens: prompt tokens not computed because their KV was cached, over all sequences: the later
    samples of a prompt count, so it may exceed total_prompt_tokens.
    total_preemptions: sequences that had to wait again for want of blocks.
    total_preempted_tokens: tokens that lost their KV to preemption and had to be computed again.
    manager_busy_fraction: share of the last completed second in which the manager worked, 0 to 1.
    total_recompiles: compilations of the model after its warm-up, each of which a step waited for.
    """

    num_running: int
    num_waiting: int
    num_kv_blocks_used: int
    num_kv_blocks_total: int
    total_prompt_tokens: int
    total_generation_tokens: int
    worker_queue_depth: int
    total_prefix_cache_hit_tokens: int = 0
    total_preemptions: int = 0
    total_preempted_tokens: int = 0
    manager_busy_fraction: float = 0.0
    total_recompiles: int = 0


class UserError(Exception):
    """A cause that the user can mend, in one line: a process that ends with it shows that line and no traceback."""
