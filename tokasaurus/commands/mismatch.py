"""`toka mismatch`: sample in several ways, compute the same tokens' log-probabilities by the reference, and compare."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tokasaurus.checkpoint import read_model_info, resolve_checkpoint, weight_files
from tokasaurus.checkpoint.gguf.model import is_gguf
from tokasaurus.checkpoint.quantized.config import QUANTIZATION_KEYS
from tokasaurus.config import FLAGS_OF_ACCESS, ServerConfig
from tokasaurus.flags import FlagError, count, flag
from tokasaurus.messages.status import UserError, longest_context
from tokasaurus.processes.stop_signals import Stopped, signals_raise

if TYPE_CHECKING:  # the functions that compute import the library, torch and transformers: they take seconds
    from transformers import PreTrainedModel

    from tokasaurus.library.llm import LLM
    from tokasaurus.library.sampling import Sampling
    from tokasaurus.text.tokenizer import Tokenizer

# How others reach a server, and what the modes set themselves.
_NOT_HERE = (
    *(*FLAGS_OF_ACCESS, "api_key", "rl", "logprobs_mode", "sampling_defaults"),
    *("use_hydragen", "hydragen_min_group_size", "hydragen_min_prefix_len"),
)


class MismatchConfig(ServerConfig, without=_NOT_HERE):
    """The flags of a comparison, checked by `finalize`."""

    reference: str = flag(
        "transformers", "what the log-probabilities are compared with", choices=("transformers",), heading="mismatch"
    )
    reference_dtype: str | None = flag(
        None,
        "data type in which the reference computes",
        choices=("bfloat16", "float16", "float32"),
        none_means="of the model's weights",
    )
    prompts: str | None = flag(None, "file with one prompt a line", none_means="some that are built in")
    num_prompts: int = count(64, "prompts that are sampled at once; 8 of them one at a time")
    max_tokens: int = count(64, "tokens of each completion")
    bound: float = flag(0.1, "differences above it are counted", minimum=0)
    seed: int = flag(0, "of the sampling", minimum=0)
    json: str | None = flag(None, "file for all figures, as JSON", none_means="none")
    picture: str | None = flag(None, "file for a picture of them, an SVG", none_means="none")

    log_level: str = ServerConfig.declared("log_level", default="warning")

    @classmethod
    def why_not_here(cls, name: str) -> str | None:
        return "toka mismatch sets it itself, or nobody else reaches its engine" if name in _NOT_HERE else None


_OWN_FLAGS = [name for name, flag in MismatchConfig.flags.items() if flag.heading == "mismatch"]


def engine_flags(config: MismatchConfig, words: list[str]) -> dict[str, Any]:
    """The flags of the engine that the words name, and the defaults of `toka mismatch` for it."""
    return {
        "sampling_defaults": "neutral",
        "log_level": config.log_level,
        **config.named_in(words, without=(*_OWN_FLAGS, *_NOT_HERE)),
    }


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

POSITIONS_PER_PART = 16


@dataclass(frozen=True, slots=True)
class Compared:
    """The log-probabilities of one completion's tokens, both float64 [T]."""

    sampled: NDArray[np.float64]
    """The engine's, as it returned them with the tokens."""
    reference: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PartFigures:
    """Differences |d| of the tokens at some positions of all completions; d as in ModeFigures."""

    first_position: int
    num_tokens: int
    mean: float
    largest: float


@dataclass(frozen=True, slots=True)
class ModeFigures:
    """Differences of one way of sampling. d is the engine's log-probability minus the reference's."""

    mode: str
    num_sequences: int
    num_tokens: int
    mean: float
    """Mean of |d|."""
    largest: float
    """Largest |d|."""
    share_above_bound: float
    """Share of the tokens with |d| above the bound."""
    kl: float
    """KL(engine || reference) of the distribution that tokens are drawn from; at temperature 1 only.

    Estimated from the tokens as the mean of exp(-d) - 1 + d, which is never negative
    (http://joschu.net/blog/kl-approx.html, k3)."""
    longest_ratio: float
    """Largest of exp(|d|): the weight of a token in an importance ratio."""
    parts: tuple[PartFigures, ...]
    """Figures of every POSITIONS_PER_PART positions of the completions."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def figures_of(mode: str, compared: Sequence[Compared], bound: float) -> ModeFigures:
    """compared: of completions with tokens, at least one."""
    differences = [one.sampled - one.reference for one in compared]
    every = np.concatenate(differences)
    sizes = np.abs(every)
    return ModeFigures(
        mode=mode,
        num_sequences=len(compared),
        num_tokens=len(every),
        mean=float(sizes.mean()),
        largest=float(sizes.max()),
        share_above_bound=float((sizes > bound).mean()),
        kl=float((np.expm1(-every) + every).mean()),
        longest_ratio=float(np.exp(sizes.max())),
        parts=tuple(_parts_of(differences)),
    )


def _parts_of(differences: Sequence[NDArray[np.float64]]) -> list[PartFigures]:
    parts = []
    for first in range(0, max(map(len, differences)), POSITIONS_PER_PART):
        sizes = np.abs(np.concatenate([one[first : first + POSITIONS_PER_PART] for one in differences]))
        parts.append(PartFigures(first, len(sizes), float(sizes.mean()), float(sizes.max())))
    return parts


class TransformersReference:
    """A checkpoint in transformers, on a GPU if torch has one. Quantised weights are dequantised for it."""

    def __init__(self, directory: Path, dtype: str) -> None:
        import torch
        import transformers
        from transformers import AutoConfig, AutoModelForCausalLM

        from tokasaurus.model.decoder.tensor_files import open_files, read_shard

        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        files, torch_dtype = weight_files(directory), getattr(torch, dtype)
        model: PreTrainedModel
        quantization = None if is_gguf(files[0]) else read_model_info(directory).quantization
        if is_gguf(files[0]) or quantization is not None:
            tensors = {
                name: read_shard(file, name, tuple(slice(None) for _ in file.shape(name))).to(torch_dtype)
                for file in open_files(files, quantization)
                for name in file.names()
            }
            config = AutoConfig.from_pretrained(directory)
            for key in QUANTIZATION_KEYS:
                vars(config).pop(key, None)
            family = getattr(transformers, config.architectures[0])  # the Auto classes take no tensors
            model = family.from_pretrained(None, config=config, state_dict=tensors, dtype=torch_dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch_dtype)
        self._model = model.to(self._device).eval()

    def logprobs(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> NDArray[np.float64]:
        """Log-probability of each of the T tokens after the prompt, float64 [T], computed in float32 from the model's
        logits."""
        import torch

        ids = torch.tensor([[*prompt_ids, *token_ids]], device=self._device)
        with torch.inference_mode():
            logits = self._model(ids).logits[0, len(prompt_ids) - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(1, ids[0, len(prompt_ids) :].unsqueeze(1))
        found: NDArray[np.float64] = chosen[:, 0].double().cpu().numpy()
        return found


def run_mismatch(config: MismatchConfig, words: list[str]) -> int:
    """Compare, print a table, and write the files; call from the main thread. Returns the exit code. Raises FlagError.

    0: compared, whatever the differences are. 1: not; one line on stderr says why. 2: a flag or the model is
    refused. 128 + N: stopped by signal N."""
    from tokasaurus.library.connection import ServerError
    from tokasaurus.library.engine import EngineError

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
    from tokasaurus.text.tokenizer import Tokenizer

    checkpoint = resolve_checkpoint(
        config.model,
        config.tokenizer,
        _show,
        rope_scaling=config.rope_scaling,
        impl=config.model_impl,
        trust_remote_code=config.trust_remote_code,
    )
    tokenizer = Tokenizer.load(checkpoint.tokenizer_directory)
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in _prompts(config)]
    longest = longest_context(checkpoint.info.context_length, config.max_num_tokens_per_request)
    sampled = {mode.name: some for mode, some in _sample(config, flags, prompts, tokenizer, longest)}
    _show("loading the reference")
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
    tokenizer: "Tokenizer",
    context_length: int,
) -> Iterator[tuple[Mode, list[Sampled]]]:
    """The completions of each mode; modes with the same flags share an engine."""
    from tokasaurus.library.llm import LLM
    from tokasaurus.library.sampling import Sampling

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


def _generate(engine: "LLM", prompts: list[list[int]], sampling: "Sampling") -> Iterator[Sampled]:
    """Raises ServerError if a prompt cannot be sampled."""
    from tokasaurus.library.connection import ServerError
    from tokasaurus.library.results import RowsFailed

    try:
        results = engine.generate(prompts, sampling, raise_on_error=True)
    except RowsFailed as failed:
        raise ServerError(str(failed)) from None
    for prompt, result in zip(prompts, results, strict=True):
        for sample in result.samples:
            if len(sample.token_ids):
                yield Sampled(prompt, sample.token_ids.tolist(), sample.logprobs)


def _compare(name: str, sampled: Sequence[Sampled], reference: TransformersReference) -> list[Compared]:
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


_WIDTH, _ROW, _LEFT, _PLOT = 860, 26, 230, 240
_COLORS = ("#1b6ca8", "#c8553d", "#588157", "#8e5ea2", "#d4a017", "#33658a", "#a23b72")


def draw(modes: Sequence[ModeFigures], title: str) -> str:
    """An SVG."""
    bars, lines = _bars(modes, 50), _lines(modes, 90 + _ROW * len(modes))
    height = 130 + _ROW * len(modes) + _PLOT
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif"'
    return "\n".join(
        [
            f'{head} font-size="13">',
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
            _text(20, 26, title, "font-weight:bold"),
            *bars,
            *lines,
            "</svg>\n",
        ]
    )


def _bars(modes: Sequence[ModeFigures], top: int) -> list[str]:
    """A bar of the mean for each mode, with a mark where the largest difference would need another scale."""
    longest = max(mode.mean for mode in modes) or 1.0
    drawn = []
    for number, mode in enumerate(modes):
        y, width = top + _ROW * number, 300 * mode.mean / longest
        drawn += [
            _text(20, y + 14, mode.mode),
            f'<rect x="{_LEFT}" y="{y + 2}" width="{width:.1f}" height="{_ROW - 8}" fill="{_color(number)}"/>',
            _text(int(_LEFT + width + 8), y + 14, f"mean {mode.mean:.2g}, largest {mode.largest:.2g}"),
        ]
    return drawn


def _lines(modes: Sequence[ModeFigures], top: int) -> list[str]:
    """The mean by position."""
    highest = max(part.mean for mode in modes for part in mode.parts) or 1.0
    last = max(part.first_position for mode in modes for part in mode.parts) or 1
    bottom, right = top + _PLOT - 40, _WIDTH - 40
    drawn = [
        _text(20, top, "mean difference by position in the completion", "font-weight:bold"),
        f'<path d="M{_LEFT},{top + 10} V{bottom} H{right}" stroke="black" fill="none"/>',
        _text(20, top + 24, f"{highest:.2g}"),
        _text(20, bottom, "0"),
        _text(right - 40, bottom + 18, f"token {last}"),
    ]
    for number, mode in enumerate(modes):
        points = " ".join(
            f"{_LEFT + (right - _LEFT) * part.first_position / last:.1f},"
            f"{bottom - (bottom - top - 20) * part.mean / highest:.1f}"
            for part in mode.parts
        )
        drawn.append(f'<polyline points="{points}" stroke="{_color(number)}" fill="none" stroke-width="2"/>')
    return drawn


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]


def _text(x: int, y: int, text: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" style="{style}">{escape(text)}</text>'
