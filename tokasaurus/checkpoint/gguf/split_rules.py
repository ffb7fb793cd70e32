"""Rules by which byte-level BPE tokenizers split a text into words before the merges, by the names that GGUF files give
them.

The names are those of llama.cpp (build of 2026-11); the patterns are those of the models' published tokenizers, which
llama.cpp writes in another way where its regular expressions lack something.
"""

# ruff: noqa: RUF001  # characters of other scripts, which resemble ASCII

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How a text becomes words."""

    patterns: tuple[str, ...]
    """Regular expressions in Oniguruma's syntax, one after the other: each splits the pieces that the ones before have
    left, into its matches and what is between them."""
    keeps_known_words: bool = False
    """A word that is a token is this token, even if no merges produce it."""
    adds_bos: bool = False
    """Texts begin with bos unless the file says otherwise."""
    composes: bool = False
    """Characters are composed first (NFC)."""


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SIGNS}[\r\n]*|{_SPACES}"

_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+%s|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*%s"
"""A word ends before an upper-case letter that follows a lower-case one."""
_GPT4O = rf"{_CASED_WORDS % ((f'{_CONTRACTION}?',) * 2)}|\p{{N}}{{1,3}}|{_SIGNS}[\r\n/]*|{_SPACES}"
_TEKKEN = rf"{_CASED_WORDS % ('', '')}|\p{{N}}|{_SIGNS}[\r\n/]*|{_SPACES}"
_NO_HAN = r"[^\r\n\p{L}\p{N}]?[%s&&[^\p{Han}]]%s[%s&&[^\p{Han}]]%s"
_KIMI = "|".join(
    (
        r"[\p{Han}]+",
        f"{_NO_HAN % (_UPPER, '*', _LOWER, '+')}{_CONTRACTION}?",
        f"{_NO_HAN % (_UPPER, '+', _LOWER, '*')}{_CONTRACTION}?",
        rf"\p{{N}}{{1,3}}|{_SIGNS}[\r\n]*|{_SPACES}",
    )
)

_ASCII_SIGNS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK_WORDS = rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
_KANA_AND_HAN = "[一-龥\u3040-ゟ゠-ヿ]+"
_DEEPSEEK3 = (r"\p{N}{1,3}", _KANA_AND_HAN, rf"{_DEEPSEEK_WORDS}[\r\n]*|{_SPACES}")
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥ"
    "ῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_HAN_TO_HANGUL = "[一-龥ࠀ-一가-퟿]+"
_DIGITS_FROM_THE_END = r"(?:\p{N}{3})*(?!\p{N})"
_NOT_SENTENCE_ENDS = r" ?[^(\s|.,!?…。，、।۔،)]+"

_LLAMA3_RULE = SplitRule((_LLAMA3,), keeps_known_words=True, adds_bos=True)
_PLAIN_LLAMA3 = SplitRule((_LLAMA3,))
_QWEN2_RULE = SplitRule((_QWEN2,), composes=True)
_PLAIN_QWEN2 = SplitRule((_QWEN2,))
_GPT2_RULE = SplitRule((_GPT2,))
_SINGLE_DIGITS = SplitRule((r"\p{N}", _GPT2))
_GPT4O_RULE = SplitRule((_GPT4O,))
_DEEPSEEK3_RULE = SplitRule(_DEEPSEEK3)
_BLOOM = SplitRule((_NOT_SENTENCE_ENDS,))
_AYA = SplitRule((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))
_BAILING = SplitRule(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
        r"\s*[\r\n]|\s+(?!\S)|\s+",
    )
)

RULES: dict[str, SplitRule] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3_RULE),
    **dict.fromkeys(("falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"), _LLAMA3_RULE),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _PLAIN_LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"), _QWEN2_RULE),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), _PLAIN_QWEN2),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"), _GPT2_RULE),
    **dict.fromkeys(("gigachat", "a.x-4.0", "mellum", "modern-bert"), _GPT2_RULE),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v2-es", "jina-v2-de"), _GPT2_RULE),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _SINGLE_DIGITS),
    **dict.fromkeys(("minerva-7b", "mellum2"), _SINGLE_DIGITS),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O_RULE),
    "granite-embed-multi-97m": replace(_GPT4O_RULE, keeps_known_words=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), _DEEPSEEK3_RULE),
    "spark2_5": SplitRule(
        (r"\p{N}{1,3}", _KANA_AND_HAN, rf"{_DEEPSEEK_WORDS}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"),
    ),
    "deepseek-llm": SplitRule(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
            r"\s+$",
            _HAN_TO_HANGUL,
            r"\p{N}",
        )
    ),
    "deepseek-coder": SplitRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_TO_HANGUL, r"\p{N}")),
    "afmoe": SplitRule(
        (
            rf"\p{{N}}{{1,3}}(?={_DIGITS_FROM_THE_END})",
            "[一-鿿㐀-䶿\uf900-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿\u0e80-໿ក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+",
            rf"{_DEEPSEEK_WORDS}[\r\n]*|{_SPACES}",
        )
    ),
    "falcon": SplitRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "tekken": SplitRule((_TEKKEN,), keeps_known_words=True, adds_bos=True),
    "kimi-k2": SplitRule((_KIMI,)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _AYA),
    "qwen35": SplitRule(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        ),
        composes=True,
    ),
    "jais-2": SplitRule(
        (
            rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}[\r\n]*|\s*[\r\n]+|"
            + "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
            + r"|\s{1,2}(?!\S)|\s{1}",
        )
    ),
    "minicpm5": SplitRule(
        (r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_SIGNS}[\r\n]*|{_SPACES}"), keeps_known_words=True
    ),
    "youtu": SplitRule(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
            rf"{_CASED_WORDS % ((f'{_CONTRACTION}?',) * 2)}|\p{{N}}|{_SIGNS}[\r\n/]*|{_SPACES}",
        ),
        keeps_known_words=True,
    ),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _BLOOM),
    "viking": SplitRule((_NOT_SENTENCE_ENDS, r"\p{N}")),
    "chameleon": SplitRule(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            "([\\t\\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        adds_bos=True,
    ),
    "superbpe": SplitRule((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "seed-coder": SplitRule((rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    "ufakzeka": SplitRule((rf"{_WORD}|\p{{N}}|{_SIGNS}[\r\n]*|{_SPACES}",)),
    "laguna": SplitRule((r"[^\n]+|[\n]+", _QWEN2)),
    "exaone-moe": SplitRule(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"|{_SIGNS}[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
}

_NO_BYTES = "it merges characters of the text and not bytes, with '▁' for spaces"
_WITH_SEPARATOR = "its texts end with a separator, as those of models that generate no text"
MISSING: dict[str, str] = {
    "default": "the file does not know its rule, and another one gives wrong tokens: convert the model again",
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m", "sarvam-moe"), _NO_BYTES),
    "whitespace": "it merges characters of the text and not bytes",
    **dict.fromkeys(("jina-v1-en", "jina-v2-code", "roberta-bpe"), _WITH_SEPARATOR),
}
"""What is missing here for the other names."""
