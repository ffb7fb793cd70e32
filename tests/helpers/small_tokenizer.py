"""A byte-level tokenizer in Hugging Face format: ids 0 to 255 are the bytes, then a few merges, then special tokens."""

import json
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


def _byte_characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte, as in GPT-2's table."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def save_small_tokenizer(directory: Path) -> Path:
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
