"""Run the layers with async tensor parallelism in forwards of many tokens, and plainly in the others."""

from torch import Tensor

from tokasaurus.model.attention.backend import AttentionBackend
from tokasaurus.model.attention.row_split import Attends
from tokasaurus.model.decoder import sequence_parallel
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.decoder.decoder import Decoder, LayerExecutor
from tokasaurus.model.execution.executors import CompiledExecutor
from tokasaurus.model.parallel.async_tp import FUSE_WITH_GEMMS, all_tokens, own_tokens
from tokasaurus.model.parallel.mesh import Mesh


class AsyncTPExecutor:
    """Two compiled variants of the layers, of which each forward uses one, according to its number of tokens.

    Every rank must see the same number, so that all choose the same variant.
    """

    always_on_kernels = False

    def __init__(
        self,
        model: Decoder,
        backend: AttentionBackend,
        plain: LayerExecutor,
        mesh: Mesh,
        compiler: Compiler,
        threshold: int,
    ) -> None:
        """plain: runs forwards of less than `threshold` tokens. Others must be padded to a multiple of tp_size."""
        self._plain = plain
        self._mesh = mesh
        self._threshold = threshold
        self._by_shards = CompiledExecutor(
            model, backend, compiler, plain, sequence_parallel.run_layers, FUSE_WITH_GEMMS
        )

    def run(self, hidden: Tensor, cos_sin: Tensor, attends: Attends) -> Tensor:
        if len(hidden) < self._threshold:
            return self._plain.run(hidden, cos_sin, attends)
        return all_tokens(self._by_shards.run(own_tokens(hidden, self._mesh), cos_sin, attends), self._mesh)
