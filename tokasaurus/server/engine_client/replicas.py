"""Data-parallel replicas: what the server knows of each, and which one the next request goes to."""

import asyncio
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat, takewhile

import numpy as np
from numpy.typing import NDArray

from tokasaurus.messages.channel import ReplicaConnection
from tokasaurus.messages.commands import EngineCommand
from tokasaurus.messages.generation import CancelRequest, GenerateRequest
from tokasaurus.messages.live import JobsLeft, LiveSample, TakeSample
from tokasaurus.messages.status import EngineLimits, EngineStats, StepCost

CHUNKS_PER_SIZE = 64
FIRST_CHUNK_TOKENS = 16
MAX_TOKENS = 1 << 32

# Chunks of 16 tokens up to token 1,024, then 64 of 64 tokens, 64 of 256 and so on: a prompt of 100,000 tokens has 292.
_SIZES = chain.from_iterable(repeat(FIRST_CHUNK_TOKENS * 4**level, CHUNKS_PER_SIZE) for level in range(16))
CHUNK_ENDS = tuple(takewhile(lambda end: end <= MAX_TOKENS, accumulate(_SIZES)))
"""Tokens up to the end of each chunk."""


def hash_prefixes(prompt_ids: NDArray[np.int32], salt: str) -> list[int]:
    """Hashes of the prompt's prefixes that end with a whole chunk, shortest first.

    prompt_ids: [N]. salt: prompts with different salts share no prefix.
    """
    data = prompt_ids.tobytes()
    hashes, prefix, begin = [], hash(salt), 0
    for tokens in CHUNK_ENDS[: bisect_right(CHUNK_ENDS, len(prompt_ids))]:
        end = tokens * prompt_ids.itemsize
        prefix = hash((prefix, data[begin:end]))
        hashes.append(prefix)
        begin = end
    return hashes


class PrefixIndex:
    """The prefixes of one replica's prompts, and the sessions that they are of. Forgets those not used for longest, as
    the replica's KV cache does.

    max_tokens: tokens of the KV cache. Completions are not counted, so the index may remember more than is cached.
    """

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens = 0
        """Tokens of all remembered prefixes; a shared prefix counts once."""
        self._max_tokens = max_tokens
        # Tokens of each prefix's last chunk, by hash; least recently used first. A prefix is used after the longer ones
        # that begin with it, and therefore forgotten after them.
        self._chunks: OrderedDict[int, int] = OrderedDict()
        self._sessions: OrderedDict[int, None] = OrderedDict()  # hashes of names; least recently used first

    def has_session(self, session: str) -> bool:
        """Whether the replica was sent a request of this session, as far as it is remembered."""
        return hash(session) in self._sessions

    def note_session(self, session: str) -> None:
        """The replica is sent a request of this session."""
        self._sessions[hash(session)] = None
        self._sessions.move_to_end(hash(session))
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def forget_session(self, session: str) -> None:
        """No more requests of this session are expected."""
        self._sessions.pop(hash(session), None)

    def num_cached_tokens(self, prefixes: list[int]) -> int:
        """Tokens of the longest of these prefixes that is remembered. prefixes: from `hash_prefixes`."""
        num_known = sum(1 for _ in takewhile(self._chunks.__contains__, prefixes))
        return CHUNK_ENDS[num_known - 1] if num_known else 0

    def add(self, prefixes: list[int]) -> None:
        """The replica is sent a prompt with these prefixes."""
        for index in range(len(prefixes) - 1, -1, -1):
            prefix = prefixes[index]
            if prefix not in self._chunks:
                tokens = CHUNK_ENDS[index] - (CHUNK_ENDS[index - 1] if index else 0)
                self._chunks[prefix] = tokens
                self.num_tokens += tokens
            self._chunks.move_to_end(prefix)
        while self.num_tokens > self._max_tokens:
            _, tokens = self._chunks.popitem(last=False)
            self.num_tokens -= tokens


@dataclass(slots=True, eq=False)
class Replica:
    """One replica: connected while its processes live, ready once its model is loaded."""

    connection: ReplicaConnection | None = None
    is_ready: bool = False
    limits: EngineLimits | None = None
    """The limits reported at its last start; None before its first start."""
    stats: EngineStats | None = None
    """None while it is not ready."""
    num_sampled_before: int | None = None
    """Tokens that it had sampled for servers before this one; None until its first update, which tells."""
    step_cost: StepCost | None = None
    """As it has reported last; None until it has."""
    update_number: int = 0
    """UpdateWeights.number of the weights that it had at its last start, or has been given since."""
    sample: LiveSample | None = None
    """Arrived, and not taken by a reader."""
    is_asked: bool = False
    """Whether a sample was asked for that has not arrived."""
    num_unfinished_sequences: int = 0
    num_starts: int = 0
    prefixes: PrefixIndex = field(default_factory=lambda: PrefixIndex(0))
    """Prefix index of the prompts that it was sent since its last start."""
    index: int = 0
    """Number of the replica, from 0."""

    _unsent: list[GenerateRequest | CancelRequest | TakeSample | JobsLeft | EngineCommand] = field(default_factory=list)

    def send(self, message: GenerateRequest | CancelRequest | TakeSample | JobsLeft | EngineCommand) -> None:
        """Send it with all others of this pass of the event loop, in order; nothing happens if it is lost by then."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_all)
        self._unsent.append(message)

    def _send_all(self) -> None:
        messages, self._unsent = self._unsent, []
        if self.connection is not None:
            self.connection.requests.send_many(messages)

    def start(self, limits: EngineLimits) -> None:
        """It is ready."""
        self.is_ready, self.limits = True, limits
        self.prefixes = PrefixIndex(limits.num_kv_tokens)
        self.stats = EngineStats(
            num_running=0,
            num_waiting=0,
            num_kv_blocks_used=0,
            num_kv_blocks_total=limits.num_kv_blocks,
            total_prompt_tokens=0,
            total_generation_tokens=0,
            worker_queue_depth=0,
        )


TOKENS_PER_SEQUENCE = 32
"""An unfinished sequence delays a request as much as the prefill of this many tokens."""

SESSION_SEQUENCES = 16
"""A replica that has a request's session counts as if it had this many unfinished sequences fewer, and all of the
prompt cached."""

MAX_SESSIONS = 65_536
"""Most sessions that are remembered of a replica."""


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """What the choice of a replica needs to know of a request."""

    num_tokens: int
    prefixes: list[int]
    """Hashes of the prompt's prefixes, from `hash_prefixes`."""
    session: str = ""

    def cost(self, index: PrefixIndex, num_sequences: int) -> tuple[int, int]:
        """Cost of sending the prompt to a replica; the replica with the least is the best.

        Compares first the tokens to compute before it is answered, then the tokens that the replica was sent. index: of
        the replica. num_sequences: unfinished there."""
        if self.session and index.has_session(self.session):
            num_uncached, num_sequences = 0, num_sequences - SESSION_SEQUENCES
        else:
            num_uncached = self.num_tokens - index.num_cached_tokens(self.prefixes)
        return num_uncached + TOKENS_PER_SEQUENCE * num_sequences, index.num_tokens

    def add_to(self, index: PrefixIndex) -> None:
        """The replica of the index is sent it."""
        index.add(self.prefixes)
        if self.session:
            index.note_session(self.session)


def choose_replica(replicas: Sequence[Replica], request: GenerateRequest) -> Replica:
    """The replica with most of the prompt cached, unless another is so much less busy that it is ready sooner.

    Among equals, the one that was sent the fewest tokens; among those, the first. The chosen one is expected to cache
    the prompt from now on. A replica that was sent the request's session counts as having all of the prompt, even if
    the prompt begins anew. replicas: at least one, all up.
    """
    if len(replicas) == 1:
        return replicas[0]  # hashing would be useless
    prefixes = hash_prefixes(request.prompt_ids, f"{request.adapter}:{request.cache_salt}")
    prompt = RoutedPrompt(len(request.prompt_ids), prefixes, request.session)
    replica = min(replicas, key=lambda one: prompt.cost(one.prefixes, one.num_unfinished_sequences))
    prompt.add_to(replica.prefixes)
    return replica
