"""The model that tests of the server serve: a small tokenizer, and no weights."""

from pathlib import Path

from tests.helpers.small_tokenizer import EOS_IDS, VOCAB_SIZE
from tokasaurus.config import ServerConfig
from tokasaurus.server.served_model import ServedModel
from tokasaurus.text.tokenizer import Tokenizer


def make_served_model(tokenizer_directory: Path) -> ServedModel:
    return ServedModel(
        name="org/small",
        tokenizer=Tokenizer.load(tokenizer_directory),
        vocab_size=VOCAB_SIZE,
        eos_ids=frozenset(EOS_IDS),
        created=1_700_000_000,
        system_fingerprint="fp_test",
        max_topk_logprobs=ServerConfig.max_topk_logprobs,
        logprobs_mode="raw",
        rl=ServerConfig.rl,
        model_flag=None,
        model_aliases=(),
    )
