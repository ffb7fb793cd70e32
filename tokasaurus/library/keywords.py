"""Keywords of `LLM` and of its methods, for type checkers.

`make reference` makes this file from `tokasaurus/config.py` and the bodies of requests; a test compares them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from typing_extensions import TypedDict


class EngineFlags(TypedDict, total=False):
    """Flags of `toka` that `LLM` takes."""

    tokenizer: str | None
    """Source of the tokenizer, written like model=."""
    trust_remote_code: bool
    """Run the Python code that a tokenizer brings along; a model's own code is never run."""
    dtype: Literal["bfloat16", "float16", "float32", "bf16", "fp16", "f16", "half", "fp32", "f32", "float"] | None
    """Data type of the weights and of computation, but a CPU without bfloat16 arithmetic computes in float32; auto is
    bfloat16, or float32 where bfloat16 would be slow."""
    cpu_isa: Literal["avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx", "neon", "torch"] | None
    """Instruction set of the CPU kernels, which this machine must support; auto is the best one, torch is plain PyTorch
    without our kernels."""
    quantization: Literal["int8", "int4"] | None
    """Quantise a plain checkpoint's linear layers while they are loaded; on CPUs only: int8 with a scale for each
    output, int4 in groups of 64 inputs; embedding and LM head stay plain."""
    quantized_compute: Literal["exact", "int8"] | None
    """How the CPU kernels multiply by quantised weights: exact has the results of the dequantised model; int8 quantises
    activations too and multiplies in integers, which is mostly faster; auto is int8 where the checkpoint says so and
    with quantization=int8."""
    rope_scaling: dict[str, Any] | None
    """Rotary scaling that replaces the model's own, as a JSON object such as {"rope_type":"linear","factor":2.0}; the
    context length follows from it."""
    model_impl: Literal["auto", "native", "transformers"]
    """What computes the model: native is the layers of this project, transformers the model's class there with the
    attention, linear layers and sampling of this project; auto is native where the family has such layers."""
    task: Literal["generate", "embed", "score", "classify", "reward"] | None
    """What the model makes of a text: generate is new tokens, embed vectors, score how well a document meets a query,
    classify classes, reward a score without activation; auto is what the checkpoint is made for."""
    lora: dict[str, Any] | None
    """Adapters (LoRA, as PEFT stores them) that requests may name as their model: a JSON object of names and
    directories, such as {"sql":"adapters/sql"}."""
    max_loras: int | None
    """Adapters that steps may have at a time; requests for further ones wait; 0 refuses adapters."""
    max_lora_rank: int | None
    """Largest rank of an adapter."""
    served_model_name: str | None
    """The model's name in the API."""
    device: Literal["cpu", "cuda", "gpu"] | None
    """Device to run on; auto is cuda if available."""
    dp_size: int | None
    """Replicas of the model (data parallel); auto is one, but on a CPU machine with several memory nodes one for each
    of them."""
    pp_size: int
    """Pipeline stages of a replica."""
    tp_size: int
    """Devices that share each layer of a stage (tensor parallel)."""
    pp_num_buffer_stages: int
    """Microbatches in flight in addition to one per pipeline stage."""
    ep: bool
    """Tensor-parallel ranks have whole experts each, as they do by themselves where the experts' width, or blocks of
    quantised weights, cannot be divided."""
    async_tp_threshold: int | None
    """Tokens per forward from which tensor parallelism overlaps its communication with gemms; needs torch_compile=T,
    tp_size= of 2 or more, and GPUs joined by NVLink."""
    symmetric_all_reduce: bool | None
    """Sum over tensor-parallel ranks through memory that their GPUs share, up to the size where it is measured to be
    faster than NCCL; auto is on where it works, T requires that it works."""
    kv_cache_num_tokens: int | None
    """Size of the KV cache in tokens; auto is, on CUDA, the memory left by weights and the largest forward, on CPU a
    quarter of the available memory."""
    kv_cache_dtype: (
        Literal["bfloat16", "float16", "float32", "int8", "bf16", "fp16", "f16", "half", "fp32", "f32", "float"] | None
    )
    """Data type of the KV cache; auto is the weights' dtype, but float16 for bfloat16 weights on a CPU without bfloat16
    arithmetic; int8, with a scale for each token and KV head, is for the CPU kernels only."""
    page_size: int
    """Tokens per block of the KV cache."""
    max_tokens_per_forward: int
    """Maximum tokens in one forward."""
    max_seqs_per_forward: int
    """Maximum sequences in one forward."""
    max_num_tokens_per_request: int | None
    """Maximum tokens of one sequence, prompt and completion together."""
    torch_compile: bool | None
    """Compile the layers with torch.compile, which replaces our own kernels and is slower; auto compiles on CUDA where
    our Triton kernels do not compute the model's layers, and goes on without if that fails."""
    use_cudagraphs: bool | None
    """Steps replay CUDA graphs; auto is on for CUDA devices."""
    attention_backend: Literal["torch", "cpu", "flashinfer", "reference"] | None
    """Attention implementation; auto depends on the device."""
    use_hydragen: bool | None
    """Compute attention over a shared prefix once for all its sequences; auto is on where that is faster."""
    hydragen_min_group_size: int | None
    """Minimum sequences of a prefix group."""
    hydragen_min_prefix_len: int | None
    """Minimum tokens of a shared prefix."""
    scheduling_steps_ahead: int
    """Steps sent to the model ahead of their results; with pipeline stages, steps of each microbatch, at most two."""
    max_step_seconds: float | None
    """Time that a step which computes prompts should not exceed, in seconds, so that streams go on beside them; auto is
    0.25, or longer where that would cost 2 % of the throughput, but at most 1 while anything is streamed."""
    greedy_prefill: bool
    """Fill the rest of each step with prefill tokens; F prefills just fast enough to keep the KV cache full."""
    enable_precise_onboard: bool
    """Admit sequences by simulating KV usage at every future step; F uses only sums of lengths, which admit fewer."""
    track_early_stopping: bool
    """Predict completion lengths from finished sequences."""
    early_stopping_init_mean: float | None
    """Mean share of max_tokens that completions are assumed to use until then; none is all of it."""
    use_spec_allocation: bool
    """Admit sequences by predicted length; F by maximum length."""
    max_topk_logprobs: int
    """Maximum top-k logprobs per token that a request may ask for."""
    logprobs_mode: Literal["raw", "sampled"]
    """Log-probabilities of sampled tokens where a request does not say which: raw are the model's own, sampled are
    those of the distribution that the token is drawn from, after penalties, masks, temperature and limits."""
    sampling_defaults: Literal["model", "neutral"] | None
    """Sampling parameters where a request says none: model are the ones in generation_config.json or in the GGUF file,
    such as a temperature; neutral are those that change nothing."""
    tool_call_format: (
        Literal[
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
        ]
        | None
    )
    """Format of the model's tool calls; auto is the format of its chat template."""
    request_chat_template: bool
    """Accept chat templates in requests, and render them in processes of their own; a client's program then runs on
    this machine, with limits of time and memory."""
    log_level: Literal["error", "warning", "info", "debug"]
    """Lines on stderr from this level up."""
    log_format: Literal["text", "json"]
    """Lines on stderr: text for people, who see how far the start is on a terminal; json for programs, one object a
    line."""
    request_log: bool
    """Log a line for each request at its end: id, the key's name or the client's address, model, tokens, times and how
    it ended; never a prompt or an answer."""
    stats_report_seconds: float
    """Seconds between throughput log lines."""
    trace: str | None
    """File for a trace of the engine's processes, overwritten; Perfetto and chrome://tracing open it."""
    record: str | None
    """File that keeps the figures of the live page, a line of JSON each second, for toka top and the page to show
    again; an older recording is continued, and at 256 MiB it is renamed to end in .1."""
    price_per_hour: float | None
    """Price of an hour of the whole server, in any currency: the live page tells what jobs cost."""
    trace_first_step: int
    """Step of the engine with which the trace begins."""
    trace_steps: int
    """Steps in the trace."""
    statsd_server_url: str | None
    """Statsd server that receives the figures of the throughput log lines over UDP, as HOST:PORT."""
    vllm_metrics: bool
    """/metrics has the most used figures under vLLM's names as well, for dashboards that read those."""
    otel_endpoint: str | None
    """Collector of OpenTelemetry that receives a trace of each request, as http://HOST:4318."""
    expert_counts: bool
    """Count the tokens of each expert, as a metric; steps run without CUDA graphs and compiled layers."""
    rl: bool
    """Serve the routes for roll-outs: pauses, and new weights from directories of this machine, for every client."""
    keep_days: int
    """Days after which files and finished batches are removed."""
    cache_salt_per_key: bool
    """Share cached prompts only between requests with the same API key."""
    drain_seconds: int
    """Time for open requests and lines of batches to end after the first stop signal."""
    watchdog_seconds: int
    """Longest time without progress before a process is killed and started again."""
    max_restarts: int
    """Consecutive failed restarts of the engine, or of its server process, before toka exits."""
    while_restarting: Literal["wait", "refuse"]
    """New requests while the engine restarts wait for it, or are refused with 503."""
    max_request_bytes: int | None
    """Maximum size of a request body, in bytes."""
    max_queued_requests: int | None
    """Maximum waiting sequences; each of n samples counts, but a body is accepted whole while fewer wait."""
    keep_alive_seconds: int
    """Longest time that a connection stays open between requests."""
    max_queued_sequences: int
    """Maximum unfinished sequences, running or waiting; each of n samples counts."""
    max_queued_tokens: int
    """Maximum prompt tokens of unfinished requests; a prompt counts once, however many samples."""
    max_file_bytes: int
    """Maximum size of an uploaded file, in bytes."""
    max_batch_lines: int
    """Maximum lines of a batch's input file."""


class CompletionOptions(TypedDict, total=False):
    """Other fields of /v1/completions."""

    cache_salt: str | None
    allowed_token_ids: list[int] | None
    bad_words: list[str] | None
    skip_special_tokens: bool | None
    include_stop_str_in_output: bool | None
    no_stop_trim: bool | None
    truncate_prompt_tokens: int | None
    add_special_tokens: bool | None
    request_id: str | None
    rid: str | None
    user: str | None
    metadata: Mapping[str, Any] | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    spaces_between_special_tokens: bool | None
    response_format: Mapping[str, Any] | None
    structured_outputs: Mapping[str, Any] | None
    guided_json: Mapping[str, Any] | str | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    json_schema: Mapping[str, Any] | str | None
    regex: str | None
    ebnf: str | None
    grammar: str | None
    service_tier: str | None
    store: bool | None


class ChatOptions(CompletionOptions, total=False):
    """Other fields of /v1/chat/completions."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    chat_template: str | None
    apply_chat_template_overrides: Mapping[str, Any] | None
    enable_thinking: bool | None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None
    tool_choice: Literal["none", "auto", "required"] | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    separate_reasoning: bool | None
    include_reasoning: bool | None
    prediction: Mapping[str, Any] | None
    prompt_cache_options: Mapping[str, Any] | None
    prompt_cache_retention: str | None
    verbosity: Literal["low", "medium", "high"] | None
