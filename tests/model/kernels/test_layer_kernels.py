"""A decoder layer by the kernels, against the same layer by torch."""

import pytest
import torch
from torch import Tensor

from tests.model.layers.test_linear import DTYPES, layer_kernels, random_rows
from tokasaurus.checkpoint import ModelInfo, RopeInfo
from tokasaurus.model.architectures.decoder import DecoderLayer, DecoderOptions
from tokasaurus.model.attention.backend import PagedLayout
from tokasaurus.model.layers import attention
from tokasaurus.model.layers.linear import Linear
from tokasaurus.model.layers.rotary import RotaryTable
from tokasaurus.model.parallel.mesh import Mesh

CPU = torch.device("cpu")
LAYOUT = PagedLayout(torch.zeros(0, dtype=torch.int64), ())


class RecordingBackend:
    """Takes keys and values, and keeps them."""

    def write(self, key: Tensor, value: Tensor, layer_index: int) -> None:
        assert layer_index == 3
        self.written = (key.clone(), value.clone())


def attend_by_keys(backend: RecordingBackend, query: Tensor, _layer_index: int, _layout: PagedLayout) -> Tensor:
    """No attention, but something that depends on each query, key and value, and on the order of the heads."""
    key, value = (torch.repeat_interleave(x, query.shape[1] // x.shape[1], dim=1) for x in backend.written)
    return torch.tanh(query) * key + value


def make_layer(options: DecoderOptions, head_dim: int, dtype: torch.dtype) -> tuple[DecoderLayer, RotaryTable]:
    rope = RopeInfo(1e4)
    info = ModelInfo(
        family="llama",
        num_layers=1,
        hidden_size=72,
        intermediate_size=100,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        vocab_size=32,
        context_length=1000,
        norm_eps=1e-5,
        rope=rope,
        tie_embeddings=False,
        eos_ids=(0,),
        dtype="float32",
    )
    layer = DecoderLayer(info, options, Mesh(), 3, dtype)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in layer.named_parameters():
        scale = 0.2 if name.endswith("weight") and "norm" not in name else 1.0
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return layer, RotaryTable(rope, head_dim, 1000, CPU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [DecoderOptions(), DecoderOptions(qkv_bias=True), DecoderOptions(qk_norm=True)])
@pytest.mark.parametrize("head_dim", [6, 16, 40, 64])
@pytest.mark.parametrize("num_rows", [1, 3, 150])
def test_a_packed_layer_equals_torch(
    num_rows: int, head_dim: int, options: DecoderOptions, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "attend_rows", attend_by_keys)
    layer, table = make_layer(options, head_dim, dtype)
    cos_sin = table.at(torch.randint(1000, (num_rows,), generator=torch.Generator().manual_seed(1)))
    hidden = random_rows(num_rows, 72, dtype)
    plain, packed = RecordingBackend(), RecordingBackend()
    expected = layer(hidden.clone(), cos_sin, plain, LAYOUT)

    kernels = layer_kernels()
    for module in layer.modules():
        if isinstance(module, Linear):
            module.pack(kernels)
    layer.pack(kernels)
    out = layer(hidden, cos_sin, packed, LAYOUT)
    tolerance = 2e-5 if dtype == torch.float32 else 2**-6
    for result, by_torch in zip((out, *packed.written), (expected, *plain.written), strict=True):
        assert result.shape == by_torch.shape
        error = (result.double() - by_torch.double()).abs().max() / by_torch.double().abs().max()
        assert float(error) < tolerance
