"""The tokenizer's own end token, which ends a generation beside those of config.json and generation_config.json.

A chat model's config often still has the base model's end token, while its turns end with the tokenizer's.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokasaurus.checkpoint.info import ModelInfo
from tokasaurus.checkpoint.json_files import read_json


def with_tokenizer_end(info: ModelInfo, directory: Path) -> ModelInfo:
    """`info` with the end token of the tokenizer in `directory`, if the model's vocabulary has its id.

    directory: see Checkpoint.tokenizer_directory. Raises CheckpointError if a file cannot be read.
    """
    token = _eos_token(directory)
    token_id = None if token is None else _id_of(directory, token)
    if token_id is None or not 0 <= token_id < info.vocab_size:
        return info
    return replace(info, eos_ids=tuple(sorted({*info.eos_ids, token_id})))


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
