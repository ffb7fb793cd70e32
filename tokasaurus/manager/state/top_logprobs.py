"""Top-k logprobs of a sequence's sampled tokens, kept until they are sent."""

import numpy as np
from numpy.typing import NDArray

from tokasaurus.messages.generation import TopLogprobs


class KeptTop:
    """Top-k logprobs of every token that one sequence has sampled, kept across preemption. count: k."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._ids = bytearray()
        self._logprobs = bytearray()

    def append(self, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        """Add the top-k logprobs of the next token. Both arrays have at least `count` entries, most likely first."""
        self._ids += token_ids[: self._count].tobytes()
        self._logprobs += logprobs[: self._count].tobytes()

    def part(self, start: int, end: int) -> TopLogprobs:
        """A copy of the entries for sampled tokens `start` to before `end`."""
        own = slice(4 * self._count * start, 4 * self._count * end)
        ids = np.frombuffer(bytes(self._ids[own]), np.int32)
        logprobs = np.frombuffer(bytes(self._logprobs[own]), np.float32)
        assert len(ids) == self._count * (end - start), f"{len(ids)} top-k entries for tokens {start} to {end}"
        return TopLogprobs(ids.reshape(-1, self._count), logprobs.reshape(-1, self._count))
