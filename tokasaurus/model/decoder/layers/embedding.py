"""Token embedding and LM head, both sharded by vocabulary over the tensor-parallel ranks."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.decoder.layers.linear import Linear
from tokasaurus.model.decoder.layers.norm import RMSNorm
from tokasaurus.model.decoder.weights import WeightShard
from tokasaurus.model.parallel.collectives import sum_over_shards
from tokasaurus.model.parallel.mesh import Mesh


class VocabShard(Linear):
    """Rows of a [vocab, E] matrix for this rank's range of token ids; serves as embedding, as LM head, or as both."""

    def __init__(self, info: ModelInfo, mesh: Mesh, dtype: torch.dtype) -> None:
        start, length = mesh.vocab_shard(info.vocab_size)
        super().__init__(info.hidden_size, length, bias=False, dtype=dtype)
        self._start = start
        self._length = length
        self._mesh = mesh
        self._shape = (info.vocab_size, info.hidden_size)
        self._logits: Tensor | None = None
        self._product: Callable[[Linear, Tensor, RMSNorm], Tensor] = Linear.__call__

    def compile_product(self, compiler: Compiler) -> None:
        """Compile norm and gemm, for any number of rows, unless they have been packed."""
        if not self.is_packed:
            self._product = compiler.compile(Linear.forward)

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> [T, E]."""
        if self._mesh.tp_size == 1:
            return self._rows(token_ids)
        local = token_ids - self._start
        elsewhere = (local < 0) | (local >= self._length)
        rows = self._rows(local.masked_fill(elsewhere, 0))
        return sum_over_shards(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self._mesh)

    def _rows(self, indices: Tensor) -> Tensor:
        return functional.embedding(indices, self.weight) if self.packed is None else self.packed.rows(indices)

    def reserve(self, num_rows: int) -> None:
        """Allocate memory for num_rows rows of logits, if the kernels compute them."""
        if self.packed is not None:
            self._logits = torch.zeros((num_rows, self._length), dtype=self.packed.activation_dtype)

    def logits(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """hidden [R, E], normalised by `norm` -> logits of this rank's token ids, [R, v], in its dtype. The next
        call may overwrite them."""
        if self.packed is None or not self.runs_on_kernels(hidden.shape[0]):
            return self._product(self, hidden, norm)
        # Keep the memory: an allocation of this size would go back to the system when freed, and allocating it again,
        # zeroed and page by page, would take a quarter of the gemm's time.
        if self._logits is None or len(self._logits) < len(hidden):
            self._logits = hidden.new_empty((len(hidden), self._length))
        return self.packed.multiply(hidden, (norm.float_weight, norm.eps), self._logits[: len(hidden)])

    def weight_shards(self, source: str) -> list[WeightShard]:
        rows = slice(self._start, self._start + self._length)
        return [WeightShard(source, self._shape, (rows, slice(None)), self.weight)]
