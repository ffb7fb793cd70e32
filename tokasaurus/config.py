"""ServerConfig: every flag of `toka`, with its type and default; config_flags has their meanings and limits.

Pydra reads the annotations at run time: use real annotations, no Literal, unions only `T | None`. "auto" is None.
"""

import os
import re
from typing import TYPE_CHECKING

from tokasaurus.config_flags import SERVER_FLAGS
from tokasaurus.flags import FlagError, assign_flags, check_flags

if TYPE_CHECKING:
    # Pydra has no types; with an untyped base class every misspelt flag would pass the type checker.
    class Config:
        def finalize(self) -> None: ...
else:
    from pydra import Config


class ServerConfig(Config):
    """The flags of one server, checked by `finalize`. Plain values only: the config is sent to every process."""

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
    symmetric_all_reduce: bool | None = None

    kv_cache_num_tokens: int | None = None
    kv_cache_dtype: str | None = None
    page_size: int = 16
    max_tokens_per_forward: int = 8192
    max_seqs_per_forward: int = 1024
    max_num_tokens_per_request: int | None = None

    torch_compile: bool | None = None
    use_cudagraphs: bool | None = None
    cudagraph_max_size: int | None = None
    cudagraph_step: int = 16
    attention_backend: str | None = None

    use_hydragen: bool | None = None
    hydragen_min_group_size: int | None = None
    hydragen_min_prefix_len: int | None = None

    scheduling_steps_ahead: int = 8
    deferred_tasks: str | None = None
    max_step_seconds: float | None = None
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
    trace: str | None = None
    trace_first_step: int = 0
    trace_steps: int = 256
    statsd_server_url: str | None = None
    data_dir: str | None = None
    keep_days: int = 30
    api_keys_file: str | None = None
    cache_salt_per_key: bool = False
    allowed_hosts: str | None = None
    drain_seconds: int = 30
    watchdog_seconds: int = 60
    max_restarts: int = 5
    while_restarting: str = "wait"

    max_request_bytes: int | None = 64 << 20
    max_json_values: int = 1 << 20
    max_body_bytes_in_all: int = 1 << 30
    max_line_bytes: int = 16 << 20
    max_header_bytes: int = 65_536
    max_url_bytes: int = 8_192
    max_connections: int | None = None
    header_timeout_seconds: int = 20
    body_timeout_seconds: int = 30
    write_timeout_seconds: int = 60
    keep_alive_seconds: int = 120
    max_queued_requests: int | None = None
    max_queued_sequences: int = 262_144
    max_queued_tokens: int = 1 << 26
    max_answer_values: int = 1 << 25
    max_tokenize_chars: int = 1 << 20
    max_stop_strings: int = 16
    max_stop_chars: int = 1024
    max_file_bytes: int = 200 << 20
    max_batch_lines: int = 50_000

    def finalize(self) -> None:
        """Raises FlagError for a value of the wrong type, out of range, or not implemented yet."""
        check_flags(self, SERVER_FLAGS)
        if self.kv_cache_num_tokens is not None and self.kv_cache_num_tokens < self.page_size:
            raise FlagError(
                f"kv_cache_num_tokens={self.kv_cache_num_tokens}: must be at least one page of "
                f"page_size={self.page_size} tokens"
            )
        for name, value in (("device", "cpu"), ("dtype", "float32"), ("kv_cache_dtype", "float32")):
            if self.attention_backend == "flashinfer" and getattr(self, name) == value:
                raise FlagError(f"attention_backend=flashinfer: does not run with {name}={value}")
        if self.cudagraph_max_size is not None and self.cudagraph_max_size > self.max_seqs_per_forward:
            raise FlagError(
                f"cudagraph_max_size={self.cudagraph_max_size}: must be at most "
                f"max_seqs_per_forward={self.max_seqs_per_forward}"
            )
        self._check_async_tp()
        if self.symmetric_all_reduce and self.tp_size < 2:
            raise FlagError("symmetric_all_reduce=True: needs tp_size= of at least 2 beside it")
        if self.early_stopping_init_std is not None and self.early_stopping_init_mean is None:
            raise FlagError(
                f"early_stopping_init_std={self.early_stopping_init_std}: needs early_stopping_init_mean beside it"
            )
        if self.api_key is not None and not re.fullmatch("[!-~]+", self.api_key):
            # not shown: it is a secret
            raise FlagError("api_key (or TOKA_API_KEY): must be printable ASCII without spaces, as a header carries it")

    def _check_async_tp(self) -> None:
        if self.async_tp_threshold is None:
            return
        flag = f"async_tp_threshold={self.async_tp_threshold}"
        if self.tp_size < 2:
            raise FlagError(f"{flag}: needs tp_size= of at least 2 beside it")
        if not self.torch_compile:
            raise FlagError(
                f"{flag}: needs torch_compile=T beside it, since the compiler joins gemms and communication"
            )
        if self.async_tp_threshold > self.max_tokens_per_forward:
            raise FlagError(f"{flag}: must be at most max_tokens_per_forward={self.max_tokens_per_forward}")


def parse_server_config(args: list[str]) -> ServerConfig:
    """The checked config for `name=value` words. Raises FlagError, whose message is one line."""
    config = ServerConfig()
    assign_flags(config, SERVER_FLAGS, args)
    if config.api_key is None:
        config.api_key = os.environ.get("TOKA_API_KEY") or None  # an empty variable means no key
    config.finalize()
    return config
