"""docs/command_line.md, with the habits of tokasaurus/habits.py."""

from pathlib import Path

from tokasaurus.habits import HABITS, Habit

PATH = Path(__file__).parents[2] / "docs" / "command_line.md"

TEXT = """\
# The command line

`make reference` makes this page; its last list is `tokasaurus/habits.py`, which the command line reads and a test runs.

## Flags

A flag is written `name=value`, or as an option: `max_seqs_per_forward=8`, `--max-seqs-per-forward 8` and
`--max-seqs-per-forward=8` are one, `--rl` is `rl=T`, and `--no-greedy-prefill` is `greedy_prefill=F`. The model may
stand alone: `toka Qwen/Qwen3-0.6B`, `toka serve NAME`, `toka download NAME`. [Flags](flags.md) lists all flags of the
server; `toka --help` and `toka SUBCOMMAND --help` print a command's flags.

A whole number may end in k, m or g, or in K, M or G: 8k is 8,000 and 8K is 8,192, so `kv_cache_num_tokens=64K` is
65,536. `dtype=` and `kv_cache_dtype=` also know `bf16`, `fp16`, `half`, `fp32` and `float`, and `device=gpu` is
`device=cuda`.

Everything that is wrong is told in one go, a line for each, and the command ends with exit code 2; so is a flag that is
given twice.

## Environment and file

Every flag is also an environment variable and an entry in a YAML file. The first of these that sets it counts:

1. the command line: `port=8080`
2. the environment: `TOKA_PORT=8080`; a variable that is empty sets nothing
3. the file that `config=FILE` or `TOKA_CONFIG` names: `port: 8080`
4. the default

```yaml
# toka config=server.yaml
model: Qwen/Qwen3-0.6B
max_seqs_per_forward: 512
greedy_prefill: false
model_aliases: [small, qwen]
rope_scaling: {rope_type: linear, factor: 2.0}
```

- One file and one environment serve all commands; each takes the flags that it has. Beside `base_url=`, flags for
  starting a server are passed over.
- Where a flag means another thing than the server's of the same name, its variable and its entry in a file are
  others: `model=` of `toka ping` is `TOKA_SERVED_MODEL_NAME`, of `toka chat` `TOKA_CHAT_MODEL`, and `record=`
  of `toka top` is `TOKA_TOP_RECORD`.
- A variable that begins with `TOKA_` and is no flag of any command is warned of, except what Kubernetes sets beside a
  service named `toka`, such as `TOKA_PORT=tcp://10.0.0.1:80`.
- An error names the variable, or the file and the line. It never shows a key.
- `--print-config` prints every flag with its value and where that is from, as a file for `config=`, without keys.
- `LLM(...)` takes flags as arguments: neither the environment nor a file changes them.

## A conversation

`toka chat` converses in the terminal with the server that `port=`, `unix_socket=` or `base_url=` names, by default one
on this machine. `toka chat model=NAME`, or `toka run NAME`, loads a model in processes of its own. Reasoning is
dimmed. Ctrl-C stops an answer, not the conversation. `/system TEXT` sets instructions, `/clear` forgets the
conversation, `/quit` or Ctrl-D ends.

Input that is no terminal is one message, and only its answer is printed:

```
echo 'Name three rivers.' | toka chat max_tokens=100
```

`toka ping TEXT` sends one request, shows the answer while it arrives, and then its times. `toka ping @question.txt`
sends what is in a file, `toka ping -` what comes from standard input; so does `prompt=` of `toka map`.
`toka ping` and `toka chat` take the key of `TOKA_API_KEY` or else of `OPENAI_API_KEY`.

## What cannot run

A start is refused within a second or two, before weights are fetched or read and before a process is started, if

- `device=cuda` finds no CUDA device, or `dp_size`, `pp_size` and `tp_size` need more devices than there are
- `tp_size` or `pp_size` does not divide the model: the line lists the sizes that do
- `kv_cache_num_tokens`, `max_seqs_per_forward` or `max_tokens_per_forward` alone needs more memory than there is: the
  line says how many there may be at most

Workers then measure what fits exactly. `toka plan` says it for devices that are not here.

## What runs here

```
$ toka ps
ADDRESS                 MODEL          STATE      UP           PID
http://127.0.0.1:10210  Qwen/Qwen3-8B  ready      52 min 31 s  27130
unix:/run/toka/socket   demo           not ready  12 s         30112
$ toka models
Qwen3-8B  40,960 tokens  Qwen/Qwen3-8B  tokasaurus
```

`toka ps` finds the user's servers by their processes, also those of `LLM` and of `toka batch`. `PID` is the process
that takes [signals](operations.md#processes). A server that is `not ready` starts or ends; a `silent` one does not
answer within a second; a `private` one has no address. `toka models` names the models of one server, with the longest
request, the checkpoint and the owner; it takes the address as `toka ping` does. Both print JSON with `json=T`.

## Help and completion

`toka --help` shows the 15 flags that matter for most servers, and `--help-all` all of them; the same goes for a
sub-command. `toka help ping` is `toka ping --help`.

`toka completion` prints a script for bash, zsh or fish that completes sub-commands, flags, and values where there are
few:

```
source <(toka completion bash)                                      # in ~/.bashrc
source <(toka completion zsh)                                       # in ~/.zshrc, after compinit
toka completion fish > ~/.config/fish/completions/toka.fish
```

## Habits of other programs

What has one meaning here is accepted. Anything else ends with exit code 2 and says what to do instead. Options may
also be written `name=value`, such as `max_model_len=8192`, and stand in a file. As typed after `toka` (by users of):

"""


def page() -> str:
    """The whole page."""
    typed: dict[str, list[str]] = {}
    """What toka makes of it → what is typed, with its program."""
    for habit in HABITS:
        typed.setdefault(_made_of(habit), []).append(f"`{habit.example}` ({habit.program})")
    return TEXT + "".join(f"- {', '.join(examples)}: {made}\n" for made, examples in typed.items())


def _made_of(habit: Habit) -> str:
    if habit.refusal:
        return f"refused: {habit.refusal}"
    if habit.is_command:
        return f"`toka {habit.means}`"
    return f"`{habit.means}`" if habit.means else "nothing: it is always so"
