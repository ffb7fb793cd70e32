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
    """The byte-level BPE tokenizer that the metadata describe. Raises CheckpointError."""
    rule = _rule(metadata)
    tokens = _texts(metadata, "tokenizer.ggml.tokens")
    pairs = [merge.split(" ") for merge in _texts(metadata, "tokenizer.ggml.merges")]
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
    tokenizer.post_processor = _post_processor(metadata, rule, tokens)
    types = metadata.get("tokenizer.ggml.token_type", ())
    for token, token_type in zip(tokens, types, strict=False):
        if token_type in (CONTROL_TOKEN, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=token_type == CONTROL_TOKEN, normalized=False)])
    return tokenizer


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """The content of tokenizer_config.json: the named special tokens and the chat template."""
    tokens = _texts(metadata, "tokenizer.ggml.tokens")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def _texts(metadata: Metadata, key: str) -> list[str]:
    """The strings in an array, which may be absent."""
    values = metadata.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"{key} is not an array of strings")
    return values


def _rule(metadata: Metadata) -> SplitRule:
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise CheckpointError(f"tokenizer model {model!r} is not supported, only 'gpt2' (byte-level BPE)")
    name = metadata.get("tokenizer.ggml.pre")
    if name in RULES:
        return RULES[name]
    why = MISSING.get("default" if name is None else name, "it is unknown, or newer than this version")
    raise CheckpointError(f"pre-tokenizer {name!r} is not supported: {why}")


def _pre_tokenizer(rule: SplitRule) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _post_processor(metadata: Metadata, rule: SplitRule, tokens: list[str]) -> processors.PostProcessor:
    """Adds bos before and eos after the text if the metadata, or for bos the rule, say so."""
    wanted = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", rule.adds_bos),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in wanted if wanted[name]}
    specials = {name: (tokens[token_id], token_id) for name, token_id in ids.items() if token_id is not None}
    if not specials:
        return processors.ByteLevel(trim_offsets=False)
    before = [specials["bos"][0]] if "bos" in specials else []
    after = [specials["eos"][0]] if "eos" in specials else []
    template = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B:1", *after],
        special_tokens=list(specials.values()),
    )
    return processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
