"""`toka mismatch`: sample in several ways, compute the same tokens' log-probabilities by the reference, and compare."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tokasaurus.checkpoint import resolve_checkpoint
from tokasaurus.flags import FlagError
from tokasaurus.library.connection import ServerError
from tokasaurus.library.engine import EngineError
from tokasaurus.library.llm import LLM
from tokasaurus.library.results import RowsFailed
from tokasaurus.library.sampling import Sampling
from tokasaurus.messages.status import UserError, longest_context
from tokasaurus.mismatch_command.config import MismatchConfig, engine_flags
from tokasaurus.mismatch_command.figures import Compared, ModeFigures, figures_of
from tokasaurus.mismatch_command.picture import draw
from tokasaurus.processes.stop_signals import Stopped, signals_raise
from tokasaurus.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokasaurus.mismatch_command.reference import TransformersReference

_NUM_ALONE = 8
"""Prompts of the mode that has one sequence at a time."""
_SAMPLES = 8
"""Samples of each prompt with a long prefix in common, so that prefix groups form."""
_PREFIX_TOKENS = 256
_CHUNK_TOKENS = 16
"""Largest forward of the mode that cuts prompts into chunks."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A completion as the engine returned it."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: Any
    """float32 [T]."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A way of sampling."""

    name: str
    flags: dict[str, Any]
    """Flags of the engine, besides the user's."""
    temperature: float = 1.0
    is_alone: bool = False
    """One sequence at a time."""
    has_prefix: bool = False
    """Few prompts with a long common prefix, and several samples each."""


MODES = (
    Mode("together", {}),
    Mode("greedy", {}, temperature=0.0),
    Mode("one at a time", {}, is_alone=True),
    Mode("shared prefix, in groups", {"use_hydragen": True}, has_prefix=True),
    Mode("shared prefix, without groups", {"use_hydragen": False}, has_prefix=True),
    Mode("prompts in chunks", {"max_tokens_per_forward": _CHUNK_TOKENS, "max_seqs_per_forward": _CHUNK_TOKENS}),
)


def run_mismatch(config: MismatchConfig, words: list[str]) -> int:
    """Compare, print a table, and write the files; call from the main thread. Returns the exit code. Raises FlagError.

    0: compared, whatever the differences are. 1: not; one line on stderr says why. 2: a flag or the model is
    refused. 128 + N: stopped by signal N."""
    try:
        with signals_raise():
            _run(config, engine_flags(config, words))
    except FlagError:
        raise
    except (ServerError, EngineError, UserError, OSError, RuntimeError, ValueError) as error:
        print(f"toka mismatch: {str(error).partition(chr(10))[0]}", file=sys.stderr)
        return error.exit_code if isinstance(error, EngineError | UserError) else 1
    except Stopped as stopped:
        print("toka mismatch: stopped", file=sys.stderr)
        return 128 + stopped.number
    return 0


def _run(config: MismatchConfig, flags: dict[str, Any]) -> None:
    checkpoint = resolve_checkpoint(
        config.model,
        config.tokenizer,
        _show,
        rope_scaling=config.rope_scaling,
        trust_remote_code=config.trust_remote_code,
    )
    tokenizer = Tokenizer.load(checkpoint.tokenizer_directory)
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in _prompts(config)]
    longest = longest_context(checkpoint.info.context_length, config.max_num_tokens_per_request)
    sampled = {mode.name: some for mode, some in _sample(config, flags, prompts, tokenizer, longest)}
    _show("loading the reference")
    from tokasaurus.mismatch_command.reference import TransformersReference  # torch, which takes a second

    dtype = config.reference_dtype or checkpoint.info.dtype
    reference = TransformersReference(checkpoint.directory, dtype)
    modes = [figures_of(name, _compare(name, some, reference), config.bound) for name, some in sampled.items()]
    _print(modes, config.bound)
    facts = {"model": checkpoint.name, "reference": config.reference, "reference_dtype": dtype, "bound": config.bound}
    if config.json is not None:
        found = {**facts, "modes": [mode.as_json() for mode in modes]}
        Path(config.json).write_text(json.dumps(found, indent=2) + "\n")
    if config.picture is not None:
        Path(config.picture).write_text(draw(modes, f"{checkpoint.name}: engine and {config.reference} in {dtype}"))


def _prompts(config: MismatchConfig) -> list[str]:
    if config.prompts is None:
        return [_built_in(number) for number in range(config.num_prompts)]
    try:
        lines = [line for line in Path(config.prompts).read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise FlagError(f"prompts={config.prompts}: {error}") from None
    if not lines:
        raise FlagError(f"prompts={config.prompts}: has no line with text")
    return lines[: config.num_prompts]


def _built_in(number: int) -> str:
    subjects = ("a river", "the number seven", "an old bridge", "winter", "a letter", "bread", "the moon", "a market")
    forms = (
        "Write a short story about {}, number {}.\n",
        "Question {1}: what should everyone know about {0}?\nAnswer:",
        "{1}. {0}: a poem\n\n",
        "Here is how I would explain {} to a child of {} years: ",
    )
    return forms[number % len(forms)].format(subjects[number // len(forms) % len(subjects)], number + 3)


def _sample(
    config: MismatchConfig,
    flags: dict[str, Any],
    prompts: list[list[int]],
    tokenizer: Tokenizer,
    context_length: int,
) -> Iterator[tuple[Mode, list[Sampled]]]:
    """The completions of each mode; modes with the same flags share an engine."""
    longest = max(map(len, prompts))
    words = " ".join(f"word{number}" for number in range(_PREFIX_TOKENS))
    prefix = tokenizer.encode(words, add_special_tokens=True)
    prefix = prefix[: max(1, min(_PREFIX_TOKENS, context_length - longest - config.max_tokens))]
    with_prefix = [prefix + prompt for prompt in prompts[: max(1, len(prompts) // _SAMPLES)]]
    engine: LLM | None = None
    running: dict[str, Any] | None = None
    try:
        for mode in MODES:
            if mode.flags != running:
                if engine is not None:
                    engine.close()
                _show(f"starting the engine for: {mode.name}")
                engine, running = LLM(show=False, **{**flags, **mode.flags}), mode.flags
            assert engine is not None
            sampling = Sampling(
                max_tokens=config.max_tokens,
                temperature=mode.temperature,
                seed=config.seed,
                n=_SAMPLES if mode.has_prefix else 1,
            )
            chosen = with_prefix if mode.has_prefix else prompts[:_NUM_ALONE] if mode.is_alone else prompts
            batches = [[prompt] for prompt in chosen] if mode.is_alone else [chosen]
            yield mode, [one for batch in batches for one in _generate(engine, batch, sampling)]
    finally:
        if engine is not None:
            engine.close()


def _generate(engine: LLM, prompts: list[list[int]], sampling: Sampling) -> Iterator[Sampled]:
    """Raises ServerError if a prompt cannot be sampled."""
    try:
        results = engine.generate(prompts, sampling, raise_on_error=True)
    except RowsFailed as failed:
        raise ServerError(str(failed)) from None
    for prompt, result in zip(prompts, results, strict=True):
        for sample in result.samples:
            if len(sample.token_ids):
                yield Sampled(prompt, sample.token_ids.tolist(), sample.logprobs)


def _compare(name: str, sampled: Sequence[Sampled], reference: "TransformersReference") -> list[Compared]:
    with _progress(f"reference: {name}", len(sampled)) as advance:
        compared = []
        for one in sampled:
            found = reference.logprobs(one.prompt_ids, one.token_ids)
            compared.append(Compared(one.logprobs.astype("float64"), found))
            advance()
    return compared


@contextmanager
def _progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=total)
        yield lambda: progress.advance(task)


def _print(modes: Sequence[ModeFigures], bound: float) -> None:
    table = Table(title="engine - reference, log-probabilities of sampled tokens", title_justify="left")
    for column in ("mode", "tokens", "mean |d|", "largest |d|", f"above {bound:g}", "KL"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for mode in modes:
        table.add_row(
            *(mode.mode, f"{mode.num_tokens:,}", f"{mode.mean:.2g}", f"{mode.largest:.2g}"),
            *(f"{100 * mode.share_above_bound:.2f} %", f"{mode.kl:.2g}" if mode.mode != "greedy" else "-"),
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def _show(line: str) -> None:
    print(f"toka mismatch: {line}", file=sys.stderr, flush=True)
