"""The position of a worker among the workers of its replica."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tokasaurus.checkpoint.spec import ExpertsSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tokasaurus.checkpoint import ModelInfo
    from tokasaurus.model.parallel.symmetric_all_reduce import SymmetricAllReduce

NUM_HIDDEN_BUFFERS = 2
"""Buffers of hidden states per direction: one step is computed while the next arrives, or while the last leaves."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Coordinates in the replica's grid of pipeline stages and tensor-parallel shards."""

    pp_rank: int = 0
    pp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    tp_group: ProcessGroup | None = None
    """The tensor-parallel ranks of this stage; None, and unused, if tp_size is 1."""
    whole_experts: bool = False
    """The flag ep; as resolved by `for_model`: whether each tensor-parallel rank has some of the experts, not a part of
    each."""
    all_reduce: SymmetricAllReduce | None = None
    """Sums over tp_group by symmetric memory; None if NCCL or gloo computes all sums."""
    previous_group: ProcessGroup | None = None
    """This rank and the one of the stage before, for hidden states; None on the first stage."""
    next_group: ProcessGroup | None = None
    """This rank and the one of the next stage, for hidden states; None on the last stage."""
    token_group: ProcessGroup | None = None
    """The ranks with this number in the last and the first stage, for sampled tokens; None on stages between them, and
    if pp_size is 1."""

    @classmethod
    def of_worker(cls, index: int, pp_size: int, tp_size: int, whole_experts: bool = False) -> Mesh:
        """index: among the workers of all replicas, (replica * pp_size + pp_rank) * tp_size + tp_rank."""
        return cls(index // tp_size % pp_size, pp_size, index % tp_size, tp_size, whole_experts=whole_experts)

    def for_model(self, info: ModelInfo) -> Mesh:
        """Ranks have whole experts too where these have a width, or blocks of quantised weights, that cannot be
        divided, but a number that can."""
        experts = [layer.mlp for layer in info.spec.layers if isinstance(layer.mlp, ExpertsSpec)]
        unit = self.tp_size * info.expert_block
        is_whole = self.whole_experts or (
            any(each.expert.width % unit for each in experts)
            and not any(each.router.num_experts % self.tp_size for each in experts)
        )
        return replace(self, whole_experts=is_whole and self.tp_size > 1)

    @property
    def world_rank(self) -> int:
        """Number of this rank among the workers of the replica."""
        return self.pp_rank * self.tp_size + self.tp_rank

    def name(self, process: str) -> str:
        """Name for people: `process`, with the coordinates that tell this rank from the others of the replica."""
        stage = [f"stage {self.pp_rank}"] if self.pp_size > 1 else []
        rank = [f"rank {self.tp_rank}"] if self.tp_size > 1 else []
        return ", ".join([process, *stage, *rank])

    @property
    def num_ranks(self) -> int:
        return self.pp_size * self.tp_size

    def check(self, info: ModelInfo) -> None:
        """Raises ValueError, which names the sizes, if the model cannot be divided among the ranks."""
        self.stage_layers(info)
        self.shard(info.num_heads, "attention heads")
        if info.is_native:
            self.kv_head_shard(info.num_kv_heads)
            if self.whole_experts and not info.spec.num_experts:
                raise ValueError("ep=T: the model has no experts")
            mlps, is_whole = info.spec.mlps, self.for_model(info).whole_experts
            for count in sorted({mlp.router.num_experts for mlp in mlps if is_whole and isinstance(mlp, ExpertsSpec)}):
                self.shard(count, "experts")
            for width in sorted({width for mlp in mlps for width in mlp.widths(is_whole)}):
                self.shard(width, "intermediate_size")
            for state in {layer.state for layer in info.spec.layers if layer.state is not None}:
                for name, count in state.units.items():
                    self.shard(count, name)
        else:
            if self.whole_experts:
                raise ValueError("ep=T: transformers' plan of the class divides its experts")
            self.shard(info.num_kv_heads, "KV heads")
        self.vocab_shard(info.vocab_size)

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def replies(self) -> bool:
        """Whether this worker is the one that sends sampled tokens to the manager."""
        return self.is_last_stage and self.tp_rank == 0

    @property
    def num_hidden_buffers(self) -> int:
        """Buffers of hidden states on this rank: NUM_HIDDEN_BUFFERS for each neighbouring stage."""
        return NUM_HIDDEN_BUFFERS * ((not self.is_first_stage) + (not self.is_last_stage))

    def stage_layers(self, info: ModelInfo) -> range:
        """Indices of the layers this stage runs: consecutive, so many that the slowest stage is as fast as possible.

        The LM head counts by its work, as so many layers of the last stage. The other stages' numbers of layers
        differ by at most one; the first ones have more. Raises ValueError if there are fewer layers than stages.
        """
        num_layers, num_others = info.num_layers, self.pp_size - 1
        if num_layers < self.pp_size:
            raise ValueError(f"pp_size={self.pp_size} is more than the model's {num_layers} layers")
        if num_others == 0:
            return range(num_layers)

        def slowest(num_last: int) -> float:
            """Layers' worth of the slowest stage, if the last has so many layers."""
            return max(-(-(num_layers - num_last) // num_others), num_last + info.head_layers)

        num_last = min(range(num_layers - num_others, 0, -1), key=slowest)  # the most of equally good ones
        if self.is_last_stage:
            return range(num_layers - num_last, num_layers)
        base, longer = divmod(num_layers - num_last, num_others)
        start = self.pp_rank * base + min(self.pp_rank, longer)
        return range(start, start + base + (1 if self.pp_rank < longer else 0))

    def shard(self, size: int, name: str) -> tuple[int, int]:
        """(start, length) of this rank's share of `size` units. Raises ValueError if tp_size does not divide `size`."""
        if size % self.tp_size:
            raise ValueError(f"{name} ({size}) cannot be divided among tp_size={self.tp_size}")
        length = size // self.tp_size
        return self.tp_rank * length, length

    def vocab_shard(self, vocab_size: int) -> tuple[int, int]:
        """(start, length) of this rank's token ids; lengths differ by at most one, and the first ranks have more.

        Raises ValueError if there are fewer token ids than ranks.
        """
        if vocab_size < self.tp_size:
            raise ValueError(f"vocabulary ({vocab_size}) cannot be divided among tp_size={self.tp_size}")
        base, longer = divmod(vocab_size, self.tp_size)
        start = self.tp_rank * base + min(self.tp_rank, longer)
        return start, base + (1 if self.tp_rank < longer else 0)

    def kv_head_shard(self, num_kv_heads: int) -> tuple[int, int]:
        """(start, length) of this rank's KV heads. With fewer heads than ranks, neighbouring ranks share a head."""
        if num_kv_heads < self.tp_size and self.tp_size % num_kv_heads == 0:
            return self.tp_rank * num_kv_heads // self.tp_size, 1
        return self.shard(num_kv_heads, "KV heads")
