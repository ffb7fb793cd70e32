"""Every family and each of its options against transformers' own class, in float32."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.helpers.tiny_model import LONGROPE, OPTIONS, VOCAB_SIZE, option_config, save_random_model
from tests.model.helpers.greedy_decoding import assert_equals_oracle, run_stages
from tokasaurus.checkpoint.families import FAMILIES

CASES = [(family, number) for family, options in OPTIONS.items() for number in range(len(options))]


def test_every_family_is_tested() -> None:
    assert set(OPTIONS) == set(FAMILIES)


def test_where_sequences_may_be_long_all_have_the_long_factors(tmp_path: Path) -> None:
    """transformers gives them to prompts beyond the original length, as this one is."""
    config = option_config("phi3", 0, original_max_position_embeddings=16, rope_parameters=dict(LONGROPE))
    oracle = save_random_model(tmp_path, config)
    assert_logits_equal(tmp_path, oracle)


def assert_logits_equal(directory: Path, oracle: PreTrainedModel) -> None:
    """Of a prompt of 40 tokens, by two pipeline stages."""
    token_ids = torch.randint(VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(0))
    logits, _ = run_stages(directory, token_ids, pp_size=2)
    with torch.inference_mode():
        expected = oracle(token_ids.unsqueeze(0)).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "number"), CASES)
def test_stages_and_mixed_batches_equal_transformers(family: str, number: int, tmp_path: Path) -> None:
    """Greedy tokens and log-probabilities of prompts in chunks, beside decoding ones, and logits of two stages."""
    config = option_config(family, number, tied=number % 2 == 1 and family != "phi")
    oracle = save_random_model(tmp_path, config, seed=number)
    assert_logits_equal(tmp_path, oracle)
    assert_equals_oracle(tmp_path, oracle, None, seed=number)
