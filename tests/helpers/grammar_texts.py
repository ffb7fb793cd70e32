"""Texts that a grammar allows, with the small tokenizer, whose first 256 tokens are the bytes."""

import random

from llguidance import LLMatcher

from tests.helpers.small_tokenizer import EOS_IDS, VOCAB_SIZE

_MERGED = ("he", "ll", "hell", "hello", " w", " wo", "rl", "rld")


def random_answer(start: LLMatcher, rng: random.Random) -> str | None:
    """A random text; None if it becomes too long."""
    matcher, text = start.deep_copy(), bytearray()
    while len(text) < 400:
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()
        allowed = [id_ for id_ in range(VOCAB_SIZE) if mask[id_ // 8] >> id_ % 8 & 1]
        likely = [id_ for id_ in (*EOS_IDS, *b'"}],') if id_ in allowed]
        token_id = rng.choice(likely if likely and rng.random() < 0.3 else allowed)
        if token_id in EOS_IDS:
            return text.decode()
        text += _token_bytes(token_id)
        assert matcher.consume_token(token_id)
        if matcher.is_stopped():
            return text.decode()
    return None


def _token_bytes(token_id: int) -> bytes:
    return bytes([token_id]) if token_id < 256 else _MERGED[token_id - 256].encode()


def allows(start: LLMatcher, text: str) -> bool:
    content = list(text.encode())
    matcher = start.deep_copy()
    return matcher.try_consume_tokens(content) == len(content) and matcher.is_accepting()
