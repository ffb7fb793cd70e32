"""The logits of a whole prompt in one forward, by one process."""

from pathlib import Path

import torch

from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.steps import CPU
from tokasaurus.checkpoint import ModelInfo
from tokasaurus.model.attention.backend import KVShape, PagedLayout, PagedPart
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.attention.operation import attends_over
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.execution.executors import choose_executor
from tokasaurus.model.parallel.mesh import Mesh


def run_whole_prompt(
    model: Decoder, model_info: ModelInfo, mesh: Mesh, hidden: torch.Tensor | None, token_ids: torch.Tensor
) -> torch.Tensor:
    """One stage's forward of one prompt, with a KV cache of its own -> its hidden states, or all logits."""
    num_heads = mesh.shard(model_info.num_heads, "")[1]
    num_kv_heads = mesh.kv_head_shard(model_info.num_kv_heads)[1]
    shape = KVShape(len(model.layers), num_heads, num_kv_heads, model_info.head_dim, 16, torch.float32, CPU)
    backend = make_backend("reference", shape, None)
    num_tokens = len(token_ids)
    num_blocks = -(-num_tokens // 16)
    backend.allocate(num_blocks + 1)
    everything = PagedPart(
        first_row=0,
        num_rows=num_tokens,
        query_starts=torch.tensor([0, num_tokens], dtype=torch.int32),
        block_table=torch.arange(1, num_blocks + 1, dtype=torch.int32).unsqueeze(0),
        kv_lengths=torch.tensor([num_tokens], dtype=torch.int32),
        causal=True,
    )
    positions = torch.arange(num_tokens)
    layout = PagedLayout(positions + 16, (everything,))
    backend.plan(layout)
    with torch.inference_mode():
        out: torch.Tensor = model(
            token_ids, hidden, positions, choose_executor(model, backend), attends_over(backend, layout)
        )
        return model.logits(out) if mesh.is_last_stage else out


def run_stages(directory: Path, token_ids: torch.Tensor, pp_size: int = 1) -> tuple[torch.Tensor, list[int]]:
    """Runs the stages one after another -> all logits, and the number of layers of each stage."""
    hidden = None
    num_layers = []
    for pp_rank in range(pp_size):
        mesh = Mesh(pp_rank=pp_rank, pp_size=pp_size)
        stage, model_info = load(directory, mesh, packed=True)
        num_layers.append(len(stage.layers))
        hidden = run_whole_prompt(stage, model_info, mesh, hidden, token_ids)
    assert hidden is not None
    return hidden, num_layers
