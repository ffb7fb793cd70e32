"""SERVER_FLAGS: the meaning, unit and allowed values of every flag of `toka`, in the order of its help."""

from tokasaurus.flags import MAX_INT32, Flag, FlagTable


def _count(meaning: str, minimum: int = 1, none_means: str = "none") -> Flag:
    return Flag(meaning, minimum=minimum, maximum=MAX_INT32, none_means=none_means)


# Flags that are not implemented yet; remove a name here once it is.
NOT_BUILT = frozenset(
    {
        "trust_remote_code",
        "rope_scaling",
        "statsd_server_url",
    }
)

SERVER_FLAGS = FlagTable(
    groups={
        "model": {
            "model": Flag("Hugging Face repo id, directory in its format, or .gguf file", none_means="demo"),
            "tokenizer": Flag("source of the tokenizer, written like model=", none_means="model"),
            "trust_remote_code": Flag("run Python code from the model's repository"),
            "dtype": Flag(
                "data type of the weights and of computation, but a CPU without bfloat16 arithmetic computes in "
                "float32; auto is bfloat16, or float32 where bfloat16 would be slow",
                choices=("bfloat16", "float16", "float32"),
                none_means="auto",
            ),
            "cpu_isa": Flag(
                "instruction set of the CPU kernels, which this machine must support; auto is the best one, torch is "
                "plain PyTorch without our kernels",
                choices=("avx2", "avx512", "avx512_bf16", "neon", "torch"),
                none_means="auto",
            ),
            "rope_scaling": Flag("rotary scaling that replaces the model's own, as a dict", none_means="model"),
            "served_model_name": Flag("the model's name in the API", none_means="model"),
            "device": Flag("device to run on; auto is cuda if available", choices=("cpu", "cuda"), none_means="auto"),
        },
        "parallel": {
            "dp_size": _count("replicas of the model (data parallel)"),
            "pp_size": _count("pipeline stages of a replica"),
            "tp_size": _count("devices that share each layer of a stage (tensor parallel)"),
            "pp_num_buffer_stages": _count("microbatches in flight in addition to one per pipeline stage", minimum=0),
            "async_tp_threshold": _count(
                "tokens per forward from which tensor parallelism overlaps its communication with gemms; needs "
                "torch_compile=T, tp_size= of 2 or more, and GPUs joined by NVLink",
                none_means="off",
            ),
            "symmetric_all_reduce": Flag(
                "sum over tensor-parallel ranks through memory that their GPUs share, up to the size where it is "
                "measured to be faster than NCCL; auto is on where it works, T requires that it works",
                none_means="auto",
            ),
        },
        "memory": {
            "kv_cache_num_tokens": _count(
                "size of the KV cache in tokens; auto is, on CUDA, the memory left by weights and the largest forward, "
                "on CPU a quarter of the available memory",
                none_means="auto",
            ),
            "kv_cache_dtype": Flag(
                "data type of the KV cache; auto is the weights' dtype, but float16 for bfloat16 weights on a CPU "
                "without bfloat16 arithmetic",
                choices=("bfloat16", "float16", "float32"),
                none_means="auto",
            ),
            "page_size": _count("tokens per block of the KV cache"),
            "max_tokens_per_forward": _count("maximum tokens in one forward"),
            "max_seqs_per_forward": _count("maximum sequences in one forward"),
            "max_num_tokens_per_request": _count(
                "maximum tokens of one sequence, prompt and completion together", none_means="what fits"
            ),
        },
        "compile": {
            "torch_compile": Flag(
                "compile the layers with torch.compile; auto is on for CUDA, where the start goes on without if that "
                "fails; on CPU this replaces our own kernels, which are faster",
                none_means="auto",
            ),
            "use_cudagraphs": Flag("decode with CUDA graphs; auto is on for CUDA devices", none_means="auto"),
            "cudagraph_max_size": _count(
                "sequences of the largest CUDA graph; larger decode steps run without",
                none_means="max_seqs_per_forward",
            ),
            "cudagraph_step": _count("sequences between the sizes of two CUDA graphs"),
            "attention_backend": Flag(
                "attention implementation; auto depends on the device",
                choices=("torch", "cpu", "flashinfer", "reference"),
                none_means="auto",
            ),
        },
        "hydragen": {
            "use_hydragen": Flag(
                "compute attention over a shared prefix once for all its sequences; auto is on where that is faster",
                none_means="auto",
            ),
            "hydragen_min_group_size": _count(
                "minimum sequences of a prefix group", minimum=2, none_means="any that saves time"
            ),
            "hydragen_min_prefix_len": _count("minimum tokens of a shared prefix", none_means="any that saves time"),
        },
        "scheduler": {
            "scheduling_steps_ahead": _count(
                "steps sent to the model ahead of their results; with pipeline stages, steps of each microbatch, at "
                "most two"
            ),
            "deferred_tasks": Flag(
                "when the manager runs deferred tasks (admission, stop strings, prefix groups, length prediction): "
                "auto delays them while the model's queue is short; always and deferred force one mode",
                choices=("always", "deferred"),
                none_means="auto",
            ),
            "max_step_seconds": Flag(
                "time that a step which computes prompts should not exceed, in seconds, so that streams go on beside "
                "them; auto is 0.25, or longer where that would cost 2 % of the throughput, but at most 1 while "
                "anything is streamed",
                minimum=0.001,
                maximum=3600,
                none_means="auto",
            ),
            "greedy_prefill": Flag(
                "fill the rest of each step with prefill tokens; F prefills just fast enough to keep the KV cache full"
            ),
            "prefill_round_up_multiple": _count(
                "round the prefill tokens of a step up to a multiple of this, with greedy_prefill=F"
            ),
            "enable_precise_onboard": Flag(
                "admit sequences by simulating KV usage at every future step; F uses only sums of lengths, which admit "
                "fewer"
            ),
            "precise_onboard_batch_size": _count(
                "maximum sequences that one KV simulation admits; the batch adapts up to this by doubling and halving"
            ),
            "track_early_stopping": Flag("predict completion lengths from finished sequences"),
            "early_stopping_buffer_size": _count("number of latest finished sequences that length prediction uses"),
            "early_stopping_num_prediction_buckets": _count("maximum number of length classes in the predictor"),
            "early_stopping_initial_wait": _count("finished sequences required before the first prediction"),
            "early_stopping_init_mean": Flag(
                "mean share of max_tokens that completions are assumed to use until then; none is all of it",
                minimum=0,
                maximum=1,
            ),
            "early_stopping_init_std": Flag("standard deviation of that share; none is 0", minimum=0, maximum=1),
            "use_spec_allocation": Flag("admit sequences by predicted length; F by maximum length"),
            "spec_allocation_std_buffer_scale": Flag("standard deviations added to each predicted length", minimum=0),
            "spec_allocation_target_kv_cache_utilization": Flag(
                "maximum share of the KV cache that admitted sequences are predicted to use", minimum=0.01, maximum=1
            ),
        },
        "output": {
            "enable_chosen_logprobs": Flag("allow requests for log-probabilities"),
            "max_topk_logprobs": _count("maximum top-k logprobs per token that a request may ask for", minimum=0),
            "stop_string_num_token_lookback": _count(
                "number of latest tokens searched for stop strings; grows to cover the longest stop string"
            ),
            "tool_call_format": Flag(
                "format of the model's tool calls; auto is the format of its chat template",
                choices=("hermes", "llama3"),
                none_means="auto",
            ),
        },
        "server": {
            "host": Flag("address to listen on; 0.0.0.0 allows access from the network"),
            "port": Flag("TCP port to listen on; 0 is any free one", minimum=0, maximum=65535),
            "api_key": Flag(
                "key that clients must send; prefer TOKA_API_KEY, since other users can see the command line",
                none_means="TOKA_API_KEY",
            ),
            "uvicorn_log_level": Flag(
                "log level of the HTTP server", choices=("critical", "error", "warning", "info", "debug", "trace")
            ),
            "log_level": Flag("log level of everything else", choices=("error", "warning", "info", "debug")),
            "stats_report_seconds": Flag("seconds between throughput log lines", minimum=0.1, maximum=86400),
            "trace": Flag(
                "file for a trace of the engine's processes, overwritten; Perfetto and chrome://tracing open it"
            ),
            "trace_first_step": _count("step of the engine with which the trace begins", minimum=0),
            "trace_steps": _count("steps in the trace"),
            "statsd_server_url": Flag("statsd server that receives metrics, as host:port"),
            "data_dir": Flag(
                "directory for files and batches, which survive restarts; by default one for each port, in the user's "
                "data directory",
                none_means="by port",
            ),
            "keep_days": _count("days after which files and finished batches are removed"),
            "api_keys_file": Flag("file of keys that clients may send, one per line, each may have a name before it"),
            "cache_salt_per_key": Flag("share cached prompts only between requests with the same API key"),
            "allowed_hosts": Flag(
                "host names that requests may be sent to, separated by commas, beside localhost and every address "
                "written as numbers; by default any, but none on a loopback address; * allows any",
                none_means="by address",
            ),
            "drain_seconds": _count("time for open requests to finish after the first stop signal", minimum=0),
            "watchdog_seconds": _count("longest time without progress before a process is killed and started again"),
            "max_restarts": _count("consecutive failed restarts of the engine before the server exits", minimum=0),
            "while_restarting": Flag(
                "new requests while the engine restarts wait for it, or are refused with 503",
                choices=("wait", "refuse"),
            ),
        },
        "limits": {
            "max_request_bytes": _count("maximum size of a request body, in bytes", none_means="no limit"),
            "max_body_bytes_in_all": _count(
                "maximum size of all request bodies that are being received or parsed together, in bytes"
            ),
            "max_queued_requests": _count(
                "maximum waiting sequences; each of n samples counts, but a body is accepted whole while fewer wait",
                none_means="no limit",
            ),
            "max_json_values": _count(
                "maximum numbers and strings of a request body; a list or object counts as 8 more, a key as 3 more. "
                "Parsing a million blocks other requests for 150 ms"
            ),
            "max_line_bytes": _count("maximum size of a line of /v1/bulk or of a batch's input file, in bytes"),
            "max_header_bytes": _count("maximum size of a request's headers together, in bytes"),
            "max_url_bytes": _count("maximum size of a request's path and query, in bytes"),
            "max_connections": _count(
                "maximum open connections", none_means="open files, less a reserve, which is also the most"
            ),
            "header_timeout_seconds": _count("longest time for the headers of a connection's first request to arrive"),
            "body_timeout_seconds": _count("longest time for a body to arrive, plus a second for each 64 KiB"),
            "write_timeout_seconds": _count("longest time in which a client receives none of an answer that is sent"),
            "keep_alive_seconds": _count("longest time that a connection stays open between requests"),
            "max_queued_sequences": _count(
                "maximum unfinished sequences, running or waiting; each of n samples counts"
            ),
            "max_queued_tokens": _count(
                "maximum prompt tokens of unfinished requests; a prompt counts once, however many samples"
            ),
            "max_answer_values": _count(
                "maximum tokens of one answer that is not streamed; each log-probability counts as another token"
            ),
            "max_tokenize_chars": _count(
                "maximum characters that a request to /tokenize may have, and token ids of one to /detokenize"
            ),
            "max_stop_strings": _count("maximum stop strings of a request"),
            "max_stop_chars": _count("maximum characters of a stop string"),
            "max_file_bytes": _count("maximum size of an uploaded file, in bytes"),
            "max_batch_lines": _count("maximum lines of a batch's input file"),
        },
    },
    aliases={"kv_cache_size_num_tokens": "kv_cache_num_tokens"},
    not_built=NOT_BUILT,
)
