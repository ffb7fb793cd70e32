"""A request that a caller waits for, and what collects its deltas."""

from dataclasses import dataclass, field
from typing import Protocol

from tokasaurus.messages.generation import GenerateRequest, SequenceDelta
from tokasaurus.server.engine_client.replica import Replica


class Collector(Protocol):
    """Collects the deltas of one call's requests. request_index: a request's position in the call."""

    def add(self, request_index: int, delta: SequenceDelta) -> None: ...

    def restart(self, request_index: int) -> bool:
        """Forget the request's deltas, because it will run again; False if the caller has received some already."""
        ...

    def fail(self, error: Exception) -> None:
        """Raise `error` where the caller waits."""
        ...


@dataclass(slots=True)
class PendingRequest:
    """A request that its caller is still waiting for."""

    request: GenerateRequest
    collector: Collector
    index: int
    """The request's index in the collector."""
    replica: Replica | None = None
    """Where it runs; None while no replica is up."""
    num_unfinished: int = field(init=False)
    """Number of its sequences that have not finished."""
    num_replays: int = 0
    """How often its replica has died."""
    has_failed: bool = False
    """Its caller gets an error, and will remove it."""

    def __post_init__(self) -> None:
        self.num_unfinished = self.request.num_sequences

    @property
    def num_tokens(self) -> int:
        """Prompt and completion of one of its sequences, at full length."""
        return len(self.request.prompt_ids) + self.request.max_new_tokens

    def fail(self, error: Exception) -> None:
        self.has_failed = True
        self.collector.fail(error)

    def restart(self) -> bool:
        """Start from the beginning; False if the caller has received a part of the answer already."""
        if not self.collector.restart(self.index):
            return False
        self.num_unfinished = self.request.num_sequences
        return True
