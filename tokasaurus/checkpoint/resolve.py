"""From what the user named to a checkpoint on disk."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokasaurus.checkpoint.demo_model import NAME as DEMO_NAME
from tokasaurus.checkpoint.demo_model import demo_directory
from tokasaurus.checkpoint.errors import CheckpointError
from tokasaurus.checkpoint.hub import download_files, is_repo_id
from tokasaurus.checkpoint.info import ModelInfo, read_model_info
from tokasaurus.checkpoint.weight_files import weight_file_names, weight_files

OnPhase = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk. directory: config.json and *.safetensors. tokenizer_directory: tokenizer.json and its kin."""

    name: str
    directory: Path
    tokenizer_directory: Path
    info: ModelInfo


def _ignore_phase(_: str) -> None: ...


def resolve_checkpoint(
    model: str | None, tokenizer: str | None = None, on_phase: OnPhase = _ignore_phase
) -> Checkpoint:
    """Find the model's files, fetching and converting what is not here yet.

    model: a directory in Hugging Face form, a .gguf file, or a Hugging Face repository id; None is the demo model.
    tokenizer: likewise, only its tokenizer is used; None is the model's own.
    on_phase: called with one line before each step that takes long.
    Raises CheckpointError for anything that is missing, out of reach, or not supported.
    """
    if model is None:
        name, directory = DEMO_NAME, demo_directory(on_phase)
    else:
        name, directory = _locate(model, on_phase)
    info = read_model_info(directory)
    weight_files(directory)  # raises here, in the parent, rather than in the worker
    tokenizer_directory = directory if tokenizer is None else _locate_tokenizer(tokenizer, on_phase)
    if not (tokenizer_directory / "tokenizer.json").is_file():
        raise CheckpointError(f"{tokenizer_directory} has no tokenizer.json; tokenizer= names another place")
    return Checkpoint(name, directory, tokenizer_directory, info)


def _locate(model: str, on_phase: OnPhase) -> tuple[str, Path]:
    """Name to serve it under, and the directory with configuration and weights."""
    local = _locate_local(model, on_phase)
    if local is not None:
        name = Path(model).expanduser().resolve()
        return (name.stem if name.is_file() else name.name), local
    on_phase(f"looking up {model}")
    # The configuration comes first, so that a model that cannot be served is refused before gigabytes are fetched.
    directory = download_files(model, ["*.json", "*.jinja"])
    read_model_info(directory)
    on_phase(f"downloading the weights of {model}")
    return model, download_files(model, ["*.json", "*.jinja", *weight_file_names(directory)], revision=directory.name)


def _locate_tokenizer(tokenizer: str, on_phase: OnPhase) -> Path:
    local = _locate_local(tokenizer, on_phase)
    if local is not None:
        return local
    on_phase(f"looking up the tokenizer of {tokenizer}")
    return download_files(tokenizer, ["*.json", "*.jinja"])


def _locate_local(name: str, on_phase: OnPhase) -> Path | None:
    """The directory for a local directory or a .gguf file; None if `name` is a repository id."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path.absolute()
    if path.suffix.lower() == ".gguf":
        from tokasaurus.checkpoint.gguf_conversion import convert_gguf  # NumPy: other models need none

        return convert_gguf(path, on_phase)
    if path.exists():
        raise CheckpointError(f"{name} is a file, but not a .gguf file")
    if not is_repo_id(name):
        raise CheckpointError(f"{name!r} is no directory, no .gguf file and no Hugging Face repository id")
    return None
