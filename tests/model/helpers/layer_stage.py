"""A pipeline stage with random weights, computed by the kernels and by torch with the reference backend."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.helpers.plain_info import plain_info
from tests.model.helpers.linear_layers import random_rows
from tests.model.helpers.row_split_cases import Case, CaseStep
from tests.model.helpers.steps import CPU, one_thread
from tokasaurus.checkpoint import RopeInfo
from tokasaurus.checkpoint.spec import LayerSpec
from tokasaurus.model.attention.backend import AttentionBackend, PagedLayout
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.attention.row_split import attends_over
from tokasaurus.model.cpu.bindings import Kernels, load_kernels
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.decoder.quantize import Packing
from tokasaurus.model.execution.device_batch import build_batch
from tokasaurus.model.execution.executors import KernelExecutor, ModuleExecutor, choose_executor
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.staging.staging import ON_HOST

NUM_LAYERS = 3


HIDDEN_SIZE, MLP_WIDTH = 72, 100
QUANTIZED_SIZE = 128
"""Of hidden states and MLP, if weights are quantised, whose blocks have as many inputs."""

Layers = Callable[[LayerSpec], Sequence[LayerSpec]]
"""Llama's layer -> the NUM_LAYERS layers of a stage, with the same heads and MLP width."""


def alike(**attention: Any) -> Layers:
    """All are Llama's but for these fields of AttentionSpec."""
    return lambda plain: [replace(plain, attention=replace(plain.own_attention, **attention))] * NUM_LAYERS


MIDDLE = Mesh(pp_rank=1, pp_size=3)
"""A pipeline stage that neither embeds nor has an LM head: hidden states in, hidden states out."""


def make_stage(case: Case, layers: Layers, kernels: Kernels | None, quantization: str | None = None) -> Decoder:
    """A stage with seeded random weights. kernels: pack the weights for these; None: do not pack. quantization: of
    packed weights."""
    hidden_size, width = (HIDDEN_SIZE, MLP_WIDTH) if quantization is None else (QUANTIZED_SIZE, QUANTIZED_SIZE)
    info = plain_info(
        family="llama",
        num_layers=NUM_LAYERS * MIDDLE.pp_size,
        hidden_size=hidden_size,
        intermediate_size=width,
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
    made = tuple(layers(info.spec.layers[0]))
    rotary = (RopeInfo(1e4), RopeInfo(50.0))[: 1 + max(layer.own_attention.rotary or 0 for layer in made)]
    spec = replace(info.spec, layers=made * MIDDLE.pp_size, rotary=rotary)
    stage = Decoder(replace(info, spec=spec), MIDDLE, case.dtype)
    stage.materialize(CPU, 2000)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in stage.named_parameters():
        scale = 0.2 if name.endswith("weight") and "norm" not in name else 1.0
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    if kernels is not None:
        stage.pack(kernels, packing=Packing(quantization, is_int8=quantization == "int8"))
    return stage


def run_stage(
    case: Case, layers: Layers, kernels: Kernels, by_kernels: bool, grouped: bool, quantization: str | None = None
) -> torch.Tensor:
    """-> hidden states [T, hidden size] of the case's step, without padding. quantization: weights are packed in any
    case."""
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
    stage = make_stage(case, layers, kernels if by_kernels or quantization is not None else None, quantization)
    hidden = random_rows(len(batch.token_ids), stage.hidden_size, case.dtype).to(kernels.activation_dtype(case.dtype))
    executor = choose_executor(stage, backend) if by_kernels else ModuleExecutor(stage)
    assert isinstance(executor, KernelExecutor) == by_kernels
    out: torch.Tensor = stage(batch.token_ids, hidden, batch.positions, executor, attends_over(backend, batch.layout))
    return out[: int(made.step.num_tokens.sum())]


def check_stage(
    case: Case,
    layers: Layers,
    kernels: Kernels | None = None,
    quantization: str | None = None,
    float_tolerance: float = 3e-5,
) -> None:
    """Compare the kernels' layers with torch's, which have the kernels' gemms if weights are quantised. kernels:
    default is this machine's best instruction set. float_tolerance: of float32, relative to the largest number."""
    kernels = kernels or load_kernels()
    assert kernels is not None, "the tests need a C++ compiler"
    with one_thread(), torch.inference_mode():
        expected = run_stage(case, layers, kernels, False, grouped=False, quantization=quantization)
    with torch.inference_mode():
        out = run_stage(case, layers, kernels, True, grouped=True, quantization=quantization)
    assert out.shape == expected.shape
    is_exact = case.dtype == torch.float32 and quantization != "int8"
    tolerance = float_tolerance if is_exact else 2**-5
    error = (out.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert float(error) < tolerance
