"""Other programs' command lines: what users of vLLM, SGLang, llama.cpp and Ollama type, and what `toka` makes of it.

HABITS is read by the command line, by its test, which runs every example, and by docs/command_line.md. What has one
meaning here is accepted; anything else is refused with the flag to use."""

import difflib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from tokasaurus.config import ServerConfig
from tokasaurus.flags import FlagError, number_with_suffix


def plain_name(option: str) -> str:
    """An option's name written as our flags are: `--max-model-len` -> max_model_len."""
    return option.lstrip("-").replace("-", "_").replace(".", "_")


def _same(text: str) -> str:
    return text


def _length(text: str) -> str:
    """-1 and auto are none."""
    return "None" if text in ("-1", "auto") else number_with_suffix(text)


def _sampling_defaults(text: str) -> str:
    return {"vllm": "neutral", "auto": "model", "openai": "neutral"}.get(text, text)


def _tool_format(text: str) -> str:
    # theirs for Mistral reads both of its formats
    known = {"llama3_json": "llama3", "qwen": "hermes", "qwen25": "hermes", "phi4_mini_json": "phi4_mini"}
    return {**known, "mistral": "None"}.get(text, text)


def _cache_type(text: str) -> str:
    """Any type of 8 bits is int8."""
    return "int8" if text in ("fp8", "fp8_e4m3", "fp8_e5m2") else text


def _aliases(text: str) -> str:
    if text.lower() not in ("t", "true", "yes", "on", "f", "false", "no", "off"):
        raise FlagError(f"any_model={text}: must be T or F")
    return "*" if text.lower() in ("t", "true", "yes", "on") else "None"


def _list_of_words(text: str) -> str:
    """A JSON list of texts with commas between them."""
    try:
        return ",".join(json.loads(text))
    except (ValueError, TypeError):
        return text


@dataclass(frozen=True, slots=True)
class Habit:
    """One row. Exactly one of flag, words and refusal says what is made of it."""

    program: str
    """Whose command line it is from."""
    example: str
    """The option or sub-command with an example value, as typed after `toka`."""
    means: str
    """Our words for the example, in one line; empty if `toka` always does it, or if the example is refused."""
    names: tuple[str, ...]
    """Names of the option, as plain_name writes them, or of the sub-command."""
    is_command: bool = False
    flag: str = ""
    """Takes the option's value."""
    convert: Callable[[str], str] = _same
    """Makes the flag's value of the option's value."""
    words: tuple[str, ...] | None = None
    """Take the place of an option without a value, or of a sub-command."""
    refusal: str = ""
    """What to do instead."""
    takes_value: bool = False
    is_truth_value: bool = False
    """The value is T or F, and T if it is left out."""


def _names(example: str, also: str) -> tuple[str, ...]:
    return tuple(plain_name(option) for option in [re.split("[ =]", example)[0], *also.split()])


def _value(
    program: str,
    example: str,
    means: str,
    also: str = "",
    convert: Callable[[str], str] = _same,
    is_truth_value: bool = False,
) -> Habit:
    """An option whose value one of our flags takes. also: other names."""
    names, flag = _names(example, also), means.partition("=")[0]
    return Habit(
        program,
        example,
        means,
        names,
        flag=flag,
        convert=convert,
        takes_value=True,
        is_truth_value=is_truth_value,
    )


def _switch(program: str, example: str, means: str = "", also: str = "") -> Habit:
    """An option without a value."""
    return Habit(program, example, means, _names(example, also), words=tuple(means.split()))


def _refused(program: str, example: str, refusal: str, also: str = "") -> Habit:
    takes_value = " " in example
    return Habit(program, example, "", _names(example, also), refusal=refusal, takes_value=takes_value)


def _command(program: str, example: str, means: str, words: str = "", also: str = "") -> Habit:
    """words: in place of the sub-command."""
    return Habit(program, example, means, (example.split()[0], *also.split()), True, words=tuple(words.split()))


def _no_command(program: str, example: str, refusal: str, also: str = "") -> Habit:
    return Habit(program, example, "", (example.split()[0], *also.split()), True, refusal=refusal)


_IN_REQUESTS = "a field of requests, not a flag of the server"
_KV_SIZE = (
    "toka sizes the KV cache by the memory that is left after loading; kv_cache_num_tokens= sets its size in tokens"
)

HABITS = (
    _command("vLLM, SGLang", "serve Qwen/Qwen3-0.6B", "model=Qwen/Qwen3-0.6B"),
    _command("Ollama", "run Qwen/Qwen3-0.6B", "chat model=Qwen/Qwen3-0.6B", "chat"),
    _command("Ollama", "pull Qwen/Qwen3-0.6B", "download model=Qwen/Qwen3-0.6B", "download"),
    _command("Ollama", "show Qwen/Qwen3-0.6B", "plan model=Qwen/Qwen3-0.6B", "plan"),
    _no_command("Ollama", "list", "toka keeps no list; downloaded models are in the Hugging Face cache", "ls"),
    _no_command("Ollama", "stop llama3", "Ctrl-C or SIGTERM ends a server, which serves one model"),
    _no_command("Ollama", "rm llama3", "remove the model's directory from the Hugging Face cache"),
    _command(
        "vLLM",
        "run-batch -i in.jsonl -o out.jsonl",
        "batch input=in.jsonl output=out.jsonl",
        "batch",
    ),
    _no_command("vLLM", "complete", "toka ping prompt=TEXT completes a text"),
    _value("SGLang", "--model-path Qwen/Qwen3-0.6B", "model=Qwen/Qwen3-0.6B"),
    _value("llama.cpp", "-m tiny.gguf", "model=tiny.gguf"),
    _value("llama.cpp", "-hf Qwen/Qwen3-0.6B", "model=Qwen/Qwen3-0.6B", "-hfr --hf-repo"),
    _value("SGLang", "--tokenizer-path Qwen/Qwen3-0.6B", "tokenizer=Qwen/Qwen3-0.6B"),
    _value("llama.cpp", "--alias tiny", "served_model_name=tiny", "-a"),
    _value("vLLM", "--max-model-len 8k", "max_num_tokens_per_request=8000", convert=_length),
    _value("SGLang", "--context-length 8192", "max_num_tokens_per_request=8192", convert=_length),
    _refused(
        "llama.cpp",
        "-c 8192",
        "there the tokens of all slots together, which is kv_cache_num_tokens= here; max_num_tokens_per_request= "
        "limits one sequence",
        "--ctx-size",
    ),
    _value("tokasaurus", "any_model=T", "model_aliases=*", convert=_aliases, is_truth_value=True),
    _value("vLLM, SGLang", "--tensor-parallel-size 2", "tp_size=2", "-tp"),
    _value("vLLM, SGLang", "--pipeline-parallel-size 2", "pp_size=2", "-pp"),
    _value("vLLM, SGLang", "--data-parallel-size 2", "dp_size=2", "-dp"),
    _refused("vLLM", "--gpu-memory-utilization 0.9", _KV_SIZE),
    _refused("SGLang", "--mem-fraction-static 0.8", _KV_SIZE),
    _value("SGLang", "--max-total-tokens 100000", "kv_cache_num_tokens=100000"),
    _refused("vLLM", "--num-gpu-blocks-override 1000", "kv_cache_num_tokens= sets the size of the KV cache, in tokens"),
    _value("vLLM", "--max-num-seqs 256", "max_seqs_per_forward=256"),
    _value("SGLang", "--max-running-requests 256", "max_seqs_per_forward=256"),
    _value("llama.cpp", "-np 8", "max_seqs_per_forward=8", "--parallel"),
    _value("vLLM", "--max-num-batched-tokens 4096", "max_tokens_per_forward=4096", convert=_length),
    _refused(
        "SGLang",
        "--chunked-prefill-size 4096",
        "max_tokens_per_forward= limits a forward, its prompt tokens and sequences together",
        "--max-prefill-tokens",
    ),
    _refused("llama.cpp", "-b 2048", "max_tokens_per_forward= limits the tokens of a forward", "--batch-size"),
    _refused("llama.cpp", "-ub 512", "max_tokens_per_forward= limits the tokens of a forward", "--ubatch-size"),
    _switch("vLLM", "--enforce-eager", "use_cudagraphs=F torch_compile=F"),
    _switch("SGLang", "--disable-cuda-graph", "use_cudagraphs=F"),
    _switch("SGLang", "--enable-torch-compile", "torch_compile=T"),
    _value("vLLM, SGLang", "--dtype half", "dtype=float16"),
    _value("vLLM, SGLang", "--kv-cache-dtype fp8", "kv_cache_dtype=int8", convert=_cache_type),
    _value("vLLM", "--generation-config vllm", "sampling_defaults=neutral", convert=_sampling_defaults),
    _value("SGLang", "--sampling-defaults openai", "sampling_defaults=neutral", convert=_sampling_defaults),
    _refused(
        "llama.cpp",
        "-ctk f16",
        "kv_cache_dtype= is the data type of keys and values",
        "-ctv --cache-type-k --cache-type-v",
    ),
    _refused(
        "vLLM",
        "-q awq",
        "a checkpoint that is quantised is recognised by itself; quantization=int8 or int4 quantises a plain one",
    ),
    _value("vLLM", "--block-size 16", "page_size=16"),
    _switch("vLLM", "--enable-prefix-caching"),
    _switch("vLLM", "--enable-chunked-prefill"),
    _switch("llama.cpp", "--cont-batching", also="-cb"),
    _refused("vLLM", "--no-enable-prefix-caching", "prompts are always cached; cache_salt_per_key=T shares them less"),
    _refused("SGLang", "--disable-radix-cache", "prompts are always cached; cache_salt_per_key=T shares them less"),
    _refused("vLLM", "--swap-space 4", "toka moves no KV cache to other memory; kv_cache_num_tokens= sets its size"),
    _refused("vLLM, SGLang", "--cpu-offload-gb 8", "toka keeps all weights on the device; tp_size= or pp_size= divide"),
    _value("vLLM", "--max-logprobs 20", "max_topk_logprobs=20"),
    _switch("vLLM", "--enable-auto-tool-choice"),
    _value("vLLM, SGLang", "--tool-call-parser llama3_json", "tool_call_format=llama3", convert=_tool_format),
    _refused("vLLM, SGLang", "--reasoning-parser qwen3", "reasoning is recognised by the model's chat template"),
    _refused(
        "vLLM, SGLang",
        "--chat-template chat.jinja",
        "the model's directory has it; with request_chat_template=T, requests may bring one",
    ),
    _refused("vLLM, SGLang", "--download-dir /models", "the variable HF_HOME names the directory of downloads"),
    _refused("vLLM, SGLang", "--seed 1", _IN_REQUESTS, "--random-seed -s"),
    _refused("llama.cpp", "-n 100", "max_tokens, " + _IN_REQUESTS, "--predict --n-predict"),
    _refused("llama.cpp", "--temp 0.5", "temperature, " + _IN_REQUESTS, "--temperature"),
    _value("vLLM", "--allowed-origins '[\"*\"]'", "cors_origins=*", convert=_list_of_words),
    _value("llama.cpp", "--api-key-file keys.txt", "api_keys_file=keys.txt"),
    _refused(
        "vLLM",
        "--distributed-executor-backend mp",
        "toka starts a process for each device of this machine by itself",
        "--nnodes --node-rank",
    ),
    _switch("vLLM", "--disable-log-requests", also="--no-enable-log-requests"),
    _switch("vLLM", "--enable-log-requests", "request_log=T"),
    _refused("vLLM", "--disable-log-stats", "log_level=warning leaves out the throughput lines"),
    _switch("SGLang, llama.cpp", "--enable-metrics", also="--metrics"),
    _refused("llama.cpp", "-ngl 99", "device=cuda or device=cpu runs the whole model", "--gpu-layers --n-gpu-layers"),
    _refused("llama.cpp", "-t 8", "the variable OMP_NUM_THREADS sets the threads of a CPU worker", "--threads"),
    _refused("llama.cpp", "-fa on", "attention_backend= chooses the implementation of attention", "--flash-attn"),
    _switch("llama.cpp", "--jinja"),
    _switch("llama.cpp", "--mlock", also="--no-mmap"),
    _value("vLLM", "-i in.jsonl", "input=in.jsonl", "--input-file"),
    _value("vLLM", "-o out.jsonl", "output=out.jsonl", "--output-file"),
)

OPTIONS = {name: habit for habit in HABITS if not habit.is_command for name in habit.names}
"""Options by plain name."""
COMMANDS = {name: habit for habit in HABITS if habit.is_command for name in habit.names}
"""Sub-commands by name."""


def flag_meant(name: str) -> str:
    """What to write in place of a flag of the server that there is not; begins with punctuation, empty if nothing is
    like it."""
    habit = OPTIONS.get(plain_name(name))
    if habit is not None and habit.refusal:
        return f": {habit.refusal}"
    close = difflib.get_close_matches(name, ServerConfig.names(), n=1)
    meant = habit.means.split() if habit is not None else []
    names = [word.partition("=")[0] for word in meant] or close
    return f", did you mean {' and '.join(names)}?" if names else ""
