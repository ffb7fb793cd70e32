"""Compares the files of new weights with what a start has decided from the checkpoint's files.

An update replaces numbers in place; everything else stays as the start has made it: sizes, rotary tables, whether the
LM head is the embedding, end tokens, the tokenizer and its chat template. A directory of new weights may have files
that say otherwise. It is then refused, since a server that is started on it would give other texts. Files that it lacks
are the checkpoint's. Its own quantisation needs no comparison: a reader applies it.

With rl=T, which updates need, the sampling values of generation_config.json have no effect, and quantised weights are
plain numbers once they are loaded.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from tokasaurus.checkpoint.info import EMBEDDING, HEAD, ModelInfo, read_config, refuse_adapter
from tokasaurus.checkpoint.json_files import CheckpointError, flag, read_json
from tokasaurus.checkpoint.quantized.config import Quantization, parse_quantization, quantization_beside
from tokasaurus.checkpoint.resolve import Checkpoint
from tokasaurus.checkpoint.rope import RopeInfo
from tokasaurus.checkpoint.stored_tensors import StoredTensor
from tokasaurus.checkpoint.tokenizer_files import (
    CODE_PATTERN,
    TEMPLATE_PATTERN,
    VOCABULARY_FILES,
    native_tokenizer,
    with_tokenizer_end,
)
from tokasaurus.checkpoint.weight_files import are_equal, file_states, read_tensors, stacks_experts, update_files
from tokasaurus.config import ServerConfig
from tokasaurus.messages.commands import FileState, UpdateWeights

_CONFIG, _GENERATION, _TIE = "config.json", "generation_config.json", "tie_word_embeddings"

DECIDED_BY_TENSORS = ("tie_embeddings", "embedding_tensor", "stacks_experts", "expert_block")
APPLIED_WHILE_READING = ("dtype", "quantization")
"""Fields of ModelInfo that are not compared: the tensors are, or numbers are converted to the dtype in memory."""

_KEYS = {
    "settings": "the digest of all else in config.json",
    "family": "model_type",
    "layers": "num_hidden_layers",
    "width": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "context_length": "the longest sequence (max_position_embeddings)",
    "eps": "rms_norm_eps",
    "eos_ids": "eos_token_id, of all files together,",
}
"""Fields of ModelInfo by the names that users know, where these differ."""

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
)
_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")


def quantization_of_update(directory: Path, of_checkpoint: Quantization | None) -> Quantization | None:
    """How the weights in a directory of new weights are quantised, by its own config.json, else by the checkpoint's.

    Stored tensors decide which are, so that plain numbers need no other answer. Raises CheckpointError."""
    path = directory / _CONFIG
    if not path.is_file():
        return of_checkpoint
    found = parse_quantization(read_json(path))
    return quantization_beside(directory) if found is None else found


def check_copy(
    copy: str,
    name: str,
    tensors: Mapping[str, StoredTensor],
    directories: Sequence[Path],
    of_checkpoint: Quantization | None,
) -> None:
    """Raises CheckpointError if one of the new tensors differs from another one, which has the same place in the model.

    directories: of earlier weights, newest first, where new weights may lack the other one. of_checkpoint: as of
    quantization_of_update."""
    other = tensors.get(name)
    if other is None and directories:
        found = (read_tensors(update_files(each), quantization_of_update(each, of_checkpoint)) for each in directories)
        other = next((earlier[name] for earlier in found if name in earlier), None)
        if other is None:
            raise CheckpointError(f"no earlier weights have tensor {name}")
    if other is not None and not are_equal(tensors[copy], other):
        where = "of these weights" if name in tensors else "of the server's weights, which this part lacks"
        raise CheckpointError(
            f"tensor {copy} differs from {name} {where}: this server was started with tied embeddings, and computes "
            "both with one matrix"
        )


class UpdateChecks:
    """Compares directories of new weights with one running server."""

    def __init__(self, checkpoint: Checkpoint, config: ServerConfig) -> None:
        self._checkpoint = checkpoint
        self._config = config
        own = checkpoint.directory
        self._own_digests = {name: _digest_of_file(own / name) for name in self._tokenizer_files(own)}
        """Name of a tokenizer file of the checkpoint → its digest at the start."""
        self._equal_tokenizers = set[str]()
        """Digests of tokenizer files that make the server's tokenizer."""

    def check(self, directory: Path, is_partial: bool, earlier: Sequence[UpdateWeights]) -> tuple[FileState, ...]:
        """The state of the files with the weights. is_partial: tensors may be missing. earlier: the updates that lead
        from the checkpoint's weights to the present ones.

        Names, shapes and numbers of the tensors are left to the workers. Raises CheckpointError, and OSError if a file
        cannot be read."""
        refuse_adapter(directory)
        files = update_files(directory)
        states = file_states(files)
        self._check_config(directory)
        quantization = quantization_of_update(directory, self._checkpoint.info.quantization)
        tensors = read_tensors(files, quantization)
        if self._config.quantization is not None and any(each.dtype not in _PLAIN_DTYPES for each in tensors.values()):
            raise CheckpointError(f"quantization={self._config.quantization}: the new weights are quantised already")
        self._check_experts(tensors)
        self._check_tie(directory, tensors, is_partial, earlier)
        if self._config.tokenizer is None:
            self._check_tokenizer(directory)
        return states

    def _check_config(self, directory: Path) -> None:
        names = (_CONFIG, _GENERATION)
        if not any((directory / name).is_file() for name in names):
            return
        own = self._checkpoint.directory
        config, generation = ((directory if (directory / name).is_file() else own) / name for name in names)
        content = read_json(generation) if generation.is_file() else {}
        info = read_config(config, content, self._config.rope_scaling, self._config.model_impl)
        info = with_tokenizer_end(info, self._checkpoint.tokenizer_directory)
        if differences := _differences(info, self._checkpoint.info):
            raise CheckpointError(f"{directory}: {'; '.join(differences)}: a server has to be started with such files")

    def _check_experts(self, tensors: Mapping[str, StoredTensor]) -> None:
        """The workers know a layer's experts by the names of the server's files."""
        info = self._checkpoint.info
        together = stacks_experts(info, tensors) if info.is_native else None
        if together not in (None, info.stacks_experts):
            ways = "tensors of all experts of a layer", "tensors of each expert"
            new, own = ways if together else ways[::-1]
            raise CheckpointError(
                f"the new weights have {new}, but the server's files have {own}: store them so, or start a server with "
                "these files"
            )

    def _check_tie(
        self, directory: Path, tensors: dict[str, StoredTensor], is_partial: bool, earlier: Sequence[UpdateWeights]
    ) -> None:
        """If the LM head is the embedding, it must be in the new weights too."""
        info = self._checkpoint.info
        if not info.tie_embeddings or not info.is_native:  # the workers know what a class ties
            return
        name = info.embedding_tensor
        other = HEAD if name == EMBEDDING else EMBEDDING
        if other in tensors:
            directories = [*(Path(update.directory) for update in reversed(earlier)), self._checkpoint.directory]
            check_copy(other, name, tensors, directories if is_partial else [], info.quantization)
        elif not is_partial and (path := directory / _CONFIG).is_file() and not flag(read_json(path), _TIE):
            raise CheckpointError(
                f"{path}: {_TIE} is false, but there is no {other}, and the server was started with tied embeddings"
            )

    def _check_tokenizer(self, directory: Path) -> None:
        """Compares what AutoTokenizer makes of the files, which other versions of libraries write otherwise."""
        own = self._checkpoint.directory
        names = self._tokenizer_files(directory)
        if all(_digest_of_file(directory / name) == self._own_digests.get(name) for name in names):
            return
        with tempfile.TemporaryDirectory(prefix="toka-update-") as made:
            joined = Path(made)
            is_whole = {"tokenizer_config.json"} & set(names) and set(VOCABULARY_FILES) & set(names)
            own_names = [] if is_whole else list(self._own_digests)
            for source, chosen in ((own, [_CONFIG, *own_names]), (directory, [_CONFIG, *names])):
                for name in chosen:
                    if (source / name).is_file():
                        (joined / name).parent.mkdir(exist_ok=True)
                        shutil.copyfile(source / name, joined / name)
            digest = _digest_of_files(joined)
            if digest in self._equal_tokenizers:
                return
            new = native_tokenizer(joined, lambda _: None, self._config.trust_remote_code)
            old = self._checkpoint.tokenizer_directory
            if old == own:  # as the conversion of GGUF wrote it
                old = native_tokenizer(old, lambda _: None)
            if what := _other_tokenizer(new, old):
                raise CheckpointError(
                    f"{directory}: {what} differs from the server's; leave the tokenizer's files out, or start a "
                    "server with them"
                )
            self._equal_tokenizers.add(digest)

    def _tokenizer_files(self, directory: Path) -> list[str]:
        """Names of the files in the directory that AutoTokenizer reads, without config.json."""
        patterns = [TEMPLATE_PATTERN, *([CODE_PATTERN] if self._config.trust_remote_code else [])]
        found = [path.relative_to(directory).as_posix() for pattern in patterns for path in directory.glob(pattern)]
        return [name for name in (*_TOKENIZER_FILES, *sorted(found)) if (directory / name).is_file()]


def _differences(new: ModelInfo, old: ModelInfo) -> list[str]:
    """What would be computed otherwise, by the names of config.json."""
    names = [
        field.name for field in fields(ModelInfo) if field.name not in (*DECIDED_BY_TENSORS, *APPLIED_WHILE_READING)
    ]
    return list(
        dict.fromkeys(line for name in names for line in _changed(name, getattr(new, name), getattr(old, name)))
    )


def _changed(name: str, new: object, old: object) -> Iterator[str]:
    """The innermost fields that differ, or how many layers there are."""
    if new == old:
        return
    if is_dataclass(new) and not isinstance(new, type) and type(new) is type(old):
        for field in fields(new):
            prefix = "rotary setting " if isinstance(new, RopeInfo) else ""
            yield from _changed(prefix + field.name, getattr(new, field.name), getattr(old, field.name))
    elif isinstance(new, tuple) and isinstance(old, tuple) and any(is_dataclass(each) for each in (*new, *old)):
        if len(new) != len(old):
            yield f"{_KEYS.get(name, name)} is {len(new)}, not {len(old)}"
            return
        for one, other in zip(new, old, strict=True):
            yield from _changed(name, one, other)
    else:
        yield f"{_KEYS.get(name, name)} is {_show(new)}, not {_show(old)}"


def _show(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _digest_of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest_of_files(directory: Path) -> str:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return hashlib.sha256("".join(f"{path.name} {_digest_of_file(path)} " for path in files).encode()).hexdigest()


def _other_tokenizer(new: Path, old: Path) -> str:
    """Names the first difference between two tokenizers; "" if both give the same ids for the same texts.

    new, old: directories that native_tokenizer has made. Padding and truncation, which training sets, have no effect
    here. New files may lack a chat template."""
    files = [read_json(directory / "tokenizer.json") for directory in (new, old)]
    for content in files:
        for key in ("padding", "truncation"):
            content.pop(key, None)
    if files[0] != files[1]:
        keys = sorted(key for key in files[0].keys() | files[1].keys() if files[0].get(key) != files[1].get(key))
        return f"the tokenizer ({', '.join(keys)} of tokenizer.json)"
    templates, own_templates = _templates(new), _templates(old)
    if templates and templates != own_templates:
        return "the chat template"
    settings, own_settings = (read_json(directory / "tokenizer_config.json") for directory in (new, old))
    text = "".join(own_templates.values())
    # Templates may name the others; training likes to set a pad_token.
    named = {key for key in settings | own_settings if key.endswith("_token") and key in text}
    for key in sorted({"eos_token", "split_special_tokens", *named}):
        if _setting(settings, key) != _setting(own_settings, key):
            return f"{key} of tokenizer_config.json"
    return ""


def _setting(settings: dict[str, Any], key: str) -> object:
    value = settings.get(key)
    return value.get("content") if isinstance(value, dict) else value or None


def _templates(directory: Path) -> dict[str, str]:
    """The chat templates that native_tokenizer has written, by the file's name."""
    paths = [directory / "chat_template.jinja", *directory.glob(TEMPLATE_PATTERN)]
    return {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}
