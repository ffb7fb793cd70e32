"""Whether a model computes by our attention what transformers' class computes by its own."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tokasaurus.messages.status import UserError
from tokasaurus.model.attention.backend import AttentionBackend, KVShape
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
    model = start.model
    assert isinstance(model, TransformersModel)
    places = model, start.backend, start.shape, start.limits.context_length
    wrong = start.checks.describe_wrong("transformers", lambda: measure_class(*places))
    if wrong is not None:
        raise UserError(f"{start.checkpoint.name} cannot be served by transformers' class: {wrong}")
    return ""


@torch.inference_mode()
def measure_class(
    model: TransformersModel, backend: AttentionBackend, shape: KVShape, context_length: int
) -> Iterator[Measured]:
    """A prompt of random tokens, whole and in chunks, against the class's own attention and count of positions.
    Replaces the cache by one of a few blocks."""
    num_tokens = min(_NUM_TOKENS, context_length)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(model.vocab_size, (num_tokens,), generator=generator).to(shape.device)
    expected = _by_own_attention(model, token_ids)
    with _changed_embeddings(model.embedding):
        perturbed = _by_own_attention(model, token_ids)
    num_blocks = -(-num_tokens // shape.page_size)
    for name, chunks in _CHUNKS.items():
        with torch.inference_mode(False):
            backend.allocate(num_blocks + 1)
        rows, done = list[Tensor](), 0
        for size in chunks:
            end = min(done + size, num_tokens)
            forward = SmallForward(name, (Context(end - done, end, [*range(1, num_blocks + 1)]),))
            layout = as_in_steps(layout_of(forward, shape.page_size), backend, shape)
            backend.plan(layout)
            attends = attends_over(backend, layout)
            positions = forward.positions.to(shape.device)
            rows.append(model(token_ids[done:end], None, positions, OwnLayers(), attends).clone())
            done = end
        yield from compared_rows(name, model.activation_dtype, torch.cat(rows), expected, perturbed)
    with torch.inference_mode(False):
        backend.allocate(1)  # what is measured next must not count this cache


def _by_own_attention(model: TransformersModel, token_ids: Tensor) -> Tensor:
    layers = model.layers
    layers.set_attn_implementation("eager")
    try:
        output = layers(input_ids=token_ids.unsqueeze(0), use_cache=False)  # with the positions that the class counts
    finally:
        layers.set_attn_implementation(NAME)
    states: Tensor = output.last_hidden_state[0]
    return states


def _changed_embeddings(embedding: nn.Module) -> torch.utils.hooks.RemovableHandle:
    """Inside the context, embeddings are changed by about one rounding."""

    def change(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return perturbed_rows(output)

    return embedding.register_forward_hook(change)
