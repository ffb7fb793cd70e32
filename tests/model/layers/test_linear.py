"""Matrix products with weights packed for the CPU's matrix library, and without."""

import pytest
import torch

from tokasaurus.model.layers.linear import Linear


def make_linear() -> tuple[Linear, torch.Tensor]:
    """-> a bfloat16 layer with bias, and its weight."""
    generator = torch.Generator().manual_seed(0)
    linear = Linear(48, 80, bias=True, dtype=torch.bfloat16)
    linear.weight.copy_(torch.randn(80, 48, generator=generator))
    linear.bias.copy_(torch.randn(80, generator=generator))
    return linear, linear.weight.detach().clone()


@pytest.mark.parametrize("num_rows", [0, 1, 2, 63, 200])
@pytest.mark.parametrize("keep_weight", [False, True])
def test_a_packed_product_is_that_of_the_weight(num_rows: int, keep_weight: bool) -> None:
    linear, weight = make_linear()
    linear.pack(keep_weight)
    x = torch.randn(num_rows, 48).bfloat16()
    expected = x.double() @ weight.double().T + linear.bias.double()
    torch.testing.assert_close(linear(x).double(), expected, atol=0.05, rtol=1e-2)
    assert not keep_weight or torch.equal(linear.weight, weight)


def test_where_the_processor_has_no_bfloat16_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("needs the cpu support")

    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    linear, weight = make_linear()
    linear.pack()
    x = torch.randn(5, 48).bfloat16()
    torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, weight, linear.bias))
