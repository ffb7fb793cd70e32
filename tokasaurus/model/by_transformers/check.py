"""Whether a model computes by our attention what transformers' class computes by its own."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tokasaurus.messages.status import UserError
from tokasaurus.model.attention.block_lists import as_in_steps
from tokasaurus.model.attention.row_split import attends_over
from tokasaurus.model.by_transformers.attention import NAME
from tokasaurus.model.by_transformers.model import TransformersModel
from tokasaurus.model.execution.executors import OwnLayers
from tokasaurus.model.worker.self_check import (
    Context,
    Measured,
    SmallForward,
    compared_rows,
    layout_of,
    perturbed_rows,
)
from tokasaurus.model.worker.start import Start

_NUM_TOKENS = 64
_CHUNKS = {"whole": (_NUM_TOKENS,), "in two chunks": (40, _NUM_TOKENS - 40)}


def check_class(start: Start) -> str:
    """Raises UserError if the results differ by more than what a few roundings of the input change."""
    wrong = start.checks.describe_wrong("transformers", lambda: _measure(start))
    if wrong is not None:
        raise UserError(f"{start.checkpoint.name} cannot be served by transformers' class: {wrong}")
    return ""


@torch.inference_mode()
def _measure(start: Start) -> Iterator[Measured]:
    """A prompt of random tokens, whole and in chunks. Replaces the cache by one of a few blocks."""
    model, backend = start.model, start.backend
    assert isinstance(model, TransformersModel)
    num_tokens = min(_NUM_TOKENS, start.limits.context_length)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(model.vocab_size, (num_tokens,), generator=generator).to(start.device)
    expected = _by_own_attention(model, token_ids)
    with _changed_embeddings(model.embedding):
        perturbed = _by_own_attention(model, token_ids)
    for name, chunks in _CHUNKS.items():
        num_blocks = -(-num_tokens // start.config.page_size)
        with torch.inference_mode(False):
            backend.allocate(num_blocks + 1)
        rows, done = list[Tensor](), 0
        for size in chunks:
            end = min(done + size, num_tokens)
            forward = SmallForward(name, (Context(end - done, end, [*range(1, num_blocks + 1)]),))
            layout = as_in_steps(layout_of(forward, start.config.page_size), backend, start.shape)
            backend.plan(layout)
            attends = attends_over(backend, layout)
            positions = forward.positions.to(start.device)
            rows.append(model(token_ids[done:end], None, positions, OwnLayers(), attends).clone())
            done = end
        yield from compared_rows(name, model.activation_dtype, torch.cat(rows), expected, perturbed)
    with torch.inference_mode(False):
        backend.allocate(1)  # what is measured next must not count this cache


def _by_own_attention(model: TransformersModel, token_ids: Tensor) -> Tensor:
    layers = model.layers
    layers.set_attn_implementation("eager")
    try:
        positions = torch.arange(len(token_ids), device=token_ids.device).unsqueeze(0)
        output = layers(input_ids=token_ids.unsqueeze(0), position_ids=positions, use_cache=False)
    finally:
        layers.set_attn_implementation(NAME)
    states: Tensor = output.last_hidden_state[0]
    return states


def _changed_embeddings(embedding: nn.Module) -> torch.utils.hooks.RemovableHandle:
    """Inside the context, embeddings are changed by about one rounding."""

    def change(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return perturbed_rows(output)

    return embedding.register_forward_hook(change)
