"""A pipeline stage with random weights, computed by the kernels and by torch with the reference backend."""

from dataclasses import replace
from typing import Any

import torch

from tests.helpers.plain_info import plain_info
from tests.model.helpers.linear_layers import random_rows
from tests.model.helpers.row_split_cases import Case, CaseStep
from tests.model.helpers.steps import CPU, one_thread
from tokasaurus.checkpoint import RopeInfo
from tokasaurus.model.attention.backend import AttentionBackend, PagedLayout
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.attention.row_split import attends_over
from tokasaurus.model.cpu.bindings import Kernels, load_kernels
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.execution.device_batch import build_batch
from tokasaurus.model.execution.executors import choose_executor
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.staging.staging import ON_HOST

NUM_LAYERS = 3


HIDDEN_SIZE = 72


MIDDLE = Mesh(pp_rank=1, pp_size=3)
"""A pipeline stage that neither embeds nor has an LM head: hidden states in, hidden states out."""


def make_stage(case: Case, options: dict[str, Any], kernels: Kernels | None) -> Decoder:
    """A stage with seeded random weights. options: fields of AttentionSpec. kernels: pack the weights for
    these; None: do not pack."""
    info = plain_info(
        family="llama",
        num_layers=NUM_LAYERS * MIDDLE.pp_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=100,
        num_heads=case.shape.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        vocab_size=32,
        context_length=1000,
        norm_eps=1e-5,
        rope=RopeInfo(1e4),
        tie_embeddings=False,
        eos_ids=(0,),
        dtype="float32",
    )
    spec = info.spec
    layers = [replace(layer, attention=replace(layer.attention, **options)) for layer in spec.layers]
    stage = Decoder(replace(info, spec=replace(spec, layers=tuple(layers))), MIDDLE, case.dtype)
    stage.materialize(CPU, 2000)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in stage.named_parameters():
        scale = 0.2 if name.endswith("weight") and "norm" not in name else 1.0
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    if kernels is not None:
        stage.pack(kernels)
    return stage


def run_stage(case: Case, options: dict[str, Any], kernels: Kernels, by_kernels: bool, grouped: bool) -> torch.Tensor:
    """-> hidden states [T, HIDDEN_SIZE] of the case's step, without padding."""
    made = CaseStep(case)
    step = made.step if grouped else replace(made.step, groups=None)
    shape = case.shape_of(NUM_LAYERS)
    backend: AttentionBackend = make_backend("cpu" if by_kernels else "reference", shape, kernels)
    backend.allocate(made.num_blocks)
    backend.plan(PagedLayout(torch.arange(len(made.key)), ()))
    for layer in range(NUM_LAYERS):
        backend.write(made.key, made.value, layer)
    batch = build_batch(step, made.slots, case.page_size, ON_HOST)
    backend.plan(batch.layout)
    hidden = random_rows(len(batch.token_ids), HIDDEN_SIZE, case.dtype).to(kernels.activation_dtype(case.dtype))
    stage = make_stage(case, options, kernels if by_kernels else None)
    out: torch.Tensor = stage(
        batch.token_ids, hidden, batch.positions, choose_executor(stage, backend), attends_over(backend, batch.layout)
    )
    return out[: int(made.step.num_tokens.sum())]


def check_stage(case: Case, options: dict[str, Any], kernels: Kernels | None = None) -> None:
    """Compare the kernels' layers with torch's. kernels: default is this machine's best instruction set."""
    kernels = kernels or load_kernels()
    assert kernels is not None, "the tests need a C++ compiler"
    with one_thread(), torch.inference_mode():
        expected = run_stage(case, options, kernels, by_kernels=False, grouped=False)
    with torch.inference_mode():
        out = run_stage(case, options, kernels, by_kernels=True, grouped=True)
    assert out.shape == expected.shape
    tolerance = 3e-5 if case.dtype == torch.float32 else 2**-5
    error = (out.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert float(error) < tolerance
