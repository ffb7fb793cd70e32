"""Messages about the start, state and end of processes."""

import math
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from tokasaurus.messages.commands import NOTHING_HELD, Held, UpdateWeights

if TYPE_CHECKING:  # commands that only ask import no NumPy
    import numpy as np
    from numpy.typing import NDArray

IntOrArray = TypeVar("IntOrArray", int, "NDArray[np.int64]")


@dataclass(frozen=True, slots=True)
class HydragenCosts:
    """Time of attention to a shared prefix by a prefix group, in tokens: the time that a row attending alone takes for
    each token of its context, in all layers together. A group of m rows whose prefix has L tokens takes

        per_group + per_group_token * L + m * (per_row + per_row_token * L),

    and the same rows alone take m * L. A decode step with any groups takes `step_price` more.
    """

    per_group: float = 0.0
    """Cost of a group, such as the launch of a kernel, or threads that wait for each other."""
    per_group_token: float = 1.0
    """The group reads each token of the prefix once."""
    per_row: float = 0.0
    """Cost of a row, such as a second pass over its query, and the merge of its two results."""
    per_row_token: float = 0.0
    """Multiplying each row with each token; 0 where reading takes all the time."""
    per_step: float = 0.0
    """With CUDA graphs: such a step replays a piece for each layer and launches attention between them, where one
    without groups replays one graph. Steps with prompts replay none, and so they do not take it."""
    per_recorded_step: float = 0.0
    """The same for a step of at most recorded_groups groups, which replays one graph too."""
    recorded_groups: int = 0

    def scaled(self, factor: float) -> "HydragenCosts":
        """All costs times `factor`."""
        # Not by astuple and replace, which take as long as a step has for ten of its rows.
        return HydragenCosts(
            factor * self.per_group,
            factor * self.per_group_token,
            factor * self.per_row,
            factor * self.per_row_token,
            factor * self.per_step,
            factor * self.per_recorded_step,
            self.recorded_groups,
        )

    def step_price(self, num_groups: int) -> float:
        """What a decode step with so many groups takes more than one without, whatever its attention saves."""
        return self.per_recorded_step if 0 < num_groups <= self.recorded_groups else self.per_step

    def saved(self, num_rows: int, num_tokens: int) -> float:
        """What a group saves, in tokens, apart from step_price; negative if its rows are faster alone."""
        by_row = num_tokens * (1.0 - self.per_row_token) - self.per_row
        return num_rows * by_row - self.per_group - num_tokens * self.per_group_token


KV_READS = HydragenCosts()
"""Counts the tokens of KV that are read, and nothing else."""

DEFAULT_HYDRAGEN = HydragenCosts(per_group=8192.0)
"""Used when nothing was measured: a group of 33 rows has to share more than 256 tokens."""


SequenceLimit = Literal["model", "max_num_tokens_per_request", "kv_cache_num_tokens"]
"""What limits the length of a sequence: the model's context, or the flag of this name. kv_cache_num_tokens: the size of
the KV cache, chosen by the flag or automatically."""


def longest_context(context_length: int, max_num_tokens_per_request: int | None) -> int:
    """Most tokens of a sequence, by the model's context and the flag; the KV cache may hold fewer."""
    return context_length if max_num_tokens_per_request is None else min(context_length, max_num_tokens_per_request)


def longest_sequence(
    context_length: int, max_num_tokens_per_request: int | None, num_kv_tokens: int
) -> tuple[int, SequenceLimit]:
    """Most tokens of a sequence, and what limits it: of equal limits, the first.

    context_length: of the model. num_kv_tokens: size of the KV cache.
    """
    limits: list[tuple[int, SequenceLimit]] = [(context_length, "model")]
    if max_num_tokens_per_request is not None:
        limits.append((max_num_tokens_per_request, "max_num_tokens_per_request"))
    return min([*limits, (num_kv_tokens, "kv_cache_num_tokens")], key=lambda limit: limit[0])


@dataclass(frozen=True, slots=True)
class WindowGroups:
    """Layers that see only the last tokens, in groups: each keeps keys and values in blocks of its own, which are given
    back while the sequence runs. Layers that see all tokens are one group more."""

    num_groups: int
    window: int
    """Tokens that the layers see, as in attention's Scores: the last ones, or if negative, those of a chunk."""

    def first_seen(self, num_tokens: IntOrArray) -> IntOrArray:
        """The first token, at least 0, that the last of num_tokens sees."""
        if self.window > 0:
            first = num_tokens - self.window
            return first * (first > 0)
        return (num_tokens - 1) // -self.window * -self.window

    def num_held(self, page_size: int, num_tokens: int = 1) -> int:
        """Most blocks of tokens that a sequence computing num_tokens at once needs in each group."""
        return (abs(self.window) + num_tokens - 1 + page_size - 2) // page_size + 1

    def max_pages(self, num_blocks: int, page_size: int) -> int:
        """The most blocks of tokens of a sequence in a cache of num_blocks."""
        held = self.num_groups * self.num_held(page_size, page_size)
        return max(num_blocks - held, num_blocks // (1 + self.num_groups))

    def num_blocks(self, num_pages: int, page_size: int) -> int:
        """Blocks of all groups for a sequence of num_pages blocks of tokens, at least one of them new."""
        return num_pages + self.num_groups * min(num_pages, self.num_held(page_size, page_size))


NO_ADAPTERS = "the server was started without adapters: lora= or max_loras= allow them"


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Capacity of the engine, known once the worker has sized its KV cache, and costs measured on its device."""

    num_kv_blocks: int
    """Blocks that sequences may use; excludes the padding block."""
    page_size: int
    """Tokens per block."""
    max_tokens_per_sequence: int
    """Prompt and completion tokens of one sequence: the smallest of model context, KV cache and flag."""
    hydragen: HydragenCosts | None = DEFAULT_HYDRAGEN
    """None: the attention computes no prefix groups."""
    seconds_per_token: float = 1.0
    """Time per token of the warm-up's forwards, in seconds: larger forwards take no longer, apart from attention. Used
    until steps are timed."""
    seconds_per_step: float = 0.0
    """Time of the warm-up's forward of one token, in seconds."""
    limited_by: SequenceLimit = "model"
    """What `max_tokens_per_sequence` comes from; see `longest_sequence`."""
    seconds_per_pair: float = 0.0
    """Time of attention for each prompt token and token of its context, in seconds; 0 if not known. Used until steps
    are timed."""
    switched_off: tuple[str, ...] = ()
    """Features that the checks of the start have switched off, such as torch_compile."""
    dtype: str = ""
    """dtype of the weights in memory, such as bfloat16."""
    device: str = ""
    """cpu or cuda."""
    num_routed_experts: int = 0
    """Experts that routers choose for a token in all layers together, as far as requests may ask for them; 0: they may
    not."""
    no_routed_experts: str = "the model has no experts"
    """Why requests may not ask for them, for the user."""
    no_adapters: str = NO_ADAPTERS
    """Why adapters cannot be loaded, for the user; "" if they can."""
    windows: WindowGroups | None = None
    """None: all layers keep the keys and values of all tokens, in the same blocks."""
    num_snapshots: int = 0
    """Snapshots of the states of layers for which there is memory, beside the states of running sequences; 0: no layer
    has a state."""
    max_seqs: int | None = None
    """Sequences for whose states there is memory; None: as many as max_seqs_per_forward= allows."""

    @property
    def blocks_per_page(self) -> int:
        """Blocks that page_size new tokens take, in all groups together."""
        return 1 if self.windows is None else 1 + self.windows.num_groups

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that fit into the cache if no layer has given any back."""
        return self.num_kv_blocks // self.blocks_per_page * self.page_size


@dataclass(frozen=True, slots=True)
class PhaseDone:
    """One phase of a process's start-up has ended."""

    process: str
    phase: str
    seconds: float
    detail: str = ""
    """Shown to the user, such as how the KV cache was sized."""


@dataclass(frozen=True, slots=True)
class PhaseProgress:
    """How far a phase is that has begun and not ended. Sent at its begin, and then a few times a second at most."""

    process: str
    phase: str
    num_done: int = 0
    num_total: int = 0
    """0 if it is not known, or if the phase has no parts."""
    unit: str = ""
    """Unit of both numbers, such as "bytes"."""


@dataclass(frozen=True, slots=True)
class ServerTotals:
    """What a server has done since its start. It sends them when it ends in order."""

    num_answered: int
    """Requests whose answers were complete."""
    num_aborted: int
    """Requests that clients gave up, or that the server's end cut off."""
    num_failed: int
    """Requests that were answered with an error after they had been accepted."""
    num_prompt_tokens: int
    """Prompt tokens of all these requests: each prompt counts once, however many samples it has."""
    num_generated_tokens: int
    num_kept_tokens: int = 0
    """Tokens of lines that the server's end has cut, with which its next start continues them. They are generated
    tokens; or those of a former start, if the line did not run in this one."""
    num_lines_left: int = 0
    """Lines of batches that go on at the next start."""

    def what_goes_on(self) -> str:
        """Lines and tokens that are left to the next start, for the user. Precondition: there are such lines."""
        lines = "1 line goes" if self.num_lines_left == 1 else f"{self.num_lines_left:,} lines go"
        kept = f", with {self.num_kept_tokens:,} tokens that are kept" if self.num_kept_tokens else ""
        return f"{lines} on at the next start{kept}"


@dataclass(frozen=True, slots=True)
class Ready:
    """The process has started. Every worker of a replica sends its limits to the manager, which sends on the least."""

    process: str
    limits: EngineLimits | None = None
    updates: tuple[UpdateWeights, ...] = ()
    """The updates that lead from the checkpoint's weights to a manager's workers' weights."""
    is_paused: bool = False
    """The engine is paused: a server that has died had paused it."""

    @property
    def update_number(self) -> int:
        """Number of the newest update; 0 if there is none."""
        return self.updates[-1].number if self.updates else 0


@dataclass(frozen=True, slots=True)
class Predecessors:
    """What the launcher tells a new server process about the ones before it, which have died."""

    num_restarts: int = 0
    """How many they were."""
    replicas: tuple[tuple[EngineLimits | None, int], ...] = ()
    """What each replica reported at its last start, and how often it was started again."""
    updates: tuple[UpdateWeights, ...] = ()
    """Weight updates that replicas have."""
    held: Held = NOTHING_HELD
    started: float | None = None
    """When the first server process was started, this one included, in seconds since 1970; None: now."""
    adapters_directory: str = ""
    """Of all servers' copies of adapters, each in a directory that its digest names; "" if none are loaded."""


FIRST_SERVER = Predecessors()


@dataclass(frozen=True, slots=True)
class WeightsChanged:
    """A replica's model has new weights. Its first worker tells the launcher, for later starts of any replica and
    server."""

    update: UpdateWeights


@dataclass(frozen=True, slots=True)
class Serving:
    """A private server is ready. The launcher sends it to the process that has started it."""

    model: str
    kv_cache_tokens: int
    """Tokens of the KV caches of all replicas together."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds that a step takes, as far as they grow with what it contains."""

    per_step: float = 0.0
    per_row: float = 1.0
    """For each token that it generates."""
    per_prompt_token: float = 0.0


MAX_SURE_RATIO = 1.3
"""Of a time left that is told as one time, not as a range."""


class TimeLeft(NamedTuple):
    """Seconds until an end, as a range."""

    low_s: float
    high_s: float

    @property
    def middle_s(self) -> float:
        return math.sqrt(self.low_s * self.high_s)

    @property
    def is_sure(self) -> bool:
        """The ends differ so little that the middle tells all."""
        return self.high_s <= MAX_SURE_RATIO * self.low_s


@dataclass(frozen=True, slots=True)
class Failed:
    """A process failed: the sender, or one that the sender saw hang. The traceback, if any, is in the log."""

    process: str
    message: str
    """One line for the user."""
    exit_code: int = 1
    """Code with which the launcher exits if the failure ends the server."""
    was_killed: bool = False
    """Whether a signal has ended one of the launcher's processes; False if another process is the sender."""


@dataclass(frozen=True, slots=True)
class Alive:
    """The manager's loop runs. Sent every HEARTBEAT_SECONDS, also without work."""


HEARTBEAT_SECONDS = 1.0
"""Interval of Alive messages, in seconds."""


class AdapterLoad(NamedTuple):
    """The sequences of one adapter."""

    digest: str
    num_running: int
    num_held: int
    """Sequences of requests that wait for the adapter's turn; EngineStats.num_waiting counts them too."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of one manager. Totals count since start.

    Prompt tokens and recomputed tokens are counted over all sequences when they are sent to the worker; a cancelled
    sequence counts as far as it was computed.
    """

    num_running: int
    num_waiting: int
    num_kv_blocks_used: int
    """Blocks that sequences reference; cached blocks without a reference are not counted."""
    num_kv_blocks_total: int
    total_prompt_tokens: int
    """Each prompt once, however many samples it has."""
    total_generation_tokens: int
    worker_queue_depth: int
    """Steps sent to the worker whose results have not arrived."""
    total_prefix_cache_hit_tokens: int = 0
    """Asked prompt tokens not computed because their KV was cached or was being computed for another sequence. May
    exceed total_prompt_tokens."""
    total_preemptions: int = 0
    """Sequences preempted because blocks ran out."""
    total_recomputed_tokens: int = 0
    """Prompt and sampled tokens computed again after preemption; tokens of decode steps count when the sequence leaves
    its slot."""
    manager_busy_fraction: float = 0.0
    """Share of the last complete second in which the manager worked, 0 to 1."""
    total_asked_prompt_tokens: int = 0
    """Prompt tokens of all sequences that have started, counted for each sample of a prompt."""
    total_computed_prompt_tokens: int = 0
    """Asked prompt tokens that were computed, each counted once. asked = hits + computed, plus the tokens not yet
    prefilled of prompts that are prefilling or were cancelled."""
    total_shared_prompt_tokens: int = 0
    """Asked prompt tokens that were attended to in a prefix group in any step."""
    total_recompiles: int = 0
    """Compilations of the model after warm-up, each of which delayed a step."""
    total_graph_misses: int = 0
    """Decode steps that were larger than all CUDA graphs of such steps."""
    total_forward_seconds: float = 0.0
    """Seconds that the worker was busy with steps."""
    total_device_idle_seconds: float = 0.0
    """Seconds between steps in which the device computed nothing, although sequences were left to compute."""
    total_nonfinite_rows: int = 0
    """Rows of steps for which the model computed NaN or infinity."""
    phase_seconds: tuple[float, ...] = ()
    """Seconds of the forwards in each of FORWARD_PHASES; empty if the worker does not count them."""
    num_running_background: int = 0
    """Running sequences of background requests; `num_running` counts them too."""
    num_kv_blocks_of_windows: int = 0
    num_snapshots_used: int = 0
    """The part of num_kv_blocks_used in which layers with windows keep tokens."""
    num_kv_blocks_cached: int = 0
    """Blocks of cached prefixes that no sequence references: they stay until their memory is needed."""
    total_kv_blocks_evicted: int = 0
    """Cached blocks given up because their memory was needed."""
    expert_tokens: tuple[tuple[int, ...], ...] = ()
    """By layer, the tokens of each expert; empty for a layer without experts, or if the worker does not count them."""
    adapters: tuple[AdapterLoad, ...] = ()
    """Of each adapter that has sequences."""
    manager_cpu_seconds: float = field(default=0.0, compare=False)
    """CPU time of the manager process; ignored when snapshots are compared."""


STOP_AT_ONCE = signal.SIGUSR1
"""Signal with which the launcher stops the server process without draining."""


class UserError(Exception):
    """A failure that the user can fix, described in one line: the process shows that line and no traceback."""

    exit_code = 1
    """Exit code of the command."""


class FlagRefused(UserError):
    """A flag asks for what this machine or model cannot do; the line names the flag. As for a flag that is refused
    before the start."""

    exit_code = 2


_MAX_LINE_CHARS = 1000


def one_line(text: str) -> str:
    """For a UserError that quotes a file which nobody has checked: escapes what is not printable, cuts a long text."""
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[:_MAX_LINE_CHARS])
    return line if len(text) <= _MAX_LINE_CHARS else line + "…"


def first_line(error: BaseException) -> str:
    """The first line of an error's message; "" if it has none."""
    return str(error).strip().partition("\n")[0].rstrip()


_OF_LINKERS = (": cannot find ", "undefined reference to", "undefined symbol")


def describe_error(error: BaseException) -> str:
    """One line: of a compiler's or a linker's output, the line that says what is wrong; else the error's class and
    first line."""
    error = getattr(error, "inner_exception", error)  # torch's BackendCompilerFailed has the cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    of_tools = [line for line in lines if "error:" in line or any(words in line for words in _OF_LINKERS)]
    # A compiler that has called the linker only says that this has failed.
    causes = [line for line in of_tools if "ld returned" not in line]
    return next(iter((*causes, *of_tools)), f"{type(error).__name__}: {lines[0]}")[:300]
