"""Messages between the server and a manager: requests one way, sequence deltas the other."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Literal, NamedTuple, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from tokasaurus.messages.commands import FIRST_VERSIONS, CommandDone, WeightVersions
from tokasaurus.messages.forward import RoutedExperts
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.messages.status import EngineStats, StepCost

FinishReason = Literal["stop", "length", "abort"]
"""abort: ended by Pause or AbortRequests, with the tokens that it had."""

ErrorCode = Literal["grammar_too_complex", "numerical_error", "aborted"]
"""Why the engine aborts a sequence. grammar_too_complex: its grammar is invalid or exceeds a work limit.
numerical_error: the model computed NaN or infinity for it. aborted: by Pause or
AbortRequests, before there was anything to return."""

LogprobsMode = Literal["raw", "sampled"]
"""The distribution whose log-probabilities are returned with sampled tokens. raw: the model's own. sampled: the one
that the token is drawn from, after logit biases, penalties, masks, temperature and limits; for a greedy sequence, after
biases, penalties and masks. Log-probabilities of prompt tokens are always raw."""

LOGPROBS_MODES: tuple[LogprobsMode, ...] = get_args(LogprobsMode)

MAX_STOP_TOKEN_IDS = 16
"""Most stop token ids of one request."""


SAMPLING_DTYPE = np.dtype(
    [(name, {float: np.float32, int: np.int32}[kind]) for name, kind in get_type_hints(SamplingParams).items()]
)
"""SamplingParams as a row of an array: np.array(list of SamplingParams, SAMPLING_DTYPE). Every field has 4 bytes."""


@dataclass(frozen=True, slots=True)
class TokenFilter:
    """Which tokens a sequence may sample. Where none is left, it finishes with "stop"."""

    vocab_size: int
    """Vocabulary size of the model."""
    allowed: bytes | None = None
    """One bit for each token of the vocabulary, from the lowest bit of the first byte on: whether it may be sampled. At
    least one may. None: all may. As bits, since a hundred thousand ids would take milliseconds on their way."""
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that do not occur in the completion: the last token of one is not sampled after the others.
    None of them is empty."""

    @classmethod
    def of_ids(
        cls, vocab_size: int, allowed_ids: Sequence[int] | None, bad_sequences: tuple[tuple[int, ...], ...] = ()
    ) -> "TokenFilter":
        """allowed_ids: the only tokens that may be sampled; None: all."""
        if allowed_ids is None:
            return cls(vocab_size, None, bad_sequences)
        is_allowed = np.zeros(vocab_size, np.bool_)
        is_allowed[np.array(allowed_ids, np.int64)] = True
        return cls(vocab_size, np.packbits(is_allowed, bitorder="little").tobytes(), bad_sequences)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """`num_sequences` independent completions of one prompt. Already validated: it fits the model and the KV cache."""

    request_id: str
    prompt_ids: NDArray[np.int32]
    """int32 [P], P >= 1."""
    num_sequences: int
    max_new_tokens: int
    """At least 1, counting the eos token; 0 if only the prompt logprobs are wanted."""
    sampling: SamplingParams
    seed: int
    """Seed of the sampling noise, unsigned 64 bits; random if the client gave none."""
    stop_strings: tuple[str, ...]
    """Generation ends at the token whose text completes one of these."""
    ignore_eos: bool
    """eos does not end a sequence."""
    want_logprobs: bool
    """Return the log-probability of each sampled token."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias) pairs, added to the logits before penalties; they apply to greedy sampling too."""
    cache_salt: str = ""
    """KV is shared only between requests with equal salts; "" is a salt like any other."""
    stop_token_ids: tuple[int, ...] = ()
    """At most MAX_STOP_TOKEN_IDS. Each ends a sequence as eos does, even with ignore_eos."""
    min_tokens: int = 0
    """Tokens generated before eos or a stop token id is allowed. A stop string that lies entirely in the text of these
    tokens does not end the sequence; one that extends beyond them does."""
    is_streamed: bool = False
    """Return tokens as they are sampled, in any number of deltas."""
    num_top_logprobs: int = 0
    """Top-k logprobs returned with each sampled token: at most the vocabulary size; 0 without want_logprobs."""
    logprobs_mode: LogprobsMode = "raw"
    """Distribution of the logprobs and top-k logprobs of sampled tokens."""
    want_prompt_logprobs: bool = False
    """Return PromptLogprobs."""
    want_experts: bool = False
    """Return the experts of all tokens but a sequence's last, which is no input of the model. KV is shared only with
    requests that want them, too, so that they are known of cached tokens."""
    num_top_prompt_logprobs: int = 0
    """Top-k logprobs returned at each prompt position."""
    adapter: str = ""
    """Digest of a loaded adapter, which keeps it from being unloaded; "" for none. KV is shared only between requests
    with the same."""
    adapter_version: str = ""
    """With an adapter: the weight version of all tokens."""
    grammar: str = ""
    """Grammar that the whole text of each completion must match, in llguidance's form; "" allows any text.

    Takes precedence over min_tokens and ignore_eos: when the grammar allows no further token, the sequence finishes
    with "stop", without an eos token if its last token already completes the grammar."""
    client: str = ""
    """Who sent the request. Waiting sequences of different clients are admitted by turns."""
    priority: int = 0
    """Among the waiting sequences of one client, those with the lowest value are admitted first, unless others were
    added much earlier (SEQUENCES_PER_PRIORITY in the manager's queue)."""
    is_background: bool = False
    """Admitted while no sequence of another request waits, except background ones; under a constant load also after
    every 64 others. Not counted in the server's limits of the queue."""
    job: str = ""
    """The server's job that it belongs to; "" is none. Of requests of jobs, the manager reports about once a second how
    far their running sequences are, see SequenceProgress."""
    token_filter: TokenFilter | None = None
    """Applies beside a grammar, too."""
    shows_special: bool = False
    """The text has the special tokens, so stop strings may contain them."""
    session: str = ""
    """Requests of one session go to the same replica, while it is not much busier than others; "" is none."""
    arrived_s: float = 0.0
    """When the server had its body, by time.monotonic, which all processes of a machine share; 0: not measured."""
    kept: "tuple[SequenceDelta, ...]" = ()
    """What some of its sequences had when an earlier server stopped, one delta each. Such a sequence continues as after
    a preemption, or has ended if the delta has a finish_reason. Without want_prompt_logprobs and want_experts."""

    @property
    def num_kept_tokens(self) -> int:
        """Tokens in `kept`."""
        return sum(len(delta.token_ids) for delta in self.kept)

    def __reduce__(self) -> tuple[type["GenerateRequest"], tuple[object, ...]]:
        """Dataclasses with slots are pickled field by field, which takes several times as long."""
        return GenerateRequest, _request_fields(self)


_request_fields = attrgetter(*(field.name for field in fields(GenerateRequest)))


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """The client disconnected: abort every sequence of the request. Unknown and finished ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Top-k logprobs at G positions: the K most likely tokens, whether or not the sampled token is among them."""

    token_ids: NDArray[np.int32]
    """int32 [G, K], most likely first."""
    logprobs: NDArray[np.float32]
    """float32 [G, K]; if the sampled token is among them, its value is the same float as in SequenceDelta.logprobs.
    -inf for tokens that are impossible, where fewer than K are possible."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probability of each of a prompt's P tokens, given the tokens before it; the first token has none."""

    logprobs: NDArray[np.float32]
    """float32 [P], natural log; NaN at index 0."""
    ranks: NDArray[np.int32]
    """int32 [P], 1 for the most likely token; 0 at index 0."""
    top: TopLogprobs | None
    """[P, K], top-k logprobs; at index 0 the ids are 0 and the values NaN. If the prompt's own token is among the K,
    its value is the same float as in `logprobs`. None if K is 0."""


class SequenceTimes(NamedTuple):
    """When a sequence reached each phase of its life, by the manager's time.monotonic; 0: it never did."""

    admitted_s: float
    """First admission: until then it waited. Preemptions come later, and count as decoding or prefill."""
    first_token_s: float
    """The result with its first token came back from the worker."""
    ended_s: float
    num_tokens: int
    """Tokens of the whole completion."""


@dataclass(frozen=True, slots=True)
class SequenceDelta:
    """Tokens of one sequence since its previous delta. A sequence that is not streamed has a single delta.

    num_computed_tokens, num_recomputed_tokens and num_shared_tokens are complete only on the last delta.
    """

    request_id: str
    sequence_index: int
    token_ids: list[int]
    """The tokens as sampled, including the eos token or the tokens of the stop string; later tokens are in no delta."""
    logprobs: list[float] | None
    """One per token: natural log, finite, by the request's logprobs_mode. None if not wanted."""
    finish_reason: FinishReason | None
    """Set only on the last delta."""
    num_cached_tokens: int
    """Prompt tokens whose KV was already cached when the sequence first started."""
    num_computed_tokens: int
    """Prompt tokens that the sequence computed, each counted once. It read all others from the cache: when it first
    started, or when it was admitted again after a preemption during prefill."""
    num_recomputed_tokens: int
    """Prompt and sampled tokens computed again because a preemption had freed their KV."""
    num_shared_tokens: int
    """Length of the longest prompt prefix that the sequence attended to in a prefix group in any step."""
    top: TopLogprobs | None = None
    """Top-k logprobs of the same tokens; None without num_top_logprobs."""
    prompt_logprobs: PromptLogprobs | None = None
    """Prompt logprobs, on the first delta of a request's sequence 0 if wanted, else None."""
    error: str = ""
    """One line on the last delta of an aborted sequence; its finish_reason then has no meaning. "" on other deltas."""
    error_code: ErrorCode | None = None
    """The kind of `error`; None without one."""
    weight_versions: WeightVersions = FIRST_VERSIONS
    """Weight versions of the sequence's tokens; complete only on the last delta."""
    times: SequenceTimes | None = None
    """Times of the sequence, on the last delta; None if no manager had the sequence."""
    experts: RoutedExperts | None = None
    """[P + G - 1, layers, K], of P prompt tokens and all G sampled tokens but the last. On the last delta if wanted,
    None if the sequence has ended before its prompt was computed."""
    vector: NDArray[np.float32] | None = None
    """[D], on the last delta: the prompt's pooled hidden state or scores; None from a model that generates."""

    def __reduce__(self) -> tuple[type["SequenceDelta"], tuple[object, ...]]:
        """Pickle by positional arguments, as GenerateRequest does: otherwise writing takes nine times as long, reading
        twice."""
        return SequenceDelta, _delta_fields(self)


_delta_fields = attrgetter(*(field.name for field in fields(SequenceDelta)))


class SequenceProgress(NamedTuple):
    """How far a running sequence is."""

    request_id: str
    sequence_index: int
    num_tokens: int
    """Tokens sampled so far."""
    num_expected_tokens: int | None
    """Tokens that it is expected to have at its end; None while nothing is known about the lengths of completions."""


@dataclass(frozen=True, slots=True)
class EngineUpdate:
    """All changes since the last update; `stats` already includes the finished sequences in `deltas`."""

    deltas: list[SequenceDelta]
    stats: EngineStats
    progress: list[SequenceProgress] = field(default_factory=list)
    """Progress of the running sequences of jobs; empty in most updates."""
    done: list[CommandDone] = field(default_factory=list)
    step_cost: StepCost | None = None
    """With `progress`; None also while it is not known."""
