"""A request that a caller waits for, and what collects its deltas."""

from dataclasses import dataclass, field
from typing import Protocol

from tokasaurus.messages.generation import GenerateRequest, SequenceDelta, SequenceProgress
from tokasaurus.server.engine_client.replicas import Replica


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
    num_finished_tokens: int = 0
    """Tokens of its finished sequences, unless they are streamed."""
    progress: dict[int, SequenceProgress] = field(default_factory=dict)
    """The last report on each of its unfinished sequences, by index; of background requests only."""

    def __post_init__(self) -> None:
        self.num_unfinished = self.request.num_sequences

    @property
    def num_tokens(self) -> int:
        """Prompt and completion of one of its sequences, at full length."""
        return len(self.request.prompt_ids) + self.request.max_new_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all its sequences so far, by the last reports."""
        return self.num_finished_tokens + sum(progress.num_tokens for progress in self.progress.values())

    @property
    def num_expected_tokens(self) -> int | None:
        """Tokens that all its sequences will have at their ends; None while that is not known of one of them."""
        expected = [progress.num_expected_tokens for progress in self.progress.values()]
        known = [number for number in expected if number is not None]
        return self.num_finished_tokens + sum(known) if len(known) == self.num_unfinished else None

    def note_end(self, delta: SequenceDelta) -> None:
        """delta: the last of one of its sequences."""
        self.num_unfinished -= 1
        self.num_finished_tokens += len(delta.token_ids)
        self.progress.pop(delta.sequence_index, None)

    def fail(self, error: Exception) -> None:
        self.has_failed = True
        self.collector.fail(error)

    def restart(self) -> bool:
        """Start from the beginning; False if the caller has received a part of the answer already."""
        if not self.collector.restart(self.index):
            return False
        self.num_unfinished = self.request.num_sequences
        self.num_finished_tokens = 0
        self.progress.clear()
        return True
