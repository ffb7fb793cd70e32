"""Random cases for the Triton kernels of the layers, on any device where they run, against float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokasaurus.model.decoder import triton_layers

# T tokens, D head size


def with_gaps(tensor: Tensor) -> Tensor:
    """The same rows, further apart."""
    wide = tensor.new_full((len(tensor), tensor.shape[1] + 5), torch.nan)
    wide[:, : tensor.shape[1]] = tensor
    return wide[:, : tensor.shape[1]]


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """As complex numbers: float64 [T, heads, D]."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos_sin[..., :half], cos_sin[..., half:])
    return torch.cat((turned.real, turned.imag), -1)


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """Checks of each kernel; all raise AssertionError."""

    device: torch.device
    tolerances: dict[torch.dtype, float]
    """Absolute and relative, by the dtype of what a kernel stores."""

    def check_add_norm(self, num_tokens: int, size: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(size)
        hidden, addend = (
            with_gaps(torch.randn(num_tokens, size, generator=generator).to(self.device, dtype)) for _ in range(2)
        )
        weight = torch.rand(size, generator=generator).to(self.device, dtype)
        before = hidden.clone()
        self._close(triton_layers.add_norm(hidden, None, weight, 1e-5), normed(before.double(), weight, 1e-5))
        assert torch.equal(hidden, before)
        poison = torch.zeros(num_tokens, device=self.device)
        poison[1::3] = torch.nan
        for given in (None, poison):
            total = hidden.clone()
            got = triton_layers.add_norm(total, addend, weight, 1e-2, given)
            expected = before.double() + addend.double()
            if given is not None:
                expected += given.double()[:, None]
            self._close(total, expected)
            self._close(got, normed(total.double(), weight, 1e-2))

    def check_rotate_heads(
        self, num_tokens: int, heads: tuple[int, int, int], dtype: torch.dtype, has_norm: bool
    ) -> None:
        """heads: of queries, of keys and values, and their size. Two tokens have numbers that are not finite."""
        num_heads, num_kv_heads, head_dim = heads
        generator = torch.Generator().manual_seed(num_heads)
        size = num_tokens, (num_heads + 2 * num_kv_heads) * head_dim
        features = with_gaps(torch.randn(size, generator=generator).to(self.device, dtype))
        angles = (torch.rand(num_tokens, 1, head_dim // 2, generator=generator) * 9).to(self.device)
        cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
        query_weight, key_weight = torch.rand(2, head_dim, generator=generator).to(self.device, dtype)
        weights = (query_weight, key_weight) if has_norm else None
        broken = {2: (num_heads * head_dim, torch.nan), 5: (features.shape[1] - 1, -torch.inf)}
        for token, (column, number) in broken.items():
            if token < num_tokens:
                features[token, column] = number
        before = features.clone()
        query, key, value, poison = triton_layers.rotate_heads(
            features, cos_sin, num_heads, num_kv_heads, weights, 1e-5
        )
        assert torch.equal(features.nan_to_num(7), before.nan_to_num(7))
        by_head = before.double().unflatten(1, (-1, head_dim))
        own_query, own_key, own_value = by_head.split((num_heads, num_kv_heads, num_kv_heads), 1)
        if weights is not None:
            own_query, own_key = normed(own_query, weights[0], 1e-5), normed(own_key, weights[1], 1e-5)
        own_query, own_key = rotated(own_query, cos_sin.double()), rotated(own_key, cos_sin.double())
        is_broken = torch.tensor([token in broken for token in range(num_tokens)], dtype=torch.bool, device=self.device)
        assert torch.equal(poison.isnan(), is_broken)
        assert not poison[~is_broken].any()
        own_key[is_broken], own_value = 0, own_value.clone()
        own_value[is_broken] = 0
        self._close(query, own_query)
        self._close(key, own_key)
        assert torch.equal(value.double(), own_value)

    def check_silu_mul(self, num_tokens: int, size: int, dtype: torch.dtype) -> None:
        numbers = torch.randn(num_tokens, 2 * size, generator=torch.Generator().manual_seed(1)) * 4
        gate_up = with_gaps(numbers.to(self.device, dtype))
        gate, up = gate_up.double().chunk(2, -1)
        self._close(triton_layers.silu_mul(gate_up), gate / (1 + (-gate).exp()) * up)

    def check_overflow(self) -> None:
        """A key that float16 cannot hold once it is rotated counts as not finite."""
        features = torch.full((1, 6), 60_000.0, dtype=torch.float16, device=self.device)
        angle = torch.tensor(-torch.pi / 4, device=self.device)
        cos_sin = torch.stack((angle.cos(), angle.sin())).reshape(1, 1, 2)
        _, key, value, poison = triton_layers.rotate_heads(features, cos_sin, 1, 1)
        assert poison.isnan().all()
        assert not key.any()
        assert not value.any()

    def _close(self, got: Tensor, expected: Tensor) -> None:
        """expected: float64."""
        limit = self.tolerances[got.dtype]
        torch.testing.assert_close(got.double(), expected, atol=limit, rtol=limit, equal_nan=True)
