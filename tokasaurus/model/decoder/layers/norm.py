"""Root-mean-square normalisation."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """Scales x [..., size] to unit mean square, then by a weight per channel. Source: arXiv 1910.07467."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self._size = size
        self.eps = eps
        self._float_weight: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (self._size,), self.weight.to(x.dtype), self.eps)

    @property
    def float_weight(self) -> Tensor:
        """The loaded weight in float32, as the CPU kernels read it; created at the first call."""
        if self._float_weight is None:
            self._float_weight = self.weight.data.float()
        return self._float_weight
