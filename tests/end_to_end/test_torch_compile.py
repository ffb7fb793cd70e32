"""The demo model with compiled layers, in float32, against transformers."""

import pytest

from tests.end_to_end.helpers.demo_model_texts import assert_greedy_text_and_logprobs_match_transformers
from tests.end_to_end.helpers.toka_process import running_toka


@pytest.mark.long
def test_compiled_layers_match_transformers_and_are_never_recompiled() -> None:
    flags = ("dtype=float32", "torch_compile=T", "kv_cache_num_tokens=20000", "max_tokens_per_forward=256")
    with running_toka(*flags) as toka:
        assert any("compiled functions: 1" in line for line in toka.lines)
        assert_greedy_text_and_logprobs_match_transformers(toka, num_prompts=10)
        assert toka.gauge("toka_recompiles_total") == 0
        assert toka.stop() == 0
