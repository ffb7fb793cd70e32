"""ServerConfig: every flag of `toka`, with its type, default, allowed values and meaning, in the order of its help.

"auto" is None.
"""

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from typing_extensions import Self

from tokasaurus.flags import (
    FlagConfig,
    Rule,
    Setting,
    at_least,
    at_most,
    count,
    excludes,
    flag,
    installed,
    matches,
    needs,
)

DEMO = "demo"
"""What users write for the demo model, wherever a model is; a directory of this name is ./demo."""

_DTYPES: dict[str, Any] = {
    "choices": ("bfloat16", "float16", "float32"),
    "synonyms": {
        **{"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16"},
        **{"fp32": "float32", "f32": "float32", "float": "float32"},
    },
}

_PORT = r"([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
"""The numbers from 1 to 65535. Of a larger one, the system would use the last 16 bits."""

ORIGIN = r"(null|[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9._:\[\]-]+)"
"""The site of a web page as browsers name it, such as http://localhost:3000; null is that of a file."""
_ORIGINS = rf"\s*(\*|{ORIGIN}(\s*,\s*{ORIGIN})*)\s*"


def _adapters_error(config: Any, value: dict[str, Any]) -> str | None:
    """As of Rule: lora= names what cannot be adapters."""
    if not all(name and isinstance(path, str) and path for name, path in value.items()):
        return "must have a name and a directory for each adapter"
    return "does not go with max_loras=0" if value and config.max_loras == 0 else None


_RETIRED = {
    "prefill_round_up_multiple": "with greedy_prefill=F, prefill tokens are rounded up to a multiple of 16",
    "precise_onboard_batch_size": "a KV simulation admits at most 128 sequences",
    "early_stopping_buffer_size": "the latest 2,048 finished sequences predict lengths",
    "early_stopping_num_prediction_buckets": "the length predictor has at most 1,024 classes",
    "early_stopping_initial_wait": "lengths are predicted from 16 finished sequences on",
    "early_stopping_init_std": "the assumed share has no deviation",
    "spec_allocation_std_buffer_scale": "a quarter of the standard deviation is added to a predicted length",
    "spec_allocation_target_kv_cache_utilization": "admitted sequences may be predicted to use the whole KV cache",
    "stop_string_num_token_lookback": "as many tokens are searched as the longest stop string may have",
    "cudagraph_max_size": "the largest CUDA graph has max_seqs_per_forward= sequences",
    "cudagraph_step": "sizes of CUDA graphs are multiples of 16",
    "enable_chosen_logprobs": "log-probabilities are always allowed, up to max_topk_logprobs=",
    "uvicorn_log_level": "log_level= sets the level of the HTTP server too",
    "max_json_values": "a body may have a million values",
    "max_line_bytes": "a line may have 16 MiB",
    "max_body_bytes_in_all": "all bodies together may have 1 GiB, or max_request_bytes= if that is more",
    "max_header_bytes": "headers may have 64 KiB",
    "max_url_bytes": "path and query may have 8 KiB",
    "header_timeout_seconds": "a connection's first headers may take 20 s",
    "body_timeout_seconds": "a body may take 30 s, and a second for each 64 KiB",
    "write_timeout_seconds": "a client that reads nothing for 60 s is dropped",
    "max_connections": "the limit of open files (ulimit -n) limits connections",
    "max_answer_values": "an answer that is not streamed may have 33,554,432 tokens and log-probabilities",
    "max_tokenize_chars": "/tokenize takes 1,048,576 characters, and /detokenize as many token ids",
    "max_stop_strings": "a request may have 16 stop strings",
    "max_stop_chars": "a stop string may have 1,024 characters",
}


class ServerConfig(FlagConfig):
    """The flags of one server, checked by `finalize`. Plain values only: the config is sent to every process.

    An attribute without an annotation is a constant and no flag."""

    retired = MappingProxyType(_RETIRED)

    main_flags = frozenset(
        (
            *("model", "served_model_name", "quantization", "device", "dp_size", "pp_size", "tp_size"),
            *("kv_cache_num_tokens", "max_tokens_per_forward", "max_seqs_per_forward", "max_num_tokens_per_request"),
            *("host", "port", "api_key", "log_level"),
        )
    )

    model: str | None = flag(
        None,
        "Hugging Face repo id, directory in its format, .gguf file, or demo; ./demo is a directory",
        none_means="demo",
        heading="model",
    )
    tokenizer: str | None = flag(None, "source of the tokenizer, written like model=", none_means="model")
    trust_remote_code: bool = flag(
        False, "run the Python code that a tokenizer brings along; a model's own code is never run"
    )
    dtype: str | None = flag(
        None,
        "data type of the weights and of computation, but a CPU without bfloat16 arithmetic computes in "
        "float32; auto is bfloat16, or float32 where bfloat16 would be slow",
        none_means="auto",
        **_DTYPES,
    )
    cpu_isa: str | None = flag(
        None,
        "instruction set of the CPU kernels, which this machine must support; auto is the best one, torch is "
        "plain PyTorch without our kernels",
        choices=("avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx", "neon", "torch"),
        none_means="auto",
    )
    quantization: str | None = flag(
        None,
        "quantise a plain checkpoint's linear layers while they are loaded; on CPUs only: int8 with a scale for each "
        "output, int4 in groups of 64 inputs; embedding and LM head stay plain",
        choices=("int8", "int4"),
        none_means="off",
        rules=(excludes("int8", device="cuda", cpu_isa="torch"), excludes("int4", device="cuda", cpu_isa="torch")),
    )
    quantized_compute: str | None = flag(
        None,
        "how the CPU kernels multiply by quantised weights: exact has the results of the dequantised "
        "model; int8 quantises activations too and multiplies in integers, which is mostly faster; auto is int8 where "
        "the checkpoint says so and with quantization=int8",
        choices=("exact", "int8"),
        none_means="auto",
        rules=(excludes("int8", device="cuda", cpu_isa="torch"), excludes("exact", device="cuda")),
    )
    rope_scaling: dict | None = flag(  # type: ignore[type-arg]  # Pydra calls the annotation to cast
        None,
        "rotary scaling that replaces the model's own, as a JSON object such as "
        '{"rope_type":"linear","factor":2.0}; the context length follows from it',
        none_means="model's",
    )
    model_impl: str = flag(
        "auto",
        "what computes the model: native is the layers of this project, transformers the model's class there with the "
        "attention, linear layers and sampling of this project; auto is native where the family has such layers",
        choices=("auto", "native", "transformers"),
    )
    task: str | None = flag(
        None,
        "what the model makes of a text: generate is new tokens, embed vectors, score how well a document meets a "
        "query, classify classes, reward a score without activation; auto is what the checkpoint is made for",
        choices=("generate", "embed", "score", "classify", "reward"),
        none_means="auto",
        rules=tuple(excludes(task, rl="T") for task in ("embed", "score", "classify", "reward")),
    )
    lora: dict | None = flag(  # type: ignore[type-arg]  # Pydra calls the annotation to cast
        None,
        "adapters (LoRA, as PEFT stores them) that requests may name as their model: a JSON object of names and "
        'directories, such as {"sql":"adapters/sql"}',
        none_means="none",
        rules=(Rule("a directory for each name; not with max_loras=0", _adapters_error),),
    )
    max_loras: int | None = count(
        None,
        "adapters that steps may have at a time; requests for further ones wait; 0 refuses adapters",
        minimum=0,
        none_means="8 with lora= or rl=T, else 0",
    )
    max_lora_rank: int | None = flag(
        None, "largest rank of an adapter", minimum=1, maximum=256, none_means="64 with lora= or max_loras=, else 32"
    )
    served_model_name: str | None = flag(None, "the model's name in the API", none_means="model")
    model_aliases: str | None = flag(
        None,
        "further names that requests may call the model by, separated by commas, which /v1/models lists; * accepts any",
    )
    device: str | None = flag(
        None,
        "device to run on; auto is cuda if available",
        choices=("cpu", "cuda"),
        synonyms={"gpu": "cuda"},
        none_means="auto",
    )

    dp_size: int | None = count(
        None,
        "replicas of the model (data parallel); auto is one, but on a CPU machine with several memory nodes one for "
        "each of them",
        none_means="auto",
        heading="parallel",
    )
    pp_size: int = count(1, "pipeline stages of a replica")
    tp_size: int = count(1, "devices that share each layer of a stage (tensor parallel)")
    pp_num_buffer_stages: int = count(1, "microbatches in flight in addition to one per pipeline stage", minimum=0)
    ep: bool = flag(
        False,
        "tensor-parallel ranks have whole experts each, as they do by themselves where the experts' width, or blocks "
        "of quantised weights, cannot be divided",
        rules=(needs("tp_size", minimum=2),),
    )
    async_tp_threshold: int | None = count(
        None,
        "tokens per forward from which tensor parallelism overlaps its communication with gemms; needs "
        "torch_compile=T, tp_size= of 2 or more, and GPUs joined by NVLink",
        none_means="off",
        rules=(
            needs("tp_size", minimum=2),
            needs("torch_compile=T", why=", since the compiler joins gemms and communication"),
            at_most("max_tokens_per_forward"),
        ),
    )
    symmetric_all_reduce: bool | None = flag(
        None,
        "sum over tensor-parallel ranks through memory that their GPUs share, up to the size where it is "
        "measured to be faster than NCCL; auto is on where it works, T requires that it works",
        none_means="auto",
        rules=(needs("tp_size", minimum=2),),
    )

    kv_cache_num_tokens: int | None = count(
        None,
        "size of the KV cache in tokens; auto is, on CUDA, the memory left by weights and the largest forward, "
        "on CPU a quarter of the available memory",
        none_means="auto",
        alias="kv_cache_size_num_tokens",
        rules=(at_least("page_size", "one page of {} tokens"),),
        heading="memory",
    )
    kv_cache_dtype: str | None = flag(
        None,
        "data type of the KV cache; auto is the weights' dtype, but float16 for bfloat16 weights on a CPU "
        "without bfloat16 arithmetic; int8, with a scale for each token and KV head, is for the CPU kernels only",
        choices=(*_DTYPES["choices"], "int8"),
        synonyms=_DTYPES["synonyms"],
        none_means="auto",
        rules=(excludes("int8", device="cuda", cpu_isa="torch"),),
    )
    page_size: int = count(16, "tokens per block of the KV cache")
    max_tokens_per_forward: int = count(8192, "maximum tokens in one forward")
    max_seqs_per_forward: int = count(1024, "maximum sequences in one forward")
    max_num_tokens_per_request: int | None = count(
        None, "maximum tokens of one sequence, prompt and completion together", none_means="what fits"
    )

    torch_compile: bool | None = flag(
        None,
        "compile the layers with torch.compile, which replaces our own kernels and is slower; auto compiles on CUDA "
        "where our Triton kernels do not compute the model's layers, and goes on without if that fails",
        none_means="auto",
        heading="compile",
    )
    use_cudagraphs: bool | None = flag(None, "steps replay CUDA graphs; auto is on for CUDA devices", none_means="auto")
    attention_backend: str | None = flag(
        None,
        "attention implementation; auto depends on the device",
        choices=("torch", "cpu", "flashinfer", "reference"),
        none_means="auto",
        rules=(excludes("flashinfer", device="cpu", dtype="float32", kv_cache_dtype="float32"),),
    )

    use_hydragen: bool | None = flag(
        None,
        "compute attention over a shared prefix once for all its sequences; auto is on where that is faster",
        none_means="auto",
        heading="hydragen",
    )
    hydragen_min_group_size: int | None = count(
        None, "minimum sequences of a prefix group", minimum=2, none_means="any that saves time"
    )
    hydragen_min_prefix_len: int | None = count(
        None, "minimum tokens of a shared prefix", none_means="any that saves time"
    )

    scheduling_steps_ahead: int = count(
        8,
        "steps sent to the model ahead of their results; with pipeline stages, steps of each microbatch, at most two",
        heading="scheduler",
    )
    max_step_seconds: float | None = flag(
        None,
        "time that a step which computes prompts should not exceed, in seconds, so that streams go on beside "
        "them; auto is 0.25, or longer where that would cost 2 % of the throughput, but at most 1 while "
        "anything is streamed",
        minimum=0.001,
        maximum=3600,
        none_means="auto",
    )
    greedy_prefill: bool = flag(
        True, "fill the rest of each step with prefill tokens; F prefills just fast enough to keep the KV cache full"
    )
    enable_precise_onboard: bool = flag(
        True,
        "admit sequences by simulating KV usage at every future step; F uses only sums of lengths, which admit fewer",
    )
    track_early_stopping: bool = flag(True, "predict completion lengths from finished sequences")
    early_stopping_init_mean: float | None = flag(
        None,
        "mean share of max_tokens that completions are assumed to use until then; none is all of it",
        minimum=0,
        maximum=1,
    )
    use_spec_allocation: bool = flag(True, "admit sequences by predicted length; F by maximum length")

    max_topk_logprobs: int = count(
        20, "maximum top-k logprobs per token that a request may ask for", minimum=0, heading="output"
    )
    logprobs_mode: str = flag(
        "raw",
        "log-probabilities of sampled tokens where a request does not say which: raw are the model's own, sampled are "
        "those of the distribution that the token is drawn from, after penalties, masks, temperature and limits",
        choices=("raw", "sampled"),
    )
    sampling_defaults: str | None = flag(
        None,
        "sampling parameters where a request says none: model are the ones in generation_config.json or in the GGUF "
        "file, such as a temperature; neutral are those that change nothing",
        choices=("model", "neutral"),
        none_means="model, but neutral with rl=T",
        rules=(excludes("model", rl="T"),),
    )
    tool_call_format: str | None = flag(
        None,
        "format of the model's tool calls; auto is the format of its chat template",
        choices=(
            "hermes",
            "mistral",
            "mistral_args",
            "phi4_mini",
            "granite",
            "command_r",
            "command_r7b",
            "nemotron",
            "hunyuan",
            "hyperclovax",
            "apertus",
            "function_tag",
            "olmo3",
            "lfm2",
            "functiongemma",
            "gemma4",
            "glm4",
            "llama3",
        ),
        none_means="auto",
    )

    request_chat_template: bool = flag(
        False,
        "accept chat templates in requests, and render them in processes of their own; a client's program then runs on "
        "this machine, with limits of time and memory",
    )

    host: str = flag("127.0.0.1", "address to listen on; 0.0.0.0 allows access from the network", heading="server")
    port: int = flag(10210, "TCP port to listen on; 0 is any free one", minimum=0, maximum=65535)
    unix_socket: str | None = flag(
        None,
        "file of a Unix socket to listen on, in place of host and port; only the user who starts the server can "
        "connect to it",
        none_means="host and port",
    )
    api_key: str | None = flag(
        None,
        "key that clients must send; prefer TOKA_API_KEY, since other users can see the command line",
        none_means="TOKA_API_KEY",
        rules=(matches("[!-~]+", "printable ASCII without spaces, as a header carries it"),),
        is_secret=True,
    )
    log_level: str = flag("info", "lines on stderr from this level up", choices=("error", "warning", "info", "debug"))
    log_format: str = flag(
        "text",
        "lines on stderr: text for people, who see how far the start is on a terminal; json for programs, one object a "
        "line",
        choices=("text", "json"),
    )
    request_log: bool = flag(
        False,
        "log a line for each request at its end: id, the key's name or the client's address, model, tokens, times and "
        "how it ended; never a prompt or an answer",
    )
    stats_report_seconds: float = flag(5.0, "seconds between throughput log lines", minimum=0.1, maximum=86400)
    trace: str | None = flag(
        None, "file for a trace of the engine's processes, overwritten; Perfetto and chrome://tracing open it"
    )
    record: str | None = flag(
        None,
        "file that keeps the figures of the live page, a line of JSON each second, for toka top and the page to show "
        "again; an older recording is continued, and at 256 MiB it is renamed to end in .1",
    )
    price_per_hour: float | None = flag(
        None,
        "price of an hour of the whole server, in any currency: the live page tells what jobs cost",
        minimum=0,
    )
    trace_first_step: int = count(0, "step of the engine with which the trace begins", minimum=0)
    trace_steps: int = count(256, "steps in the trace")
    statsd_server_url: str | None = flag(
        None,
        "statsd server that receives the figures of the throughput log lines over UDP, as HOST:PORT",
        rules=(matches(rf"(udp://)?([^\s/?#@:\[\]]+|\[[\da-fA-F:.]+\]):{_PORT}", "HOST:PORT"),),
    )
    vllm_metrics: bool = flag(
        False, "/metrics has the most used figures under vLLM's names as well, for dashboards that read those"
    )
    otel_endpoint: str | None = flag(
        None,
        "collector of OpenTelemetry that receives a trace of each request, as http://HOST:4318",
        none_means="off",
        rules=(
            matches(r"https?://[^\s/?#]+[^\s?#]*", "a URL such as http://localhost:4318"),
            installed(
                "opentelemetry.exporter.otlp.proto.http",
                "opentelemetry-sdk",
                "opentelemetry-exporter-otlp-proto-http",
            ),
        ),
    )
    expert_counts: bool = flag(
        False,
        "count the tokens of each expert, as a metric; steps run without CUDA graphs and compiled layers",
    )
    rl: bool = flag(
        False,
        "serve the routes for roll-outs: pauses, and new weights from directories of this machine, for every client",
    )
    data_dir: str | None = flag(
        None,
        "directory for files and batches, which survive restarts; by default one for each port, in the user's "
        "data directory, and none with unix_socket=",
        none_means="by port",
    )
    keep_days: int = count(30, "days after which files and finished batches are removed")
    api_keys_file: str | None = flag(
        None, "file of keys that clients may send, one per line, each may have a name before it"
    )
    cache_salt_per_key: bool = flag(False, "share cached prompts only between requests with the same API key")
    allowed_hosts: str | None = flag(
        None,
        "host names that requests may be sent to, separated by commas, beside localhost and every address "
        "written as numbers; by default any, but none on a loopback address; * allows any",
        none_means="by address",
    )
    cors_origins: str | None = flag(
        None,
        "web pages that may use the server from a browser: their origins, such as http://localhost:3000, separated by "
        "commas; * allows every page",
        none_means="off",
        rules=(matches(_ORIGINS, "*, or origins such as http://localhost:3000, without a path, separated by commas"),),
    )
    drain_seconds: int = count(
        30, "time for open requests and lines of batches to end after the first stop signal", minimum=0
    )
    watchdog_seconds: int = count(60, "longest time without progress before a process is killed and started again")
    max_restarts: int = count(
        5, "consecutive failed restarts of the engine, or of its server process, before toka exits", minimum=0
    )
    while_restarting: str = flag(
        "wait",
        "new requests while the engine restarts wait for it, or are refused with 503",
        choices=("wait", "refuse"),
    )

    max_request_bytes: int | None = count(
        64 << 20, "maximum size of a request body, in bytes", none_means="1 GiB", heading="limits"
    )
    max_queued_requests: int | None = count(
        None,
        "maximum waiting sequences; each of n samples counts, but a body is accepted whole while fewer wait",
        none_means="no limit",
    )
    keep_alive_seconds: int = count(120, "longest time that a connection stays open between requests")
    max_queued_sequences: int = count(
        262_144, "maximum unfinished sequences, running or waiting; each of n samples counts"
    )
    max_queued_tokens: int = count(
        1 << 26, "maximum prompt tokens of unfinished requests; a prompt counts once, however many samples"
    )
    max_file_bytes: int = count(200 << 20, "maximum size of an uploaded file, in bytes")
    max_batch_lines: int = count(50_000, "maximum lines of a batch's input file")

    # Constants. Tests of what happens at a limit make some of them smaller.
    prefill_round_up_multiple = 16
    """Prefill tokens of a step are a multiple of this with greedy_prefill=F."""
    precise_onboard_batch_size = 128
    """Most sequences that one KV simulation admits."""
    early_stopping_buffer_size = 2048
    """Latest finished sequences that predict lengths."""
    early_stopping_num_prediction_buckets = 1024
    """Most classes of the length predictor."""
    early_stopping_initial_wait = 16
    """Finished sequences before the first prediction."""
    spec_allocation_std_buffer_scale = 0.25
    """Standard deviations added to each predicted length."""
    spec_allocation_target_kv_cache_utilization = 1.0
    """Share of the KV cache that admitted sequences may be predicted to use."""
    max_json_values = 1 << 20
    """Numbers and strings of a body; a list or object counts as 8 more, a key as 3 more. Parsing a million blocks other
    requests for 150 ms."""
    max_line_bytes = 16 << 20
    """Bytes of a line of /v1/bulk or of a batch's input file."""
    max_body_bytes_in_all = 1 << 30
    """Bytes of all bodies that are being received or parsed together."""
    max_header_bytes = 65_536
    """Bytes of a request's headers together."""
    max_url_bytes = 8_192
    """Bytes of path and query."""
    header_timeout_seconds = 20
    """For the headers of a connection's first request."""
    body_timeout_seconds = 30
    """For a body, plus a second for each 64 KiB."""
    write_timeout_seconds = 60
    """Longest time in which a client receives none of an answer that is sent."""
    max_answer_values = 1 << 25
    """Tokens of one answer that is not streamed; each log-probability counts as another token."""
    max_tokenize_chars = 1 << 20
    """Characters that a request to /tokenize may have, and token ids of one to /detokenize."""
    max_stop_strings = 16
    max_stop_chars = 1024
    """Characters of a stop string."""

    def named_in(self, words: Collection[str], without: Collection[str]) -> dict[str, Any]:
        """Values of the server's flags that the words name, for another server with these flags."""
        names = {word.partition("=")[0] for word in words}
        return {
            name: getattr(self, name)
            for name, flag in ServerConfig.flags.items()
            if name not in without and (name in names or flag.alias in names)
        }


FLAGS_OF_ACCESS = (
    *("host", "port", "unix_socket", "api_keys_file", "allowed_hosts", "cors_origins", "data_dir"),
    "model_aliases",
)
"""Flags of how others reach a server, or of what only they use: a program's own engine lacks them."""


class CommandConfig(ServerConfig):
    """The flags of a command that uses a running server or, with the flags of `toka`, starts one of its own.

    A subclass declares base_url and api_key again, under its own heading."""

    base_url: str | None = flag(
        None,
        f"URL of a running server, such as http://127.0.0.1:{ServerConfig.port}/v1; without it, one is started, with "
        "the flags below",
        heading="running server",
    )

    command_headings = tuple[str, ...]()
    """Headings of the flags that are the command's own."""
    set_by_command = tuple[str, ...]()
    """Flags of the server that the command lacks."""
    why_set = ""
    """For the message about one of them."""

    @classmethod
    def own_flags(cls) -> list[str]:
        """Names of the flags that are the command's own."""
        return [name for name, flag in cls.flags.items() if flag.heading in cls.command_headings]

    @classmethod
    def why_not_here(cls, name: str) -> str | None:
        return f"{cls.why_set}; base_url= names a running server" if name in cls.set_by_command else None

    @classmethod
    def relevant(cls, settings: dict[str, Setting]) -> dict[str, Setting]:
        """Beside a running server, variables and files may hold flags for starting one; without it, a key."""
        own = cls.own_flags()
        is_running = "base_url" in settings and settings["base_url"].value is not None
        return {
            name: setting
            for name, setting in settings.items()
            if not setting.source or (name in own if is_running else name != "api_key")
        }

    @classmethod
    def of(cls, settings: Mapping[str, Setting], errors: Iterable[str] = ()) -> Self:
        own, url = cls.own_flags(), settings["base_url"].value if "base_url" in settings else None
        if url is not None:
            why = f"a flag of the server, which runs already at base_url={url}"
            errors = [*errors, *(f"{name}: {why}" for name in settings if name not in own)]
        return super().of(settings, errors)
