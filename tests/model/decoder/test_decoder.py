"""The decoder against transformers, in float32."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.helpers.examples import few
from tests.helpers.tiny_model import FAMILIES, VOCAB_SIZE, save_tiny_model
from tests.model.helpers.greedy_decoding import assert_equals_oracle, load, run_stages, run_whole_prompt
from tokasaurus.checkpoint import weight_files
from tokasaurus.model.decoder.layers import Linear
from tokasaurus.model.parallel.mesh import Mesh


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_mixed_batches_give_the_tokens_of_transformers(family: str, backend: str, tmp_path: Path) -> None:
    oracle = save_tiny_model(tmp_path, family)
    assert_equals_oracle(tmp_path, oracle, backend, seed=FAMILIES.index(family))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_tied_embeddings_serve_as_the_lm_head(backend: str, tmp_path: Path) -> None:
    oracle = save_tiny_model(tmp_path, "llama", tied=True)
    assert_equals_oracle(tmp_path, oracle, backend, seed=7)


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_is_packed_only_where_it_is_the_lm_head_too(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An embedding that is not the LM head is read by rows, which are not contiguous in packed weights."""
    packed: list[torch.nn.Module] = []
    monkeypatch.setattr(Linear, "pack", lambda linear, *_, **__: packed.append(linear))
    save_tiny_model(tmp_path, "llama", tied=tied)
    model, _ = load(tmp_path)
    model.pack(None)
    # 4 in each of the 3 layers (QKV, attention output, gate and up, down), and the LM head.
    assert len(packed) == 3 * 4 + 1
    assert any(module is model.embedding for module in packed) == tied


def test_weights_come_from_a_sharded_checkpoint(tmp_path: Path) -> None:
    oracle = save_tiny_model(tmp_path, "qwen2", max_shard_size="60KB")
    assert len(weight_files(tmp_path)) > 2
    assert_equals_oracle(tmp_path, oracle, "torch", seed=8)


@pytest.mark.parametrize("tied", [False, True])
def test_pipeline_stages_run_one_after_the_other_equal_the_whole(tied: bool, tmp_path: Path) -> None:
    oracle = save_tiny_model(tmp_path, "qwen3", tied=tied)
    token_ids = torch.randint(VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(0))
    logits, num_layers = run_stages(tmp_path, token_ids, pp_size=2)
    assert num_layers == [2, 1]
    with torch.inference_mode():
        expected = oracle(token_ids.unsqueeze(0)).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def run_tensor_shard(rank: int, tp_size: int, directory: Path, rendezvous: Path, token_ids: torch.Tensor) -> None:
    """In a process of its own: saves the logits of its token ids."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=tp_size)
    mesh = Mesh(tp_rank=rank, tp_size=tp_size, tp_group=torch.distributed.group.WORLD)
    model, model_info = load(directory, mesh, packed=True)
    logits = run_whole_prompt(model, model_info, mesh, None, token_ids)
    torch.save(logits, directory / f"logits{rank}.pt")
    torch.distributed.destroy_process_group()


def assert_tensor_shards_equal_the_whole(directory: Path, oracle: PreTrainedModel, tp_size: int) -> None:
    num_tokens = oracle.config.vocab_size
    token_ids = torch.randint(num_tokens, (40,), generator=torch.Generator().manual_seed(0))
    token_ids[0] = num_tokens - 1
    arguments = (tp_size, directory, directory / "rendezvous", token_ids)
    torch.multiprocessing.spawn(run_tensor_shard, args=arguments, nprocs=tp_size)
    with torch.inference_mode():
        expected = oracle(token_ids.unsqueeze(0)).logits[0]
    logits = torch.cat([torch.load(directory / f"logits{rank}.pt") for rank in range(tp_size)], dim=1)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.long
@few(1, "family", FAMILIES)
def test_two_tensor_parallel_processes_equal_one(family: str, tmp_path: Path) -> None:
    assert_tensor_shards_equal_the_whole(tmp_path, save_tiny_model(tmp_path, family), 2)


@pytest.mark.long
def test_four_ranks_share_two_kv_heads_and_a_vocabulary_that_does_not_divide(tmp_path: Path) -> None:
    oracle = save_tiny_model(tmp_path, "qwen2", tied=True, vocab_size=VOCAB_SIZE + 3)
    assert_tensor_shards_equal_the_whole(tmp_path, oracle, 4)


def test_concatenated_tensor_shards_equal_the_whole(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2")
    whole, _ = load(tmp_path)
    shards = [load(tmp_path, Mesh(tp_rank=rank, tp_size=2))[0] for rank in range(2)]
    head = torch.cat([shard.lm_head.weight for shard in shards])
    assert torch.equal(head, whole.lm_head.weight)
    for index, layer in enumerate(whole.layers):
        parts = [shard.layers[index] for shard in shards]
        # The fused rows of a shard are its own queries, keys and values: 2 of 4 heads, 1 of 2 KV heads, 16 each.
        for name in ("weight", "bias"):
            projections = [getattr(part.attention.qkv, name).split([32, 16, 16]) for part in parts]
            rebuilt = torch.cat([shard for shards_of_one in zip(*projections, strict=True) for shard in shards_of_one])
            assert torch.equal(rebuilt, getattr(layer.attention.qkv, name))
        out = torch.cat([part.attention.out.weight for part in parts], dim=1)
        assert torch.equal(out, layer.attention.out.weight)
        down = torch.cat([part.mlp.down.weight for part in parts], dim=1)
        assert torch.equal(down, layer.mlp.down.weight)
