"""Converts a GGUF file's tokenizer to tokenizer.json and tokenizer_config.json.

GGUF stores the vocabulary and the merges, but only the name of the pre-tokenizer, the rule that splits text into words
before the merges. A wrong rule yields wrong tokens, so an unknown name is refused. transformers' own converter (5.23)
drops SmolLM's splitting of digits and Qwen's normalization, and takes seconds to import.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tokasaurus.checkpoint.gguf.config import CONTROL_TOKEN
from tokasaurus.checkpoint.gguf.sentencepiece import sentencepiece_tokenizer, template_of, texts
from tokasaurus.checkpoint.gguf.split_rules import MISSING, RULES, SplitRule
from tokasaurus.checkpoint.json_files import CheckpointError, write_json

Metadata = Mapping[str, Any]

_USER_DEFINED = 4
"""Type of a token, as CONTROL_TOKEN."""


def write_tokenizer(metadata: Metadata, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises CheckpointError for an unsupported tokenizer."""
    build_tokenizer(metadata).save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", tokenizer_config(metadata))


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The tokenizer that the metadata describe, byte-level BPE or SentencePiece's BPE. Raises CheckpointError."""
    is_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    tokenizer = sentencepiece_tokenizer(metadata) if is_sentencepiece else _byte_level_tokenizer(metadata)
    tokens, types = texts(metadata, "tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type", ())
    added = [
        AddedToken(token, special=token_type == CONTROL_TOKEN, normalized=False)
        for token, token_type in zip(tokens, types, strict=False)
        if token_type in (CONTROL_TOKEN, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _byte_level_tokenizer(metadata: Metadata) -> Tokenizer:
    rule = _rule(metadata)
    tokens = texts(metadata, "tokenizer.ggml.tokens")
    pairs = [merge.split(" ") for merge in texts(metadata, "tokenizer.ggml.merges")]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if not pairs or any(len(pair) != 2 for pair in pairs) or len(vocabulary) != len(tokens):
        raise CheckpointError("the tokenizer's merges are missing or malformed, or a token occurs twice")
    try:
        merges = [(first, second) for first, second in pairs]
        bpe = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.keeps_known_words)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"the tokenizer's merges do not fit its tokens: {error}") from None
    tokenizer = Tokenizer(bpe)
    if rule.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(rule)
    tokenizer.decoder = decoders.ByteLevel()
    trims_nothing = processors.ByteLevel(trim_offsets=False)
    template = template_of(metadata, rule.adds_bos, tokens)
    tokenizer.post_processor = trims_nothing if template is None else processors.Sequence([trims_nothing, template])
    return tokenizer


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """The content of tokenizer_config.json: the named special tokens and the chat template."""
    tokens = texts(metadata, "tokenizer.ggml.tokens")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def _rule(metadata: Metadata) -> SplitRule:
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise CheckpointError(f"tokenizer model {model!r} is not supported, only 'gpt2' and 'llama'")
    name = metadata.get("tokenizer.ggml.pre")
    if name in RULES:
        return RULES[name]
    why = MISSING.get("default" if name is None else name, "it is unknown, or newer than this version")
    raise CheckpointError(f"pre-tokenizer {name!r} is not supported: {why}")


def _pre_tokenizer(rule: SplitRule) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
