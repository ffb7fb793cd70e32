"""Prometheus metrics: the only list of their names, with units in the help texts; and the lag of the event loop.

While one callback of the loop works, or a thread with the GIL, all clients wait.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tokasaurus.messages.commands import adapter_version
from tokasaurus.messages.forward import FORWARD_PHASES
from tokasaurus.messages.status import EngineStats
from tokasaurus.monitoring.log_writer import log_writer
from tokasaurus.monitoring.request_metrics import EndReason, Histogram, RequestMetrics

__all__ = ["CONTENT_TYPE_LATEST", "BatchStats", "EngineCollector", "LoopLag", "render_metrics"]

# (name, field of EngineStats, help)
_GAUGES = [
    ("toka_requests_running", "num_running", "Sequences in prefill or decode; a request with n=4 counts as 4."),
    ("toka_requests_waiting", "num_waiting", "Sequences that are not admitted yet; a request with n=4 counts as 4."),
    (
        "toka_background_requests_running",
        "num_running_background",
        "The part of toka_requests_running that belongs to lines of batches.",
    ),
    (
        "toka_kv_blocks_used",
        "num_kv_blocks_used",
        "KV blocks that sequences use; cached blocks that no sequence uses are not counted.",
    ),
    ("toka_kv_blocks", "num_kv_blocks_total", "KV blocks that sequences may use."),
    (
        "toka_kv_blocks_of_windows",
        "num_kv_blocks_of_windows",
        "The part of toka_kv_blocks_used that layers with windows use: blocks of their own, which are given back.",
    ),
    (
        "toka_state_snapshots",
        "num_snapshots_used",
        "Snapshots of layers' states that are kept for prompts to come; their number is fixed at the start.",
    ),
    (
        "toka_kv_blocks_cached",
        "num_kv_blocks_cached",
        "KV blocks of cached prefixes that no sequence uses; they stay until their memory is needed. The "
        "rest of toka_kv_blocks is free.",
    ),
    (
        "toka_worker_queue_depth",
        "worker_queue_depth",
        "Steps sent to the model worker whose results have not returned.",
    ),
    (
        "toka_manager_busy_fraction",
        "manager_busy_fraction",
        "Fraction of the last completed second in which the manager worked, 0 to 1; near 1, throughput "
        "is limited by the scheduler rather than by the model.",
    ),
]
# The exposition appends "_total" to a counter's name.
_COUNTERS = [
    (
        "toka_prompt_tokens",
        "total_prompt_tokens",
        "Prompt tokens since start; a prompt counts once, however many samples it has.",
    ),
    ("toka_generation_tokens", "total_generation_tokens", "Tokens generated since start, including the end token."),
    (
        "toka_asked_prompt_tokens",
        "total_asked_prompt_tokens",
        "Prompt tokens of all sequences that have started; each sample of a prompt counts.",
    ),
    (
        "toka_prefix_cache_hit_tokens",
        "total_prefix_cache_hit_tokens",
        "Asked prompt tokens that were not computed, because their KV was cached or was being computed; "
        "may exceed toka_prompt_tokens_total, which counts a prompt once.",
    ),
    (
        "toka_computed_prompt_tokens",
        "total_computed_prompt_tokens",
        "Asked prompt tokens that were computed, each counted once per sequence, also where "
        "preemption made it necessary again.",
    ),
    (
        "toka_shared_prompt_tokens",
        "total_shared_prompt_tokens",
        "Asked prompt tokens attended to as a shared prefix (Hydragen) in any step; each counts once, "
        "for any number of steps.",
    ),
    (
        "toka_kv_blocks_evicted",
        "total_kv_blocks_evicted",
        "Cached KV blocks given up because their memory was needed.",
    ),
    (
        "toka_preemptions",
        "total_preemptions",
        "Sequences that had to wait again because KV blocks had run out; each keeps its sampled tokens, "
        "and its text is unchanged.",
    ),
    (
        "toka_recomputed_tokens",
        "total_recomputed_tokens",
        "Prompt or sampled tokens computed again because preemption had freed their KV.",
    ),
    (
        "toka_recompiles",
        "total_recompiles",
        "Compilations of the model after warm-up, with compiled layers (torch_compile=); each one delays "
        "a step. A value other than 0 is an error, and the worker logs a line for each.",
    ),
    (
        "toka_graph_misses",
        "total_graph_misses",
        "Decode steps with more sequences than any CUDA graph of a decode step has room for, so that they launched "
        "more by themselves; 0 unless async_tp_threshold= is set.",
    ),
    (
        "toka_nonfinite_rows",
        "total_nonfinite_rows",
        "Rows of steps for which the model computed NaN or infinity: their requests fail with "
        "numerical_error (500) and no other is affected. A value other than 0 means a damaged model, or "
        "numbers beyond the range of its dtype.",
    ),
    (
        "toka_forward_seconds",
        "total_forward_seconds",
        "Seconds in which the model worker was busy with steps; with several pipeline stages, those of "
        "the last stage, including its waits for the stages before it.",
    ),
    (
        "toka_device_idle_seconds",
        "total_device_idle_seconds",
        "Seconds between two steps in which the device computed nothing although sequences were left to "
        "compute; measured by events of the device on CUDA, by the worker's clock on a CPU.",
    ),
    ("toka_manager_cpu_seconds", "manager_cpu_seconds", "CPU time of the manager process, in seconds."),
]
# (name, field of RequestMetrics, help). "Per sequence": a request with n=4 counts as 4. Sequences that an error has
# ended, and cancelled ones, are only in toka_requests_finished_total.
_HISTOGRAMS = [
    (
        "toka_time_to_first_token_seconds",
        "time_to_first_token",
        "From a request's arrival to a sequence's first token in the manager, in seconds; per sequence with any token.",
    ),
    (
        "toka_time_per_output_token_seconds",
        "time_per_output_token",
        "Mean time between two tokens of a sequence, in seconds; per sequence of at least two tokens.",
    ),
    (
        "toka_queue_seconds",
        "queue",
        "From a request's arrival until a sequence was first admitted, its tokenisation included, in "
        "seconds; per sequence that was admitted.",
    ),
    (
        "toka_prefill_seconds",
        "prefill",
        "From a sequence's first admission to its first token, in seconds; per sequence whose prompt was computed.",
    ),
    (
        "toka_decode_seconds",
        "decode",
        "From a sequence's first token to its last, preemptions included, in seconds; per sequence with any token.",
    ),
    ("toka_completion_tokens", "completion_tokens", "Tokens of a completion, including the end token; per sequence."),
    (
        "toka_request_seconds",
        "request",
        "From a request's arrival to the end of its last sequence, in seconds; per prompt whose "
        "sequences all finished.",
    ),
    ("toka_request_prompt_tokens", "prompt_tokens", "Tokens of a prompt; per prompt, however many samples it has."),
    ("toka_request_n", "num_samples", "Samples asked for; per prompt. Its sum is the number of sequences."),
    (
        "toka_request_longest_completion_tokens",
        "longest_completion",
        "Tokens of a prompt's longest completion; per prompt whose sequences all finished.",
    ),
]

# vLLM's names, with its labels model_name and engine. Some dashboards still read names that vLLM has given up.
_VLLM_GAUGES: list[tuple[str, Callable[[EngineStats], float], str]] = [
    ("vllm:num_requests_running", lambda stats: stats.num_running, "toka_requests_running."),
    ("vllm:num_requests_waiting", lambda stats: stats.num_waiting, "toka_requests_waiting."),
    ("vllm:num_requests_swapped", lambda _: 0, "0: preempted sequences wait, and nothing is swapped."),
    ("vllm:kv_cache_usage_perc", lambda stats: _kv_usage(stats), "toka_kv_blocks_used / toka_kv_blocks, 0 to 1."),
    ("vllm:gpu_cache_usage_perc", lambda stats: _kv_usage(stats), "Former name of vllm:kv_cache_usage_perc."),
    ("vllm:cpu_cache_usage_perc", lambda _: 0, "0: no KV is kept beside the cache that sequences use."),
]
# (name, field of EngineStats, help)
_VLLM_COUNTERS = [
    ("vllm:prompt_tokens", "total_asked_prompt_tokens", "toka_asked_prompt_tokens_total: each sample counts."),
    ("vllm:generation_tokens", "total_generation_tokens", "toka_generation_tokens_total."),
    ("vllm:prefix_cache_queries", "total_asked_prompt_tokens", "toka_asked_prompt_tokens_total, in tokens."),
    ("vllm:prefix_cache_hits", "total_prefix_cache_hit_tokens", "toka_prefix_cache_hit_tokens_total, in tokens."),
    ("vllm:num_preemptions", "total_preemptions", "toka_preemptions_total."),
]
# (name, field of RequestMetrics, help)
_VLLM_HISTOGRAMS = [
    ("vllm:time_to_first_token_seconds", "time_to_first_token", "toka_time_to_first_token_seconds."),
    ("vllm:inter_token_latency_seconds", "between_tokens", "A sequence's mean time between tokens, for each of them."),
    ("vllm:time_per_output_token_seconds", "between_tokens", "Former name of vllm:inter_token_latency_seconds."),
    ("vllm:request_time_per_output_token_seconds", "time_per_output_token", "toka_time_per_output_token_seconds."),
    ("vllm:e2e_request_latency_seconds", "request", "toka_request_seconds: once for all samples of a prompt."),
    ("vllm:request_queue_time_seconds", "queue", "toka_queue_seconds."),
    ("vllm:request_prefill_time_seconds", "prefill", "toka_prefill_seconds."),
    ("vllm:request_decode_time_seconds", "decode", "toka_decode_seconds."),
    ("vllm:request_prompt_tokens", "prompt_tokens", "toka_request_prompt_tokens: once for all samples of a prompt."),
    ("vllm:request_generation_tokens", "completion_tokens", "toka_completion_tokens."),
    ("vllm:request_max_num_generation_tokens", "longest_completion", "toka_request_longest_completion_tokens."),
    ("vllm:request_params_n", "num_samples", "toka_request_n."),
]
_VLLM_REASONS: Mapping[EndReason, str] = MappingProxyType({"cancelled": "abort"})
"""vLLM's finished_reason for our reasons that it does not have."""

BUILD_LABELS = ("version", "model", "dtype", "device", "torch", "python")
"""Labels of toka_build_info."""

LAG_INTERVAL_S = 0.05
LAG_WINDOW_S = 10.0
LAG_STALL_S = 0.25


class LoopLag:
    """Measures the running event loop within `measuring`."""

    def __init__(self) -> None:
        self.num_stalls = 0
        """Lags of more than LAG_STALL_S since the start."""
        # (time.monotonic(), lag) in order, without lags that were followed by a larger one.
        self._lags: deque[tuple[float, float]] = deque()

    def largest_s(self) -> float:
        """The largest lag of the last LAG_WINDOW_S, in seconds."""
        self._drop_old(time.monotonic())
        return self._lags[0][1] if self._lags else 0.0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        task = asyncio.get_running_loop().create_task(self._measure())
        try:
            yield
        finally:
            task.cancel()

    async def _measure(self) -> None:
        while True:
            started = time.monotonic()
            await asyncio.sleep(LAG_INTERVAL_S)
            now = time.monotonic()
            self._add(now, max(0.0, now - started - LAG_INTERVAL_S))

    def _add(self, now: float, lag: float) -> None:
        self.num_stalls += lag > LAG_STALL_S
        while self._lags and self._lags[-1][1] <= lag:
            self._lags.pop()
        self._lags.append((now, lag))
        self._drop_old(now)

    def _drop_old(self, now: float) -> None:
        while self._lags and self._lags[0][0] < now - LAG_WINDOW_S:
            self._lags.popleft()


@dataclass(frozen=True, slots=True)
class BatchStats:
    """A snapshot of a server's batches. Totals count since start."""

    num_unfinished: int
    """Batches."""
    num_lines_running: int
    total_completed_lines: int
    total_failed_lines: int
    is_waiting_for_storage: bool
    """Results cannot be stored, for example because the disk is full."""


@dataclass(frozen=True, slots=True)
class VllmLabels:
    model: str
    page_size: int = 0
    """Tokens of a KV block; 0 until the engine is up, when there are no samples."""
    cache_dtype: str = "auto"
    """The flag kv_cache_dtype=."""


class EngineCollector(Collector):
    """Reads each replica's latest snapshot at every scrape. One sample per replica, labelled with its index.

    read_stats: returns the latest stats of each replica, None for a replica that is not up. read_restarts: returns how
    often each replica was started again. loop_lag: of the server's event loop. batches: None if it stores none.
    read_switched_off: returns, for each replica, the features that the checks of its start have switched off. requests:
    of each replica, by its label. answers: HTTP answers by method, route and status. build: labels of toka_build_info.
    vllm: labels of metrics with vLLM's names; None: none of these. num_server_restarts: servers that died before this
    one. adapters: the digest of each adapter, by its name.
    """

    def __init__(
        self,
        read_stats: Callable[[], Sequence[EngineStats | None]],
        read_restarts: Callable[[], Sequence[int]],
        loop_lag: LoopLag | None = None,
        batches: BatchStats | None = None,
        read_switched_off: Callable[[], Sequence[Sequence[str]]] = list,
        requests: Mapping[str, RequestMetrics] = MappingProxyType({}),
        answers: Mapping[tuple[str, str, int], int] = MappingProxyType({}),
        build: Mapping[str, str] = MappingProxyType({}),
        vllm: VllmLabels | None = None,
        num_server_restarts: int = 0,
        adapters: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._vllm = vllm
        self._adapters = adapters
        self._num_server_restarts = num_server_restarts
        self._requests = requests
        self._answers = answers
        self._build = build
        self._read_switched_off = read_switched_off
        self._read_stats = read_stats
        self._read_restarts = read_restarts
        self._loop_lag = LoopLag() if loop_lag is None else loop_lag
        self._batches = batches

    def collect(self) -> Iterable[Metric]:
        stats_by_replica = {str(index): stats for index, stats in enumerate(self._read_stats()) if stats is not None}
        yield GaugeMetricFamily(
            "toka_replicas_up", "Replicas that accept requests, out of dp_size.", value=len(stats_by_replica)
        )
        yield GaugeMetricFamily("toka_adapters_loaded", "Adapters that have a name.", value=len(self._adapters))
        for name, field, help_text in _GAUGES:
            gauge = GaugeMetricFamily(name, help_text, labels=["replica"])
            for replica, stats in stats_by_replica.items():
                gauge.add_metric([replica], getattr(stats, field))
            yield gauge
        for name, field, help_text in _COUNTERS:
            counter = CounterMetricFamily(name, help_text, labels=["replica"])
            for replica, stats in stats_by_replica.items():
                counter.add_metric([replica], getattr(stats, field))
            yield counter
        yield from _request_metrics(self._requests)
        answers = CounterMetricFamily(
            "toka_http_answers",
            "HTTP answers by method, route (with names of parameters in braces, other for paths that the server "
            "does not have) and status; 499 if the client left before the answer began. HEAD counts as GET. "
            "Requests that are not HTTP, or that exceed limits of connections and headers, are answered before they "
            "count.",
            labels=["method", "route", "status"],
        )
        for (method, route, status), number in sorted(self._answers.items()):
            answers.add_metric([method, route, str(status)], number)
        yield answers
        build = GaugeMetricFamily("toka_build_info", "1; its labels say what runs.", labels=BUILD_LABELS)
        if self._build:
            build.add_metric([self._build[name] for name in BUILD_LABELS], 1)
        yield build
        phases = CounterMetricFamily(
            "toka_forward_phase_seconds",
            "The part of toka_forward_seconds_total that the CPU kernels measure, by phase: gemm (matrix products "
            "with norms, gates and sums), prefix_attention (shared prefixes), attention (all other attention), "
            "heads (rotary embedding, writing keys and values), sampling.",
            labels=["replica", "phase"],
        )
        for replica, stats in stats_by_replica.items():
            for phase, seconds in zip(FORWARD_PHASES, stats.phase_seconds, strict=False):
                phases.add_metric([replica, phase], seconds)
        yield phases
        of_experts = CounterMetricFamily(
            "toka_expert_tokens",
            "Tokens that each expert has computed, with expert_counts=T; layers and experts count from 0.",
            labels=["replica", "layer", "expert"],
        )
        for replica, stats in stats_by_replica.items():
            for layer, own in enumerate(stats.expert_tokens):
                for expert, num_tokens in enumerate(own):
                    of_experts.add_metric([replica, str(layer), str(expert)], num_tokens)
        yield of_experts
        of_adapters = GaugeMetricFamily(
            "toka_adapter_sequences",
            "Sequences with each adapter that has any: those that run, and those of requests that wait for its turn.",
            labels=["replica", "adapter", "state"],
        )
        names = {digest: name for name, digest in self._adapters.items()}
        for replica, stats in stats_by_replica.items():
            for load in stats.adapters:
                name = names.get(load.digest) or adapter_version("", load.digest)  # one that has no name any more
                of_adapters.add_metric([replica, name, "running"], load.num_running)
                of_adapters.add_metric([replica, name, "waiting"], load.num_held)
        yield of_adapters
        restarts = CounterMetricFamily(
            "toka_engine_restarts",
            "Restarts of the replica after one of its processes died or hung; its other counters then start at 0 "
            "again.",
            labels=["replica"],
        )
        for replica_index, num_restarts in enumerate(self._read_restarts()):
            restarts.add_metric([str(replica_index)], num_restarts)
        yield restarts
        yield CounterMetricFamily(
            "toka_server_restarts",
            "Restarts of the server process after it died. Counters of requests and HTTP answers then start at 0 "
            "again; those of the engine go on.",
            value=self._num_server_restarts,
        )
        switched_off = GaugeMetricFamily(
            "toka_switched_off",
            "1 for each feature that a check of the start (toka check) has switched off because it fails or "
            "computes wrongly on this machine: attention_backend=flashinfer, torch_compile, use_cudagraphs, "
            "group_graphs, symmetric_all_reduce, flashinfer_calls, flashinfer_fa3, triton_attention, triton_sampling, "
            "triton_layers, triton_steps, triton_adapters, triton_experts; the log has the reason.",
            labels=["replica", "feature"],
        )
        for replica_index, features in enumerate(self._read_switched_off()):
            for feature in features:
                switched_off.add_metric([str(replica_index), feature], 1)
        yield switched_off
        yield CounterMetricFamily(
            "toka_server_cpu_seconds", "CPU time of the server process, in seconds.", value=time.process_time()
        )
        yield CounterMetricFamily(
            "toka_log_records_dropped",
            "Log records of the server process that were dropped because nobody read its stderr.",
            value=log_writer().num_dropped,
        )
        yield GaugeMetricFamily(
            "toka_event_loop_lag_seconds",
            "Largest delay of the server's event loop in the last ten seconds, measured every 50 ms. During a "
            "delay, no client is served.",
            value=self._loop_lag.largest_s(),
        )
        yield CounterMetricFamily(
            "toka_event_loop_stalls",
            "Delays of the server's event loop of more than 250 ms. If it grows, some request blocks all others.",
            value=self._loop_lag.num_stalls,
        )
        if self._batches is not None:
            yield from _batch_metrics(self._batches)
        if self._vllm is not None:
            yield from _vllm_metrics(self._vllm, stats_by_replica, self._requests)
        yield from ProcessCollector(registry=None).collect()


def _vllm_metrics(
    vllm: VllmLabels, stats_by_replica: Mapping[str, EngineStats], requests: Mapping[str, RequestMetrics]
) -> Iterable[Metric]:
    model, labels = vllm.model, ["model_name", "engine"]
    cache = GaugeMetricFamily(
        "vllm:cache_config_info",
        "1; its labels describe the KV cache: tokens of a block, blocks, and tokens of all blocks.",
        labels=[
            *labels,
            "block_size",
            "num_gpu_blocks",
            "kv_cache_size_tokens",
            "cache_dtype",
            "enable_prefix_caching",
        ],
    )
    for replica, stats in stats_by_replica.items():
        num_blocks = stats.num_kv_blocks_total
        sizes = [vllm.page_size, num_blocks, num_blocks * vllm.page_size]
        cache.add_metric([model, replica, *map(str, sizes), vllm.cache_dtype, "True"], 1)
    yield cache
    for name, read, help_text in _VLLM_GAUGES:
        gauge = GaugeMetricFamily(name, help_text, labels=labels)
        for replica, stats in stats_by_replica.items():
            gauge.add_metric([model, replica], read(stats))
        yield gauge
    for name, field, help_text in _VLLM_COUNTERS:
        counter = CounterMetricFamily(name, help_text, labels=labels)
        for replica, stats in stats_by_replica.items():
            counter.add_metric([model, replica], getattr(stats, field))
        yield counter
    success = CounterMetricFamily(
        "vllm:request_success",
        "toka_requests_finished_total; cancelled ones count as abort.",
        labels=[*labels, "finished_reason"],
    )
    for replica, metrics in requests.items():
        numbers: dict[str, int] = {}
        for reason, number in metrics.finished.items():
            name = _VLLM_REASONS.get(reason, reason)
            numbers[name] = numbers.get(name, 0) + number
        for name, number in numbers.items():
            success.add_metric([model, replica, name], number)
    yield success
    for name, field, help_text in _VLLM_HISTOGRAMS:
        family = HistogramMetricFamily(name, help_text, labels=labels)
        for replica, metrics in requests.items():
            _add_histogram(family, [model, replica], getattr(metrics, field))
        yield family


def _kv_usage(stats: EngineStats) -> float:
    return stats.num_kv_blocks_used / stats.num_kv_blocks_total


def _request_metrics(requests: Mapping[str, RequestMetrics]) -> Iterable[Metric]:
    finished = CounterMetricFamily(
        "toka_requests_finished",
        "Sequences that have ended, by reason: stop, length, abort (by a route for roll-outs), error (the engine "
        "failed it, or another sample of its body), cancelled (nobody waited for it any more, mostly because the "
        "client had disconnected). A request with n=4 counts as 4.",
        labels=["replica", "reason"],
    )
    for replica, metrics in requests.items():
        for reason, number in metrics.finished.items():
            finished.add_metric([replica, reason], number)
    yield finished
    for name, field, help_text in _HISTOGRAMS:
        family = HistogramMetricFamily(name, help_text, labels=["replica"])
        for replica, metrics in requests.items():
            _add_histogram(family, [replica], getattr(metrics, field))
        yield family


def _add_histogram(family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram) -> None:
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    family.add_metric(labels, list(zip(bounds, histogram.cumulative(), strict=True)), histogram.sum)


def _batch_metrics(batches: BatchStats) -> Iterable[Metric]:
    yield GaugeMetricFamily("toka_batches_unfinished", "Batches that are not finished.", value=batches.num_unfinished)
    yield GaugeMetricFamily(
        "toka_batch_lines_running",
        "Lines of batches that have been started and have no stored result: in the engine, being "
        "prepared, or waiting for the disk.",
        value=batches.num_lines_running,
    )
    lines = CounterMetricFamily(
        "toka_batch_lines",
        "Lines of batches that were answered since start, by result: completed or failed. Lines that a "
        "cancelled or expired batch leaves undone do not count.",
        labels=["result"],
    )
    lines.add_metric(["completed"], batches.total_completed_lines)
    lines.add_metric(["failed"], batches.total_failed_lines)
    yield lines
    yield GaugeMetricFamily(
        "toka_batch_storage_failing",
        "1 while results of batches wait because they cannot be stored, for example on a full disk; else 0.",
        value=batches.is_waiting_for_storage,
    )


def render_metrics(collector: Collector) -> bytes:
    """The Prometheus text exposition (`CONTENT_TYPE_LATEST`) of one collector."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)
