"""A script for a fake engine that follows grammars: it samples at random from the allowed tokens."""

import random
from pathlib import Path

from llguidance import LLMatcher

from tests.helpers.small_tokenizer import EOS_IDS
from tests.server.helpers.fake_engine import Reply, Script, echo
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.text.grammars import load_grammar_vocabulary
from tokasaurus.text.tokenizer import Tokenizer

_CLOSING = tuple(b'"}]')


def follow_grammars(tokenizer_directory: Path) -> Script:
    """A script that echoes requests without a grammar. Eos and closing characters are sampled more often."""
    vocab_size = Tokenizer.load(tokenizer_directory).vocab_size
    tokenizer = load_grammar_vocabulary(tokenizer_directory, vocab_size, EOS_IDS).tokenizer

    def reply(request: GenerateRequest, index: int) -> Reply:
        if not request.grammar:
            return echo(request, index)
        rng = random.Random(request.seed + index)
        matcher = LLMatcher(tokenizer, request.grammar, log_level=0)
        token_ids: list[int] = []
        while len(token_ids) < request.max_new_tokens:
            mask = matcher.compute_bitmask()
            assert not matcher.is_error(), matcher.get_error()
            allowed = [token_id for token_id in range(vocab_size) if mask[token_id // 8] >> token_id % 8 & 1]
            likely = [token_id for token_id in (*EOS_IDS, *_CLOSING) if token_id in allowed]
            token_ids.append(rng.choice(likely if likely and rng.random() < 0.5 else allowed))
            if token_ids[-1] in EOS_IDS:
                return _reply(request, token_ids, "stop")
            assert matcher.consume_token(token_ids[-1])
        return _reply(request, token_ids, "length")

    return reply


def _reply(request: GenerateRequest, token_ids: list[int], finish_reason: str) -> Reply:
    logprobs = [-0.5] * len(token_ids) if request.want_logprobs else None
    return Reply(token_ids, logprobs, finish_reason)  # type: ignore[arg-type]
