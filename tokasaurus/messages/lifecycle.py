"""Start, health and end of processes."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class HydragenThresholds:
    """From where on attention over a shared prefix pays. min_group_size: sequences. min_prefix_len: tokens."""

    min_group_size: int
    min_prefix_len: int


DEFAULT_HYDRAGEN = HydragenThresholds(min_group_size=32, min_prefix_len=256)
"""Where nothing was measured."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine can hold, known once the worker has sized its KV pool, and what pays on its device.

    num_kv_blocks: blocks that sequences may use (the padding block is not counted).
    page_size: tokens per block.
    max_tokens_per_sequence: prompt and completion of one sequence; the smallest of model context, KV pool and flag.
    hydragen: None where no group pays.
    """

    num_kv_blocks: int
    page_size: int
    max_tokens_per_sequence: int
    hydragen: HydragenThresholds | None = DEFAULT_HYDRAGEN


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
    """A snapshot of one manager. Totals count since start; those of prompt tokens and of recomputed tokens count what
    is sent to the worker, when it is sent, over all sequences: of cancelled ones, what was done for them.

    num_kv_blocks_used: owned by sequences; cached blocks that nobody references are not counted.
    worker_queue_depth: steps sent to the worker whose results are not back.
    total_prompt_tokens: each prompt once, however many samples it has.
    total_asked_prompt_tokens: of all sequences that have started: each sample of a prompt counts.
    total_prefix_cache_hit_tokens: of those, the ones that were not computed because their KV was cached, or was being
    computed for another sequence; so it may exceed total_prompt_tokens.
    total_computed_prompt_tokens: of those asked, the ones that were computed, each counted once. Asked are the hits and
    these, but for what was not begun of prompts that prefill or were cancelled.
    total_shared_prompt_tokens: of those asked, the ones that were attended to in a group (PrefixGroups) in any step.
    total_preemptions: sequences that had to wait again for want of blocks.
    total_recomputed_tokens: tokens, of prompts or sampled, that were computed again after preemption. Those of decode
    steps count when the sequence leaves its slot.
    manager_busy_fraction: share of the last completed second in which the manager worked, 0 to 1.
    total_recompiles: compilations of the model after its warm-up, each of which a step waited for.
    total_forward_seconds: that the worker was busy with steps. phase_seconds: of them, what each of FORWARD_PHASES
    took, where the worker counts it, else empty.
    manager_cpu_seconds: CPU time of the manager's process. Two snapshots that differ in it alone are equal.
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
    total_recomputed_tokens: int = 0
    manager_busy_fraction: float = 0.0
    total_asked_prompt_tokens: int = 0
    total_computed_prompt_tokens: int = 0
    total_shared_prompt_tokens: int = 0
    total_recompiles: int = 0
    total_forward_seconds: float = 0.0
    phase_seconds: tuple[float, ...] = ()
    manager_cpu_seconds: float = field(default=0.0, compare=False)


class UserError(Exception):
    """A cause that the user can mend, in one line: a process that ends with it shows that line and no traceback."""
