"""Child process of the server that validates grammars by compiling them.

A grammar may crash its compiler (nesting that overflows the stack) or keep it busy for minutes; in a child process
neither harms the server.
Run as `python -m tokasaurus.server.grammars.validator_process DIRECTORY VOCAB_SIZE TIME_LIMIT_S EOS_ID…`;
DIRECTORY contains the tokenizer. Questions arrive on stdin and answers leave on stdout, each as a line of JSON. The
first line on stdout says whether grammars can be used with this tokenizer.
"""

import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import orjson
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from tokasaurus.server.child_process import answer_lines, die_with_server
from tokasaurus.server.protocol.ecma_patterns import PatternError, translate_pattern
from tokasaurus.server.protocol.regular_languages import write_literal
from tokasaurus.text.grammars import LIMITS, GrammarError, GrammarVocabulary, load_grammar_vocabulary
from tokasaurus.text.token_decoder import TokenizerError

# Smaller than the stacks of the engine's threads, so that a grammar that compiles here compiles there.
_STACK_BYTES = 2 * 2**20
# Address space that compilation may use on top of what the process uses when it is ready.
_MEMORY_BYTES = 2 * 2**30
_MAX_ERROR_CHARS = 300
_NUM_TRIED_TOKENS = 32
_NUM_DRAWS = 8
# Lark rule options that address the sampler; the engine would ignore them, so they are refused.
_IGNORED_OPTION = re.compile(r"^[ \t]*[\w-]+[ \t]*\[[^\]\n]*\b(temperature)\b", re.MULTILINE)
# A reference to tokens in Lark, by name or by ids, or a string, regular expression or comment, which may look like one.
_TOKENS = re.compile(
    r"""//[^\n]*|\#[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?P<name><[^<>\s\[\]]+>)|<\[(?P<ids>[^<>\[\]]*)\]>"""
)
# Comments, strings and classes of GBNF.
_GBNF_CLASS = re.compile(r"""#[^\n]*|"(?:\\.|[^"\\])*"|\[(?P<sign>\^?)(?P<members>(?:\\.|[^\]\\])*)\]""", re.DOTALL)
_GBNF_MEMBER = re.compile(r"(\\x[0-9A-Fa-f]{2}|\\.|[^\\])(?:-(?!$)(\\x[0-9A-Fa-f]{2}|\\.|[^\\]))?", re.DOTALL)
_GBNF_ESCAPES = {"n": 10, "r": 13, "t": 9}
_WIDE_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)

# llguidance advises an option that the server does not offer, so its advice is replaced.
_ONE_OF_ADVICE = "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"
_ONE_OF_RULE = "oneOf is supported only where no two of its schemas can match the same value"


def compile_grammar(vocabulary: GrammarVocabulary, source_format: str, text: str) -> str:
    """The grammar in llguidance's form. source_format: a GrammarFormat. Raises GrammarError with the full reason."""
    if source_format == "gbnf":
        source_format, text = "lark", _lark_of_gbnf(text)
    if source_format == "lark":
        text = _resolve_tokens(vocabulary, text)
    grammar = _CONVERTERS[source_format](text)
    tokenizer = vocabulary.tokenizer
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        error = matcher.get_error().replace(_ONE_OF_ADVICE, _ONE_OF_RULE)
        raise GrammarError("it is too large" if error.startswith("panic") else error)
    if warnings := matcher.get_grammar_warnings():
        raise GrammarError("; ".join(warnings))
    matcher.compute_bitmask()
    _check_usable(matcher, "no text matches it")
    for avoided in (b"}]", b""):
        _try_text(tokenizer, matcher.deep_copy(), avoided)
    return grammar


def _try_text(tokenizer: LLTokenizer, matcher: LLMatcher, avoided: bytes) -> None:
    """Runs the matcher on a text drawn with a fixed seed: most grammars that are too costly fail within a few tokens.

    avoided: tokens that are blank or contain one of these bytes are chosen only if no other token was drawn.
    """
    rng, eos_ids = random.Random(0), set(tokenizer.eos_tokens)
    # without a preference for these, strings, lists and objects would hardly ever be closed
    closing = [token_id for text in '",}]' for token_id in tokenizer.tokenize_str(text)]
    for _ in range(_NUM_TRIED_TOKENS):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        _check_usable(matcher, "it allows an incomplete text after which nothing may follow")
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        likely = [token_id for token_id in closing if bits[token_id // 8] >> token_id % 8 & 1]
        drawn = [int(rng.choice(likely if likely and rng.random() < 0.5 else allowed)) for _ in range(_NUM_DRAWS)]
        drawn = [token_id for token_id in drawn if token_id not in eos_ids]
        if not drawn:
            return
        texts = {token_id: tokenizer.decode_bytes([token_id]) for token_id in drawn}
        wanted = [token_id for token_id in drawn if texts[token_id].strip() and not set(texts[token_id]) & set(avoided)]
        matcher.consume_token((wanted or drawn)[0])
        if matcher.is_stopped() and not matcher.is_error():
            return
    _check_usable(matcher, "")


def _check_usable(matcher: LLMatcher, dead_end: str) -> None:
    if matcher.is_error():
        error = matcher.get_error().split("\n")[0]
        raise GrammarError(dead_end if error.startswith("NoExtension") else f"it takes too much work: {error}")


def _from_lark(text: str) -> str:
    if text.lstrip().startswith("{"):  # llguidance would read it as its own JSON form, with any rule options
        raise GrammarError("it is neither Lark nor GBNF")
    ignored = _IGNORED_OPTION.search(text)
    if ignored is not None:
        raise GrammarError(f"the rule option {ignored.group(1)} is not implemented")
    return LLMatcher.grammar_from_lark(text)


def _resolve_tokens(vocabulary: GrammarVocabulary, lark: str) -> str:
    """The grammar with ids instead of the names of tokens.

    Raises GrammarError for a token whose text is not part of the answer."""

    def by_id(found: re.Match[str]) -> str:
        name, ids = found["name"], found["ids"]
        if name is not None:
            if name not in vocabulary.added_tokens:
                raise GrammarError(f"{name} is no added token of this model")
            ids = str(vocabulary.added_tokens[name])
        elif ids is None:
            return found.group()
        if any(not _has_text(vocabulary, token_id) for token_id in _ids_of(ids, vocabulary)):
            raise GrammarError(f"{found.group()} contains a special token, which is no part of the text")
        return f"<[{ids}]>"

    return _TOKENS.sub(by_id, lark)


def _ids_of(ids: str, vocabulary: GrammarVocabulary) -> Iterator[int]:
    """The ids in Lark's form "5,7-9". Raises GrammarError."""
    for part in ids.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise GrammarError(f"<[{ids}]> must contain ids of tokens, or ranges of ids")
        if int(last or first) >= vocabulary.tokenizer.vocab_size:
            raise GrammarError(f"<[{ids}]> contains an id that is no token of this model")
        yield from range(int(first), int(last or first) + 1)


def _has_text(vocabulary: GrammarVocabulary, token_id: int) -> bool:
    return token_id not in vocabulary.hidden_ids and not vocabulary.tokenizer.is_special_token(token_id)


def _lark_of_gbnf(text: str) -> str:
    try:
        return str(gbnf_to_lark(_GBNF_CLASS.sub(_escape_class, _WIDE_ESCAPE.sub(_unescape, text))))
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    except GrammarError:
        raise
    except Exception as error:  # the converter raises bare Exceptions
        raise GrammarError(f"not valid GBNF: {error}") from None


def _unescape(escape: re.Match[str]) -> str:
    r"""Replaces \u00e9 by the character, since llguidance cannot read what the converter makes of it.

    ASCII characters, some of which are special in GBNF, become \x escapes.
    """
    digits = escape.group(1) or escape.group(2)
    if digits is None:
        return escape.group()
    code = int(digits, 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise GrammarError(f"{escape.group()} is no character")
    return chr(code)


def _escape_class(found: re.Match[str]) -> str:
    r"""A class of GBNF with \x escapes, since the converter copies it: && and [ are special in llguidance's classes."""
    if found["members"] is None:
        return found.group()
    written = ""
    for first, last in _GBNF_MEMBER.findall(found["members"]):
        codes = [_code_of(member) for member in (first, last) if member]
        if codes[-1] < codes[0]:
            raise GrammarError(f"{found.group()} contains a range whose end is before its beginning")
        written += "-".join(chr(code) if code >= 0x80 or chr(code).isalnum() else f"\\x{code:02x}" for code in codes)
    return f"[{found['sign']}{written}]"


def _code_of(member: str) -> int:
    """The character that a member of a GBNF class stands for. Raises GrammarError."""
    if len(member) == 4:
        return int(member[2:], 16)
    letter = member[-1]
    if len(member) == 1 or not letter.isalnum():
        return ord(letter)
    if letter not in _GBNF_ESCAPES:
        raise GrammarError(f"{member} is no escape of GBNF")
    return _GBNF_ESCAPES[letter]


def _from_regex(pattern: str) -> str:
    try:
        expressions = translate_pattern(pattern, is_whole=True).expressions
    except PatternError as error:
        raise GrammarError(f"it {error}") from None
    if len(expressions) == 1:
        return LLMatcher.grammar_from_regex(expressions[0])
    return LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {' & '.join(f'/{part}/' for part in expressions)}")


def _from_choices(text: str) -> str:
    return LLMatcher.grammar_from_regex("|".join(map(write_literal, orjson.loads(text))))


_CONVERTERS: dict[str, Callable[[str], str]] = {
    "json_schema": LLMatcher.grammar_from_json_schema,
    "regex": _from_regex,
    "choice": _from_choices,
    "lark": _from_lark,
}


def answer(vocabulary: GrammarVocabulary, question: bytes) -> bytes:
    """question: JSON [format, text]. Returns JSON [grammar, null] or [null, error]."""
    source_format, text = orjson.loads(question)
    try:
        return orjson.dumps([compile_grammar(vocabulary, source_format, text), None])
    except (ValueError, RuntimeError) as error:
        # some errors quote the whole grammar
        return orjson.dumps([None, " ".join(str(error).split())[:_MAX_ERROR_CHARS]])


def main(directory: str, vocab_size: str, time_limit_s: str, *eos_ids: str) -> None:
    try:
        vocabulary = load_grammar_vocabulary(Path(directory), int(vocab_size), map(int, eos_ids))
    except TokenizerError as error:
        print(error, file=sys.stderr)
        sys.stdout.write("false\n")
        return
    answer_lines(partial(answer, vocabulary), _MEMORY_BYTES, float(time_limit_s))


if __name__ == "__main__":
    die_with_server("toka-grammar")
    threading.stack_size(_STACK_BYTES)
    threading.Thread(target=main, args=sys.argv[1:]).start()
