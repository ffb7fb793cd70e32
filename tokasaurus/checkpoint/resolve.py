"""Resolves the model that the user named to a checkpoint on disk."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokasaurus.checkpoint.cache import expand_home
from tokasaurus.checkpoint.demo_model import NAME as DEMO_NAME
from tokasaurus.checkpoint.demo_model import demo_directory
from tokasaurus.checkpoint.end_tokens import with_tokenizer_end
from tokasaurus.checkpoint.errors import CheckpointError
from tokasaurus.checkpoint.hub import download_files, is_repo_id
from tokasaurus.checkpoint.info import ModelInfo, notes_on_settings, read_model_info
from tokasaurus.checkpoint.json_files import Fields
from tokasaurus.checkpoint.tied_embeddings import fit_to_tensors
from tokasaurus.checkpoint.tokenizer_files import CODE_PATTERN, TOKENIZER_PATTERNS, native_tokenizer
from tokasaurus.checkpoint.weight_files import SINGLE_NAME, unread_index, weight_file_names, weight_files

logger = logging.getLogger(__name__)

OnPhase = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk."""

    name: str
    """The model's own name, under which it is served by default."""
    directory: Path
    """Contains config.json and the *.safetensors files."""
    tokenizer_directory: Path
    """Contains tokenizer.json and tokenizer_config.json, as AutoTokenizer reads the model's own files."""
    info: ModelInfo


def _ignore_phase(_: str) -> None: ...


def resolve_checkpoint(
    model: str | None,
    tokenizer: str | None = None,
    on_phase: OnPhase = _ignore_phase,
    *,
    rope_scaling: Fields | None = None,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Locate the model's files, downloading and converting them if necessary.

    model: a directory in Hugging Face format, a .gguf file, or a Hugging Face repository id; None = the demo model.
    tokenizer: likewise, the model whose tokenizer to use; None = the model's own.
    on_phase: called with a one-line description before each phase that takes long.
    rope_scaling: the flag, which replaces the model's rotary scaling.
    trust_remote_code: run the Python code that a tokenizer brings along.
    Raises CheckpointError if anything is missing, unreachable or not supported, and FlagRefused.
    """
    patterns = [*TOKENIZER_PATTERNS, *([CODE_PATTERN] if trust_remote_code else [])]
    if model is None:
        name, directory = DEMO_NAME, demo_directory(on_phase)
    else:
        name, directory = _locate(model, on_phase, patterns, rope_scaling)
    # What is wrong with the files raises here, in the parent, rather than in the worker.
    info = fit_to_tensors(read_model_info(directory, rope_scaling), weight_files(directory), on_phase)
    for line in (unread_index(directory), *notes_on_settings(directory, rope_scaling)):
        if line is not None:
            logger.warning(line)
    tokenizer_directory = directory if tokenizer is None else _locate_tokenizer(tokenizer, on_phase, patterns)
    named = model if tokenizer is None else tokenizer
    is_converted = named is None or (named.lower().endswith(".gguf") and not Path(named).expanduser().is_dir())
    if not is_converted:  # the conversion of GGUF writes the tokenizer as it must be
        tokenizer_directory = native_tokenizer(tokenizer_directory, on_phase, trust_remote_code)
    return Checkpoint(name, directory, tokenizer_directory, with_tokenizer_end(info, tokenizer_directory))


def _locate(model: str, on_phase: OnPhase, patterns: list[str], rope_scaling: Fields | None) -> tuple[str, Path]:
    """The model's name, and the directory with its configuration and weights. patterns: for its other files."""
    local = _locate_local("model", model, on_phase)
    if local is not None:
        name = expand_home("model", model).resolve()
        return (name.stem if name.is_file() else name.name), local
    on_phase(f"looking up {model}")
    # Configuration first, so that an unsupported model is refused before gigabytes are downloaded.
    directory = download_files(model, patterns)
    read_model_info(directory, rope_scaling)
    on_phase(f"downloading the weights of {model}")
    # Whether the repository has the single file, which is preferred to an index, is only known once it is asked for.
    directory = download_files(model, [*patterns, SINGLE_NAME], revision=directory.name)
    names = weight_file_names(directory)
    if names != [SINGLE_NAME]:
        directory = download_files(model, [*patterns, *names], revision=directory.name)
    return model, directory


def _locate_tokenizer(tokenizer: str, on_phase: OnPhase, patterns: list[str]) -> Path:
    local = _locate_local("tokenizer", tokenizer, on_phase)
    if local is not None:
        return local
    on_phase(f"looking up the tokenizer of {tokenizer}")
    return download_files(tokenizer, patterns)


def _locate_local(flag: str, name: str, on_phase: OnPhase) -> Path | None:
    """The directory, if `name` is a local directory or a .gguf file; None if it is a repository id."""
    path = expand_home(flag, name)
    if path.is_dir():
        return path.absolute()
    if path.suffix.lower() == ".gguf":
        from tokasaurus.checkpoint.gguf.conversion import convert_gguf  # imports NumPy, which other models do not need

        return convert_gguf(path, on_phase)
    if path.exists():
        raise CheckpointError(f"{name} is a file, but not a .gguf file")
    if not is_repo_id(name):
        raise CheckpointError(f"{name!r} is neither a directory nor a .gguf file nor a Hugging Face repository id")
    return None
