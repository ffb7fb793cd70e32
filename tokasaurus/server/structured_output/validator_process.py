"""Child process of the server that compiles grammars, to find out whether they can be followed.

A grammar may crash its compiler (nesting that overflows the stack), or keep it busy for minutes: here that is no harm.
Run as `python -m tokasaurus.server.structured_output.validator_process DIRECTORY VOCAB_SIZE TIME_LIMIT_S EOS_ID…`.
DIRECTORY is a tokenizer's. Frames come in on stdin and go out on stdout; the first one out is empty: ready, or
UNUSABLE_TOKENIZER.
"""

import ctypes
import os
import random
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
import psutil
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from tokasaurus.server.structured_output.ipc import UNUSABLE_TOKENIZER, make_frame, read_frame
from tokasaurus.text.grammars import LIMITS, GrammarError, load_grammar_vocabulary
from tokasaurus.text.tokenizer import TokenizerError

# Less than the engine's threads have, so that what compiles here compiles there.
_STACK_BYTES = 2 * 2**20
# Beyond what the process has when it is ready.
_MEMORY_BYTES = 2 * 2**30
_MAX_ERROR_CHARS = 300
_NUM_TRIED_TOKENS = 32
_NUM_DRAWS = 8
# The options of a rule that ask for something of the sampler, which the engine would not do.
_IGNORED_OPTION = re.compile(r"^[ \t]*[\w-]+[ \t]*\[[^\]\n]*\b(temperature)\b", re.MULTILINE)
_WIDE_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)

# What llguidance advises is an option that the server does not give.
_ONE_OF_ADVICE = "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"
_ONE_OF_RULE = "oneOf is followed only where no two of its schemas can hold at once"

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def compile_grammar(tokenizer: LLTokenizer, source_format: str, text: str) -> str:
    """The grammar in llguidance's form. source_format: a GrammarFormat. Raises GrammarError, which says why in full."""
    grammar = _CONVERTERS[source_format](text)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        error = matcher.get_error().replace(_ONE_OF_ADVICE, _ONE_OF_RULE)
        raise GrammarError("it is too large" if error.startswith("panic") else error)
    if warnings := matcher.get_grammar_warnings():
        raise GrammarError("; ".join(warnings))
    matcher.compute_bitmask()
    _check_usable(matcher, "there is no text that it allows")
    for avoided in (b"}]", b""):
        _try_text(tokenizer, matcher.deep_copy(), avoided)
    return grammar


def _try_text(tokenizer: LLTokenizer, matcher: LLMatcher, avoided: bytes) -> None:
    """Follow the grammar along a random text, which is always the same: too much work mostly shows within a few tokens.

    avoided: bytes that no token has where there are others.
    """
    rng, eos_ids = random.Random(0), set(tokenizer.eos_tokens)
    # without these, what a text is in would hardly ever come to its end
    closing = [token_id for text in '",}]' for token_id in tokenizer.tokenize_str(text)]
    for _ in range(_NUM_TRIED_TOKENS):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        _check_usable(matcher, "a text can come to where nothing may follow though it is no end")
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
    if text.lstrip().startswith("{"):  # the library would take it for its own form, options of rules and all
        raise GrammarError("it is neither Lark nor GBNF")
    ignored = _IGNORED_OPTION.search(text)
    if ignored is not None:
        raise GrammarError(f"the option {ignored.group(1)} of a rule is not implemented")
    return LLMatcher.grammar_from_lark(text)


def _from_gbnf(text: str) -> str:
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark(_WIDE_ESCAPE.sub(_unescape, text)))
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    except Exception as error:  # bare ones are what the converter raises
        raise GrammarError(f"not valid GBNF: {error}") from None


def _unescape(escape: re.Match[str]) -> str:
    r"""The converter writes \u00e9 in a way that llguidance does not read. What is special in GBNF keeps an escape."""
    digits = escape.group(1) or escape.group(2)
    if digits is None:
        return escape.group()
    code = int(digits, 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise GrammarError(f"{escape.group()} is no character")
    return chr(code)


_CONVERTERS: dict[str, Callable[[str], str]] = {
    "json_schema": LLMatcher.grammar_from_json_schema,
    "regex": LLMatcher.grammar_from_regex,
    "lark": _from_lark,
    "gbnf": _from_gbnf,
}


def answer(tokenizer: LLTokenizer, question: bytes) -> bytes:
    """question: JSON [format, text]. The answer: JSON [grammar, null] or [null, what is wrong]."""
    source_format, text = orjson.loads(question)
    try:
        return orjson.dumps([compile_grammar(tokenizer, source_format, text), None])
    except (ValueError, RuntimeError) as error:
        # some errors quote the whole grammar
        return orjson.dumps([None, " ".join(str(error).split())[:_MAX_ERROR_CHARS]])


def main(directory: str, vocab_size: str, time_limit_s: str, *eos_ids: str) -> None:
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        tokenizer = load_grammar_vocabulary(Path(directory), int(vocab_size), map(int, eos_ids)).tokenizer
    except TokenizerError as error:
        print(error, file=sys.stderr)
        answers.write(make_frame(UNUSABLE_TOKENIZER))
        return
    _limit_memory()
    answers.write(make_frame(b""))
    answers.flush()
    # What a library prints when it fails may hold what a client sent, which is for no log.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    while (question := read_frame(questions)) is not None:
        # The server ends what takes too long; where it cannot, since it was killed, the timer does.
        signal.setitimer(signal.ITIMER_REAL, float(time_limit_s) + 1)
        answers.write(make_frame(answer(tokenizer, question)))
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.flush()


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, resource.RLIM_INFINITY))


def _die_with_server() -> None:
    """Elsewhere than on Linux the end of stdin has to do, and the timer."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(_PR_SET_NAME, b"toka-grammar", 0, 0, 0)


if __name__ == "__main__":
    _die_with_server()
    threading.stack_size(_STACK_BYTES)
    threading.Thread(target=main, args=sys.argv[1:]).start()
