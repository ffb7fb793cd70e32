"""Embedding of tokens from packed weights."""

from pathlib import Path

import pytest
import torch

from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model
from tests.model.helpers.linear_layers import DTYPES, activation_dtype, fill, layer_kernels, make_norm, random_rows
from tokasaurus.checkpoint import read_model_info
from tokasaurus.model.decoder.layers.embedding import VocabShard
from tokasaurus.model.parallel.mesh import Mesh


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 500])
def test_a_packed_embedding_returns_rows_of_its_weight_and_computes_logits(
    num_tokens: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, "llama", tied=True)
    shard = VocabShard(read_model_info(tmp_path), Mesh(), dtype)
    fill(shard)
    weight = shard.weight.detach().clone()
    shard.pack(layer_kernels())
    token_ids = torch.randint(VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(0))
    token_ids[: min(num_tokens, 1)] = VOCAB_SIZE - 1
    assert torch.equal(shard.embed(token_ids), weight[token_ids].to(activation_dtype(dtype)))
    norm, hidden = make_norm(64, dtype), random_rows(3, 64, activation_dtype(dtype))
    expected = torch.nn.functional.linear(norm(hidden), weight.to(hidden.dtype))
    torch.testing.assert_close(shard.logits(hidden, norm), expected, atol=0.06, rtol=0.01)
