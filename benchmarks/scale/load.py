"""What clients ask: sessions, each of which sends its next request when the last one is answered."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.messages.sampling import SamplingParams

VOCABULARY = 49_000
"""Of the prompts' random ids: below the demo model's special tokens at the end of its vocabulary."""
FIRST_ID = 100


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a load. Ranges include both ends."""

    sessions: int
    """In all."""
    turns: int
    """Requests of each session, one after the other."""
    prefixes: int
    """Prompts begin with one of them: the first is the most common, the k-th comes up 1 / k ** skew times as often."""
    prefix_tokens: int
    suffix_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]
    skew: float = 1.0
    heavy_share: float = 0.5
    """Of the sessions: they are of one client. Each other session is a client of its own."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """What a session asks in one of its turns."""

    session: int
    turn: int
    client: str
    prefix: int
    suffix: NDArray[np.int32]
    answer_tokens: int
    prefix_tokens: int

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        return np.concatenate([_prefix_ids(self.prefix, self.prefix_tokens), self.suffix])

    def engine_request(self) -> GenerateRequest:
        name = f"{self.session}-{self.turn}"
        return GenerateRequest(
            request_id=name,
            prompt_ids=self.prompt_ids,
            num_sequences=1,
            max_new_tokens=self.answer_tokens,
            sampling=SamplingParams(),
            seed=1,
            stop_strings=(),
            ignore_eos=True,
            want_logprobs=False,
            client=self.client,
        )


HEAVY = "heavy"


def plan(shape: Shape, seed: int) -> list[list[PlannedRequest]]:
    """The requests of each session, in their order."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, shape.prefixes + 1) ** shape.skew
    chosen = rng.choice(shape.prefixes, (shape.sessions, shape.turns), p=weights / weights.sum())
    suffixes = rng.integers(shape.suffix_tokens[0], shape.suffix_tokens[1] + 1, (shape.sessions, shape.turns))
    answers = rng.integers(shape.answer_tokens[0], shape.answer_tokens[1] + 1, (shape.sessions, shape.turns))
    num_heavy = round(shape.heavy_share * shape.sessions)

    def make(session: int, turn: int) -> PlannedRequest:
        return PlannedRequest(
            session,
            turn,
            HEAVY if session < num_heavy else f"client-{session}",
            int(chosen[session, turn]),
            rng.integers(FIRST_ID, VOCABULARY, int(suffixes[session, turn]), dtype=np.int32),
            int(answers[session, turn]),
            shape.prefix_tokens,
        )

    return [[make(session, turn) for turn in range(shape.turns)] for session in range(shape.sessions)]


@lru_cache(maxsize=100_000)
def _prefix_ids(prefix: int, num_tokens: int) -> NDArray[np.int32]:
    return np.random.default_rng((7, prefix, num_tokens)).integers(FIRST_ID, VOCABULARY, num_tokens, dtype=np.int32)
