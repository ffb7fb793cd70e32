"""What the server knows of one replica."""

from dataclasses import dataclass, field

from tokasaurus.messages.lifecycle import EngineLimits, EngineStats
from tokasaurus.messages.replica_connection import ReplicaConnection
from tokasaurus.server.engine_client.prefix_index import PrefixIndex


@dataclass(slots=True, eq=False)
class Replica:
    """One replica: connected while its processes live, ready once its model is loaded."""

    connection: ReplicaConnection | None = None
    is_ready: bool = False
    limits: EngineLimits | None = None
    """The limits reported at its last start; None before its first start."""
    stats: EngineStats | None = None
    """None while it is not ready."""
    num_unfinished_sequences: int = 0
    num_starts: int = 0
    prefixes: PrefixIndex = field(default_factory=lambda: PrefixIndex(0))
    """Of the prompts that it was sent since its last start."""

    def start(self, limits: EngineLimits) -> None:
        """It is ready."""
        self.is_ready, self.limits = True, limits
        self.prefixes = PrefixIndex(limits.num_kv_blocks * limits.page_size)
        self.stats = EngineStats(
            num_running=0,
            num_waiting=0,
            num_kv_blocks_used=0,
            num_kv_blocks_total=limits.num_kv_blocks,
            total_prompt_tokens=0,
            total_generation_tokens=0,
            worker_queue_depth=0,
        )
