"""The likeliest tokens at each place of a sequence that asked for them, kept until they are sent."""

import numpy as np
from numpy.typing import NDArray

from tokasaurus.messages.generation import TopLogprobs


class KeptTop:
    """Those of every token that one sequence has sampled, whether before a preemption or since. count: of each."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._ids = bytearray()
        self._logprobs = bytearray()

    def append(self, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        """Of one token more; both at least `count` long, the likeliest first."""
        self._ids += token_ids[: self._count].tobytes()
        self._logprobs += logprobs[: self._count].tobytes()

    def part(self, start: int, end: int) -> TopLogprobs:
        """A copy of those of the tokens start to end."""
        own = slice(4 * self._count * start, 4 * self._count * end)
        ids = np.frombuffer(bytes(self._ids[own]), np.int32)
        logprobs = np.frombuffer(bytes(self._logprobs[own]), np.float32)
        assert len(ids) == self._count * (end - start), "one entry for each token"
        return TopLogprobs(ids.reshape(-1, self._count), logprobs.reshape(-1, self._count))
