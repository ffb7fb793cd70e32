"""Converts the tokenizers that GGUF files call "llama": SentencePiece's BPE, as of Gemma, Mistral and Llama 2.

They merge characters, with "\u2581" for spaces. Of the pairs of neighbours whose text is a token, the one whose token
has the highest score is merged first; characters that are no tokens become bytes.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, processors

from tokasaurus.checkpoint.json_files import CheckpointError

Metadata = Mapping[str, Any]

_SPACE = "\u2581"
_NORMAL = 1
"""Type of the tokens that merges make."""
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_tokenizer(metadata: Metadata) -> Tokenizer:
    """Without its added tokens. Raises CheckpointError."""
    tokens = texts(metadata, "tokenizer.ggml.tokens")
    scores = metadata.get("tokenizer.ggml.scores")
    types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if not isinstance(scores, list) or not len(scores) == len(types) == len(tokens) or len(vocabulary) != len(tokens):
        raise CheckpointError("the tokenizer's tokens have not each a score and a type, or a token occurs twice")
    has_bytes = all(byte in vocabulary for byte in _BYTES)
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    bpe = models.BPE(
        vocab=vocabulary,
        merges=_merges(tokens, scores, types, vocabulary),
        unk_token=tokens[unknown_id],
        fuse_unk=True,
        byte_fallback=has_bytes,
    )
    tokenizer = Tokenizer(bpe)
    adds_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if adds_space else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    template = template_of(metadata, True, tokens)
    if template is not None:
        tokenizer.post_processor = template
    return tokenizer


def _merges(
    tokens: list[str], scores: list[float], types: list[int], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Every split of a token into two, best first."""
    order = sorted((-scores[token_id], token_id) for token_id in range(len(tokens)) if types[token_id] == _NORMAL)
    return [
        (token[:at], token[at:])
        for token in (tokens[token_id] for _, token_id in order)
        for at in range(1, len(token))
        if token[:at] in vocabulary and token[at:] in vocabulary
    ]


def texts(metadata: Metadata, key: str) -> list[str]:
    """The strings in an array, which may be absent. Raises CheckpointError."""
    values = metadata.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"{key} is not an array of strings")
    return values


def template_of(metadata: Metadata, adds_bos: bool, tokens: list[str]) -> processors.TemplateProcessing | None:
    """Adds bos before and eos after the text if the metadata say so, or for bos `adds_bos` where they are silent."""
    wanted = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", adds_bos),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in wanted if wanted[name]}
    specials = {name: (tokens[token_id], token_id) for name, token_id in ids.items() if token_id is not None}
    if not specials:
        return None
    before = [specials["bos"][0]] if "bos" in specials else []
    after = [specials["eos"][0]] if "eos" in specials else []
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B:1", *after],
        special_tokens=list(specials.values()),
    )
