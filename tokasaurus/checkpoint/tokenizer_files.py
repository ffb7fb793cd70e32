"""Any layout of tokenizer files → one directory with the tokenizer that transformers' AutoTokenizer makes of them.

AutoTokenizer may build another tokenizer than tokenizer.json describes: the class that the configuration names can
replace its normalizer, pre-tokenizer and decoder, and settings such as add_bos_token its post-processor. It also reads
directories without a tokenizer.json. Since it is slow to import, it runs once for each content of the files, in a
process of its own; the result is cached. Python code of the model's repository runs only in that process, and only with
trust_remote_code=T.

The tokenizer's own end token ends a generation beside those of config.json and generation_config.json: a chat model's
config often still has the base model's end token, while its turns end with the tokenizer's.
"""

import atexit
import hashlib
import importlib.metadata
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokasaurus.checkpoint.cache import CHECKSUMS, build_once, cache_directory, checksum
from tokasaurus.checkpoint.info import ModelInfo
from tokasaurus.checkpoint.json_files import CheckpointError, raise_shortage, read_json
from tokasaurus.checkpoint.own_process import run_main
from tokasaurus.checkpoint.pooling import SCORE_ANSWERS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TOKENIZER_PATTERNS = ["*.json", "*.jinja", "merges.txt", "tokenizer.model"]
"""The files of a model that AutoTokenizer may read, as patterns for their names."""
CODE_PATTERN = "*.py"
"""Further files that it reads with trust_remote_code=T."""

_CONFIG_KEYS = ("tokenizer_class", "model_name")
"""Beside model_type, the keys of config.json that AutoTokenizer reads."""
TEMPLATE_PATTERN = "additional_chat_templates/*.jinja"
VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
_SENTENCEPIECE_PACKAGES = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}
"""Package → module. Only a model without tokenizer.json needs them, so they are not installed with this package."""
_RESULT_VERSION = 1
"""Part of the cache key: increase it when `_convert` changes."""


def native_tokenizer(source: Path, on_phase: Callable[[str], None], trust_remote_code: bool = False) -> Path:
    """The cached directory with the tokenizer that AutoTokenizer reads from `source`: tokenizer.json, chat templates, …

    on_phase: called with one line before the files are read, if the result is not in the cache. trust_remote_code: run
    a tokenizer's own Python code. Raises CheckpointError if the files are missing, broken, or need such code or a
    package that is not installed.
    """
    if not trust_remote_code and not any((source / name).is_file() for name in VOCABULARY_FILES):
        raise CheckpointError(
            f"{source} has no tokenizer.json, nor a vocab.json or tokenizer.model to make it from; "
            "tokenizer= selects another directory"
        )
    _check_sentencepiece(source)

    def build(directory: Path) -> None:
        on_phase("reading the tokenizer (once)")
        _run(source, directory, trust_remote_code)

    destination = cache_directory() / "tokenizers" / _key(source, trust_remote_code)
    try:
        return build_once(destination, build)
    except CheckpointError as error:
        if not isinstance(error.__cause__, OSError):
            raise
    directory = Path(tempfile.mkdtemp(prefix="toka-tokenizer-"))  # the cache cannot be written
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    build(directory)
    return directory


def _key(source: Path, trust_remote_code: bool) -> str:
    """Changes with the content of any file that AutoTokenizer may read, and with the versions of its libraries.

    Of a file as large as no vocabulary is, see `checksum`. Raises CheckpointError if a file cannot be read."""
    patterns = [*TOKENIZER_PATTERNS, TEMPLATE_PATTERN, *([CODE_PATTERN] if trust_remote_code else [])]
    names = {path for pattern in patterns for path in source.glob(pattern)}
    digest = hashlib.sha256(f"{_RESULT_VERSION}{' trusted' if trust_remote_code else ''}".encode())
    for package in ("transformers", "tokenizers"):
        digest.update(importlib.metadata.version(package).encode())
    for path in sorted(names):
        if path.is_file() and path.name != CHECKSUMS and not path.name.endswith(".index.json"):
            try:
                digest.update(f"{path.relative_to(source)} {checksum(path)} ".encode())
            except OSError as error:
                raise_shortage(error)
                raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    return digest.hexdigest()[:16]


def _run(source: Path, destination: Path, trust_remote_code: bool) -> None:
    """Run `_convert` in a process of its own. Raises CheckpointError; CheckpointUnavailable if the process is killed or
    has no memory."""
    arguments, failing = [str(source.absolute()), str(destination)], f"cannot read the tokenizer in {source}"
    with tempfile.TemporaryDirectory(prefix="toka-code-") as modules:
        variables = {"HF_MODULES_CACHE": modules} if trust_remote_code else {}  # for the code, before it is imported
        arguments += ["trust_remote_code"] if trust_remote_code else []
        try:
            run_main(__name__, *arguments, failing=failing, variables=variables)
        except CheckpointError as error:
            if "trust_remote_code=True" not in str(error):
                raise
            needs = "needs Python code of the model's repository, which trust_remote_code=T runs"
            raise CheckpointError(f"the tokenizer in {source} {needs}") from None


def _check_sentencepiece(source: Path) -> None:
    """Raises CheckpointError if the only vocabulary is a SentencePiece model, and packages to read it are missing."""
    path = source / "tokenizer.model"
    if (source / "tokenizer.json").is_file() or not path.is_file():
        return
    with path.open("rb") as file:
        is_sentencepiece = file.read(1) == b"\x0a"  # a protobuf; the other format with this name is text
    missing = [package for package, module in _SENTENCEPIECE_PACKAGES.items() if not _is_installed(module)]
    if is_sentencepiece and missing:
        raise CheckpointError(
            f"{path} can only be read with packages that are not installed: pip install {' '.join(missing)}, "
            "or put a tokenizer.json beside it"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package
        return False


def _convert(source: str, destination: str, trust_remote_code: str = "") -> None:
    """Save what AutoTokenizer reads from `source` to `destination`. trust_remote_code: not "" to run code."""
    # Tokenizers compute nothing with torch, but AutoTokenizer imports it where it is installed, which takes seconds.
    sys.modules["torch"] = None  # type: ignore[assignment]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        source,
        config=_config_for_tokenizer(Path(source)),
        local_files_only=True,
        trust_remote_code=bool(trust_remote_code),
    )
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(f"{type(tokenizer).__name__} is written in Python, not a tokenizer of the tokenizers library")
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError(f"{type(tokenizer).__name__} reads no vocabulary from these files")
    tokenizer.save_pretrained(destination)
    tokenizer.backend_tokenizer.save(str(Path(destination) / "tokenizer.json"))


def _config_for_tokenizer(source: Path) -> "PreTrainedConfig | None":
    """What AutoTokenizer looks at in config.json. The model's sizes, which transformers would check, do not matter.

    None: AutoTokenizer reads the file itself, if there is one.
    """
    from transformers import AutoConfig

    path = source / "config.json"
    content = read_json(path) if path.is_file() else {}
    known = {name: content[name] for name in _CONFIG_KEYS if name in content}
    try:
        return AutoConfig.for_model(str(content.get("model_type")), **known)
    except ValueError:  # transformers does not know this type of model
        return None


def main() -> None:
    """The process that `native_tokenizer` starts, with `_convert`'s arguments: one line on stderr if it fails."""
    try:
        _convert(*sys.argv[1:])
    except Exception as error:  # the libraries raise any exception type for a broken file
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}"[:1000])


def with_tokenizer_end(info: ModelInfo, directory: Path) -> ModelInfo:
    """`info` with the end token of the tokenizer in `directory`, if the model's vocabulary has its id.

    directory: see Checkpoint.tokenizer_directory. Raises CheckpointError if a file cannot be read.
    """
    token = _eos_token(directory)
    token_id = None if token is None else _id_of(directory, token)
    if token_id is None or not 0 <= token_id < info.vocab_size:
        return info
    return replace(info, eos_ids=tuple(sorted({*info.eos_ids, token_id})))


def with_answers(info: ModelInfo, directory: Path) -> ModelInfo:
    """`info` with the token ids of the answers by which a causal model scores. directory: as of with_tokenizer_end.
    Raises CheckpointError."""
    if info.pooling is None or not info.pooling.uses_answers:
        return info
    ids = info.pooling.answers or [_id_of(directory, token) for token in SCORE_ANSWERS]
    for token, token_id in zip(SCORE_ANSWERS, ids, strict=True):
        if token_id is None or not 0 <= token_id < info.vocab_size:
            raise CheckpointError(f"task=score: the model's vocabulary has no token {token!r}")
    no, yes = ids
    assert no is not None
    assert yes is not None
    return replace(info, pooling=replace(info.pooling, answers=(no, yes)))


def _eos_token(directory: Path) -> str | None:
    """AutoTokenizer states it when it saves its files, whatever files it read it from."""
    path = directory / "tokenizer_config.json"
    token = read_json(path).get("eos_token") if path.is_file() else None
    return token if isinstance(token, str) else None


def _id_of(directory: Path, token: str) -> int | None:
    path = directory / "tokenizer.json"
    for added in _added_tokens(path):
        if isinstance(added, dict) and added.get("content") == token and type(added.get("id")) is int:
            return int(added["id"])
    model = read_json(path).get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):  # of [token, score]
        vocab = {entry[0]: index for index, entry in enumerate(vocab) if isinstance(entry, list) and entry}
    token_id = vocab.get(token) if isinstance(vocab, dict) else None
    return token_id if type(token_id) is int else None


def _added_tokens(path: Path) -> list[Any]:
    """The list at the start of a tokenizer.json, without parsing its vocabulary, which takes a quarter of a second;
    empty if it is not found."""
    text = path.read_bytes().decode("utf-8", errors="replace")
    key = '"added_tokens"'
    start = text.find("[", text.find(key) + len(key))
    if text.find(key) < 0 or start < 0 or text[text.find(key) + len(key) : start].strip() != ":":
        return []
    try:
        found, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return []
    return list(found)
