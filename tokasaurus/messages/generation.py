"""What the server asks of the manager, and what comes back: requests in, sequence deltas out."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tokasaurus.messages.lifecycle import EngineStats

FinishReason = Literal["stop", "length"]

MAX_STOP_TOKEN_IDS = 16
"""Of one request."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn from the model's distribution.

    temperature: 0 is greedy.
    min_p: only tokens at least so likely as this times the likeliest may be drawn; 0 allows all.
    top_k: of those, only the so many most likely; 0 allows all.
    top_p: of those, only the most likely that together reach this share of their probability; 1 allows all.
    seed: unsigned 64 bits; the server draws one where the client gave none.
    presence_penalty, frequency_penalty, repetition_penalty, logit_bias: see LogitRules; greedy rows have them too.
    """

    temperature: float
    top_p: float
    seed: int
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def changes_logits(self) -> bool:
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0) or len(self.logit_bias) > 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """`num_sequences` independent completions of one prompt. Already validated: it fits the model and the KV pool.

    prompt_ids: int32 [P], P >= 1.
    max_new_tokens: at least 1, the eos token included; 0 where the log-probabilities of the prompt are all that is
    wanted.
    stop_strings: generation ends at the token whose text completes one of these.
    ignore_eos: eos does not end a sequence.
    want_logprobs: the log-probability of each chosen token is returned. num_top_logprobs: as well as those of the so
    many likeliest tokens at its place; at most the vocabulary, and 0 without want_logprobs.
    cache_salt: KV is shared only with requests of the same salt; "" is a salt like any other.
    stop_token_ids: at most MAX_STOP_TOKEN_IDS, each of which ends a sequence as eos does, ignore_eos or not.
    min_tokens: so many are generated before eos or one of these can be. The text of the first so many ends nothing, if
    it holds a stop string; one that goes beyond it does.
    is_streamed: its tokens are returned as they come, in any number of deltas.
    want_prompt_logprobs: PromptLogprobs are returned, with the num_top_prompt_logprobs likeliest tokens at each place.
    grammar: what the text of each completion must match from beginning to end, in llguidance's form; "" for anything.
    It goes before min_tokens and ignore_eos: a sequence ends with "stop" where nothing may follow, and without an eos
    token if its last token is such.
    """

    request_id: str
    prompt_ids: NDArray[np.int32]
    num_sequences: int
    max_new_tokens: int
    sampling: SamplingParams
    stop_strings: tuple[str, ...]
    ignore_eos: bool
    want_logprobs: bool
    cache_salt: str = ""
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    is_streamed: bool = False
    num_top_logprobs: int = 0
    want_prompt_logprobs: bool = False
    num_top_prompt_logprobs: int = 0
    grammar: str = ""


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """The client is gone: drop every sequence of the request. Unknown or finished ids are no error."""

    request_id: str


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The K likeliest tokens at the places of G sampled ones, whether these are among them or not.

    token_ids: int32 [G, K], the likeliest first. logprobs: float32 [G, K]; where the sampled token is among them, its
    value is the very one in SequenceDelta.logprobs.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """What the model says of the P tokens of a prompt, each by those before it; nothing of the first.

    logprobs: float32 [P], natural log, NaN at 0. ranks: int32 [P], 1 for the likeliest token, 0 at 0.
    top: [P, K], the likeliest tokens, with 0 and NaN at 0; where the prompt's own token is among them, its value is the
    very one in `logprobs`. None where K is 0.
    """

    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top: TopLogprobs | None


@dataclass(frozen=True, slots=True)
class SequenceDelta:
    """New tokens of one sequence since its last delta; a sequence that is not streamed has one delta, its last.

    token_ids: as sampled, the eos or stop string's tokens included; none that follows these is in any delta.
    logprobs: natural log, before temperature, one per token; None where not asked.
    top: of as many tokens; None without num_top_logprobs.
    finish_reason: set on the last delta of a sequence alone.
    num_cached_tokens: prompt tokens whose KV was there when the sequence first started, so that it read them.
    num_computed_tokens: prompt tokens that the sequence computed, each counted once. All others it read: the cached
    ones, and where it was preempted before its prompt was through, what it found cached when it came back.
    num_recomputed_tokens: tokens, of the prompt or sampled, that it computed again: it had had their KV before it was
    preempted.
    num_shared_tokens: of the prompt, the longest prefix that it attended to in a group (PrefixGroups) in any step.
    The last three are complete on the last delta alone.
    prompt_logprobs: on the first delta of a request's sequence 0, where they are wanted; else None.
    error: on the last delta of a sequence that had to be given up, because its grammar needs more work than is allowed
    or cannot be read: why, in one line. Its finish_reason means nothing then. "" on all others.
    """

    request_id: str
    sequence_index: int
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: FinishReason | None
    num_cached_tokens: int
    num_computed_tokens: int
    num_recomputed_tokens: int
    num_shared_tokens: int
    top: TopLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class EngineUpdate:
    """Everything that happened since the last update; `stats` already counts the finished sequences in `deltas`."""

    deltas: list[SequenceDelta]
    stats: EngineStats
