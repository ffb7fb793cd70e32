"""ServerConfig: every flag of `toka`, its unit, its default and its check.

Pydra reads the annotations at run time: real annotations, no Literal, unions only `T | None`. "auto" is None.
"""

import os
import re
from typing import TYPE_CHECKING

from tokasaurus.flags import MAX_INT32, Flag, FlagError, FlagTable, assign_flags, check_flags

if TYPE_CHECKING:
    # Pydra has no types; with an untyped base class every misspelt flag would pass the type checker.
    class Config:
        def finalize(self) -> None: ...
else:
    from pydra import Config


class ServerConfig(Config):
    """The flags of one server, checked by `finalize`. Plain values only: it travels to every process."""

    model: str | None = None
    tokenizer: str | None = None
    trust_remote_code: bool = False
    dtype: str | None = None
    cpu_isa: str | None = None
    rope_scaling: dict | None = None  # type: ignore[type-arg]  # Pydra calls the annotation to cast
    served_model_name: str | None = None
    device: str | None = None

    dp_size: int = 1
    pp_size: int = 1
    tp_size: int = 1
    pp_num_buffer_stages: int = 1
    async_tp_threshold: int | None = None

    kv_cache_num_tokens: int | None = None
    kv_cache_dtype: str | None = None
    page_size: int = 16
    max_tokens_per_forward: int = 8192
    max_seqs_per_forward: int = 1024
    max_num_tokens_per_request: int | None = None

    torch_compile: bool = False
    use_cudagraphs: bool = True
    cudagraph_max_size: int | None = None
    cudagraph_step: int = 16
    attention_backend: str | None = None

    use_hydragen: bool | None = None
    hydragen_min_group_size: int | None = None
    hydragen_min_prefix_len: int | None = None

    scheduling_steps_ahead: int = 8
    deferred_tasks: str | None = None
    prefill_round_up_multiple: int = 16
    greedy_prefill: bool = True
    enable_precise_onboard: bool = True
    precise_onboard_batch_size: int = 128
    track_early_stopping: bool = True
    early_stopping_buffer_size: int = 2048
    early_stopping_num_prediction_buckets: int = 1024
    early_stopping_initial_wait: int = 16
    early_stopping_init_mean: float | None = None
    early_stopping_init_std: float | None = None
    use_spec_allocation: bool = True
    spec_allocation_std_buffer_scale: float = 0.25
    spec_allocation_target_kv_cache_utilization: float = 1.0

    enable_chosen_logprobs: bool = True
    max_topk_logprobs: int = 20
    stop_string_num_token_lookback: int = 5
    tool_call_format: str | None = None

    host: str = "127.0.0.1"
    port: int = 10210
    api_key: str | None = None
    uvicorn_log_level: str = "info"
    log_level: str = "info"
    stats_report_seconds: float = 5.0
    statsd_server_url: str | None = None
    data_dir: str | None = None
    max_queued_requests: int | None = None
    max_request_bytes: int | None = None

    def finalize(self) -> None:
        """Raises FlagError for a value that is wrong in type or range, or not built yet."""
        check_flags(self, SERVER_FLAGS)
        if self.kv_cache_num_tokens is not None and self.kv_cache_num_tokens < self.page_size:
            raise FlagError(
                f"kv_cache_num_tokens={self.kv_cache_num_tokens}: must hold at least one page of "
                f"page_size={self.page_size} tokens"
            )
        if self.early_stopping_init_std is not None and self.early_stopping_init_mean is None:
            raise FlagError(
                f"early_stopping_init_std={self.early_stopping_init_std}: needs early_stopping_init_mean beside it"
            )
        if self.api_key is not None and not re.fullmatch("[!-~]+", self.api_key):
            # not shown: it is a secret
            raise FlagError("api_key (or TOKA_API_KEY): must be printable ASCII without spaces, as a header carries it")


def _count(meaning: str, minimum: int = 1, none_means: str = "none") -> Flag:
    return Flag(meaning, minimum=minimum, maximum=MAX_INT32, none_means=none_means)


# Remove a name here when its machinery is built.
NOT_BUILT = frozenset(
    {
        "trust_remote_code",
        "rope_scaling",
        "dp_size",
        "pp_size",
        "tp_size",
        "pp_num_buffer_stages",
        "async_tp_threshold",
        "use_cudagraphs",
        "cudagraph_max_size",
        "cudagraph_step",
        "statsd_server_url",
        "data_dir",
    }
)

SERVER_FLAGS = FlagTable(
    groups={
        "model": {
            "model": Flag("Hugging Face repo id, directory in its format, or .gguf file", none_means="demo"),
            "tokenizer": Flag("where the tokenizer comes from, named like a model", none_means="model"),
            "trust_remote_code": Flag("run Python code that a model repository brings along"),
            "dtype": Flag(
                "of the weights in memory, and of all else where the device computes with it: a CPU without bfloat16 "
                "arithmetic computes in float32; auto is bfloat16, or float32 where bfloat16 would be slow",
                choices=("bfloat16", "float16", "float32"),
                none_means="auto",
            ),
            "cpu_isa": Flag(
                "instruction set of the CPU kernels, which must be one of this machine's; auto is the best of them, "
                "torch is plain torch without kernels",
                choices=("avx2", "avx512", "avx512_bf16", "neon", "torch"),
                none_means="auto",
            ),
            "rope_scaling": Flag("rotary scaling in place of the model's own, as a dict", none_means="model"),
            "served_model_name": Flag("the model's name in the API", none_means="model"),
            "device": Flag("auto is cuda where there is one", choices=("cpu", "cuda"), none_means="auto"),
        },
        "parallel": {
            "dp_size": _count("replicas of the model (data parallel)"),
            "pp_size": _count("pipeline stages of a replica"),
            "tp_size": _count("devices that share each layer of a stage (tensor parallel)"),
            "pp_num_buffer_stages": _count("microbatches in flight beyond one per pipeline stage", minimum=0),
            "async_tp_threshold": _count(
                "tokens per forward above which tensor parallelism overlaps its communication", none_means="off"
            ),
        },
        "memory": {
            "kv_cache_num_tokens": _count(
                "tokens that the KV cache holds; auto is, on CUDA, what weights and the largest forward leave, and on "
                "CPU a quarter of the memory available",
                none_means="auto",
            ),
            "kv_cache_dtype": Flag(
                "of the KV cache; auto is the weights' dtype, but float16 beside bfloat16 weights on a CPU without "
                "bfloat16 arithmetic",
                choices=("bfloat16", "float16", "float32"),
                none_means="auto",
            ),
            "page_size": _count("tokens per block of the KV cache"),
            "max_tokens_per_forward": _count("most tokens in one forward"),
            "max_seqs_per_forward": _count("most sequences in one forward"),
            "max_num_tokens_per_request": _count(
                "most tokens of prompt and completion of one sequence", none_means="what fits"
            ),
        },
        "compile": {
            "torch_compile": Flag(
                "compile the layers with torch.compile; on the CPU, in place of our own kernels, which are faster"
            ),
            "use_cudagraphs": Flag("decode with CUDA graphs, on CUDA"),
            "cudagraph_max_size": _count("largest graph, in sequences", none_means="max_seqs_per_forward"),
            "cudagraph_step": _count("sequences between one graph size and the next"),
            "attention_backend": Flag(
                "implementation of attention; auto chooses by device",
                choices=("torch", "cpu", "reference"),
                none_means="auto",
            ),
        },
        "hydragen": {
            "use_hydragen": Flag(
                "compute attention over a shared prefix once for its sequences; auto is on where it pays",
                none_means="auto",
            ),
            "hydragen_min_group_size": _count(
                "fewest sequences that share a prefix", minimum=2, none_means="what pays, measured at start-up"
            ),
            "hydragen_min_prefix_len": _count(
                "fewest tokens of a shared prefix", none_means="what pays, measured at start-up"
            ),
        },
        "scheduler": {
            "scheduling_steps_ahead": _count("steps sent to the model before their results are back"),
            "deferred_tasks": Flag(
                "when the manager does its optional work (admission, stop strings, grouping, predictions): auto puts "
                "it off while the model's queue runs low; always and deferred force one way",
                choices=("always", "deferred"),
                none_means="auto",
            ),
            "greedy_prefill": Flag(
                "fill all that a step has left with prefill tokens; F prefills at the rate that keeps the KV cache full"
            ),
            "prefill_round_up_multiple": _count(
                "tokens to whose multiple the prefill of a step is rounded up, where greedy_prefill=F"
            ),
            "enable_precise_onboard": Flag(
                "admit what fits by a simulation of the KV cache at every future step; F by sums of lengths alone, "
                "which admit fewer"
            ),
            "precise_onboard_batch_size": _count(
                "most sequences that one simulation admits; the batch doubles and halves up to that, by what fits"
            ),
            "track_early_stopping": Flag("learn from the sequences that finish how long those that run will be"),
            "early_stopping_buffer_size": _count("newest finished sequences from which lengths are predicted"),
            "early_stopping_num_prediction_buckets": _count("classes of length, at most, that predictions tell apart"),
            "early_stopping_initial_wait": _count("finished sequences before the first prediction is made from them"),
            "early_stopping_init_mean": Flag(
                "mean share of max_tokens that a completion is expected to use until then; none is all of it",
                minimum=0,
                maximum=1,
            ),
            "early_stopping_init_std": Flag(
                "standard deviation of the share early_stopping_init_mean; none is 0", minimum=0, maximum=1
            ),
            "use_spec_allocation": Flag("admit sequences by their predicted lengths; F by the longest possible"),
            "spec_allocation_std_buffer_scale": Flag(
                "standard deviations that are added to each predicted length", minimum=0
            ),
            "spec_allocation_target_kv_cache_utilization": Flag(
                "share of the KV cache that admitted sequences are predicted to use at most", minimum=0.01, maximum=1
            ),
        },
        "output": {
            "enable_chosen_logprobs": Flag("log-probabilities may be asked for"),
            "max_topk_logprobs": _count(
                "most alternatives per token whose log-probability may be asked for", minimum=0
            ),
            "stop_string_num_token_lookback": _count(
                "tokens back from the newest in which stop strings are sought; grows to cover the longest of them"
            ),
            "tool_call_format": Flag(
                "how the model writes calls of tools; auto is as its chat template writes them",
                choices=("hermes", "llama3"),
                none_means="auto",
            ),
        },
        "server": {
            "host": Flag("address to listen on; 0.0.0.0 opens it to the network"),
            "port": Flag("TCP port to listen on; 0 is any free one", minimum=0, maximum=65535),
            "api_key": Flag(
                "key that clients must send; rather set TOKA_API_KEY, since others can see the command line",
                none_means="TOKA_API_KEY",
            ),
            "uvicorn_log_level": Flag(
                "how much the HTTP server logs", choices=("critical", "error", "warning", "info", "debug", "trace")
            ),
            "log_level": Flag("how much everything else logs", choices=("error", "warning", "info", "debug")),
            "stats_report_seconds": Flag("seconds between log lines with throughput", minimum=0.1, maximum=86400),
            "statsd_server_url": Flag("statsd server that gets the metrics, as host:port"),
            "data_dir": Flag("directory of uploaded files and batches", none_means="user's data"),
            "max_queued_requests": _count(
                "requests that may wait; a list of prompts counts as many, and is taken whole if there is room for one",
                none_means="no limit",
            ),
            "max_request_bytes": _count("largest body of a request, in bytes", none_means="no limit"),
        },
    },
    aliases={"kv_cache_size_num_tokens": "kv_cache_num_tokens"},
    not_built=NOT_BUILT,
)


def parse_server_config(args: list[str]) -> ServerConfig:
    """The checked config that `name=value` words ask for. Raises FlagError, whose message is one line."""
    config = ServerConfig()
    assign_flags(config, SERVER_FLAGS, args)
    if config.api_key is None:
        config.api_key = os.environ.get("TOKA_API_KEY") or None  # an empty variable holds no key
    config.finalize()
    return config
