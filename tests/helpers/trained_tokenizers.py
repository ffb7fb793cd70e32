"""Small tokenizers built as those of Llama 2, Llama 3 and Qwen 2 are, trained on a few words."""

import json
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as BaseTokenizer

SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CORPUS = ["hello world, the user said: hällo 日本語 12 345\n\n    indented  text's end."] * 4
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level() -> BaseTokenizer:
    """As in Llama 3 and Qwen 2."""
    base = BaseTokenizer(models.BPE())
    base.normalizer = normalizers.NFC()
    base.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    base.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    base.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    base.add_special_tokens(SPECIALS)
    start = base.token_to_id("<s>")
    base.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    return base


def sentencepiece(**metaspace: Any) -> BaseTokenizer:
    """As in Llama 2: byte tokens, and "▁" for spaces by a pre-tokenizer (given settings) or by legacy normalizers."""
    words = BaseTokenizer(models.BPE(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=[*SPECIALS[:3], *bytes_], show_progress=False)
    )
    model = json.loads(words.to_str())["model"]
    base = BaseTokenizer(
        models.BPE(
            vocab=model["vocab"],
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if metaspace:
        base.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", split=False, **metaspace)
    else:
        base.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    base.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    base.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    base.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", base.token_to_id("<s>"))]
    )
    return base


def unigram() -> BaseTokenizer:
    """As SentencePiece's default: its vocabulary is a list that has the special tokens too."""
    base = BaseTokenizer(models.Unigram())
    base.pre_tokenizer = pre_tokenizers.Metaspace()
    base.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=SPECIALS, unk_token=SPECIALS[0], initial_alphabet=["<", ">", "/", "|"]
    )
    base.train_from_iterator(CORPUS, trainer)
    base.add_special_tokens(SPECIALS)
    return base
