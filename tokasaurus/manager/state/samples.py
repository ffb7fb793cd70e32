"""The samples of one request: sequences are created when the queue reaches them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tokasaurus.manager.state.sequence import Sequence
from tokasaurus.messages.generation import GenerateRequest


@dataclass(slots=True, eq=False)
class Samples:
    """A request's unfinished sequences. Creating 65,536 at once would take a third of a second."""

    request: GenerateRequest
    make: Callable[[int], Sequence]
    """Sample index -> a new sequence."""
    num_to_create: int
    """Waiting samples without a sequence, the last ones; 0 once the request is cancelled."""
    sequences: dict[Sequence, None] = field(default_factory=dict)
    """Sequences that were created and have not finished, in order of their index."""

    def create(self) -> Sequence:
        """The next sequence. Precondition: num_to_create is not 0."""
        sequence = self.make(self.request.num_sequences - self.num_to_create)
        self.num_to_create -= 1
        self.sequences[sequence] = None
        return sequence
