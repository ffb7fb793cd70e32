"""Small tokenizers in Hugging Face format: a byte-level one, and one of given tokens that decodes as Llama 2 does."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

IM_START, IM_END = 264, 265
VOCAB_SIZE = 266
EOS_IDS = (IM_END,)

_MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġw", "o"), ("r", "l"), ("rl", "d")]
_CHAT_TEMPLATE = (
    "{% if opening is defined %}{{ opening }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['content'] == 'refuse me' %}{{ raise_exception('told to refuse') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAMA_2_DECODER = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def _byte_characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte, as in GPT-2's table."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def save_small_tokenizer(directory: Path) -> Path:
    """Byte-level: ids 0 to 255 are the bytes, then come a few merges, then special tokens."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    for first, second in _MERGES:
        vocabulary[first + second] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": _CHAT_TEMPLATE,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def save_llama_2_tokenizer(
    directory: Path, tokens: list[str], added: Sequence[str] = (), decoder: decoders.Decoder = LLAMA_2_DECODER
) -> Path:
    """tokens: by id, the first is the unknown one. Then come the special token </s> and the added tokens."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token=tokens[0]))
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.add_tokens(list(added))
    tokenizer.decoder = decoder
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
